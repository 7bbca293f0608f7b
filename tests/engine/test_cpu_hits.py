"""Which hits lay in the CPU pool."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from blockyard import LayerGroup
from blockyard.engine import Engine, SamplingParams

from ..support.tiny_models import tiny_model

ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def serve(engine: Engine, first: int, num_tokens: int = 33) -> int:
    """Prompt tokens that the cache had."""
    prompt = [(first + place) % 120 for place in range(num_tokens)]
    return engine.generate([prompt], ONE_TOKEN)[0].num_cached_tokens


def test_hits_in_the_cpu_pool_are_told_apart() -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=14, block_size=4, max_num_seqs=2, num_cpu_blocks=60)
    assert serve(engine, 0) == 0
    assert serve(engine, 40) == 0
    assert engine.num_cpu_hit_tokens == 0
    assert serve(engine, 0) == 32, "some of its blocks were evicted, and came back"
    loaded = engine.num_cpu_hit_tokens
    assert 0 < loaded <= 32
    assert loaded % 4 == 0
    assert serve(engine, 0) == 32, "all of them are in the pool"
    assert engine.num_cpu_hit_tokens == loaded
    assert engine.cache.stats().num_hit_tokens == 64


def test_a_token_of_several_groups_counts_once() -> None:
    """Gemma's groups: windows and full attention."""
    engine = Engine(tiny_model("gemma2"), num_blocks=40, block_size=4, max_num_seqs=2, num_cpu_blocks=100)
    assert len(engine.cache.config.layer_groups) > 1
    assert all(isinstance(group, LayerGroup) for group in engine.cache.config.layer_groups)
    for first in (0, 40, 80):
        serve(engine, first, 60)
    hit = serve(engine, 0, 60)
    assert hit > 0
    assert 0 < engine.num_cpu_hit_tokens <= hit


def test_a_cache_without_a_cpu_pool_has_none() -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=40, block_size=4)
    assert serve(engine, 0) == 0
    assert serve(engine, 0) == 32
    assert engine.num_cpu_hit_tokens == 0
