"""Hits in a request's result: tokens from the CPU pool, and the causes of misses."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from blockyard import LayerGroup
from blockyard_engine import Engine, GenerationResult, SamplingParams
from blockyard_testing.tiny_models import tiny_model

ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def result_of(engine: Engine, first: int, num_tokens: int = 33) -> GenerationResult:
    prompt = [(first + place) % 120 for place in range(num_tokens)]
    return engine.generate([prompt], ONE_TOKEN)[0]


def serve(engine: Engine, first: int, num_tokens: int = 33) -> int:
    """Return the cached prompt tokens."""
    before = engine.num_cpu_hit_tokens
    result = result_of(engine, first, num_tokens)
    assert result.num_cpu_cached_tokens == engine.num_cpu_hit_tokens - before
    return result.num_cached_tokens


def test_hits_in_the_cpu_pool_are_counted_separately() -> None:
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


def test_a_result_has_the_causes_of_its_misses() -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=14, block_size=4, cache_options={"track_misses": True})
    first, again = result_of(engine, 0).misses, result_of(engine, 0).misses
    result_of(engine, 40)
    evicted = result_of(engine, 0).misses
    assert first is not None
    assert again is not None
    assert evicted is not None
    assert (first.num_never_seen, first.num_tail) == (32, 1)
    assert (again.num_hit, again.num_tail) == (32, 1)
    assert evicted.num_evicted > 0
    assert evicted.num_hit + evicted.num_evicted == 32
    assert result_of(Engine(tiny_model("llama-gqa"), num_blocks=14, block_size=4), 0).misses is None


def test_a_preempted_request_keeps_the_causes_it_began_with() -> None:
    """Of two growing requests one is preempted: it later hits its own blocks, which do not count."""
    options = {"track_misses": True, "watermark": 0.0}
    engine = Engine(tiny_model("llama-gqa"), num_blocks=10, block_size=4, max_num_seqs=2, cache_options=options)
    prompts = [list(range(first, first + 13)) for first in (0, 40)]
    results = engine.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    assert sum(result.num_preemptions for result in results) > 0
    for result in results:
        assert result.misses is not None
        assert (result.misses.num_never_seen, result.misses.num_tail, result.misses.num_hit) == (12, 1, 0)
        assert result.misses.num_recomputed == 0
