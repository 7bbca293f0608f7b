"""transformers' `generate_batch` on a pool: the same tokens, hits that are exact, and a whole pool behind it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from blockyard import BlockPool, InvalidArgument
from blockyard_engine.model import load_model
from blockyard_testing.hybrid_models import hybrid_model
from blockyard_testing.tiny_models import (
    WINDOWED,
    demo_model_or_skip,
    mixed_prompts,
    reference_tokens,
    tiny_model,
)
from engines.transformers_blocks import pooled_cache

SHARED = mixed_prompts((40, 33, 40, 57, 17, 35, 41, 33), shared=32)


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each prompt found."""
    found: list[int] = []
    search = PagedAttentionCache.search_prefix_match

    def counted(cache: Any, *arguments: Any) -> int:
        found.append(search(cache, *arguments))
        return found[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", counted)
    return found


def batch_tokens(model: Any, prompts: list[list[int]], max_tokens: int, **options: Any) -> list[list[int]]:
    own = {"num_blocks": 64, "page_size": 8, "max_batch_tokens": 64, "use_async_batching": False} | options
    ends = model.generation_config.eos_token_id
    generation = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=ends, pad_token_id=0)
    outputs = model.generate_batch(
        inputs=prompts, generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**own)
    )
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs.values()]


def require_empty(pools: list[BlockPool]) -> None:
    [pool] = pools
    pool.check()
    assert pool.num_used_blocks == 0
    assert pool.leases() == []


@pytest.mark.parametrize("num_blocks", [200, 20])
def test_tokens_are_those_of_generate(num_blocks: int, hits: list[int]) -> None:
    model = tiny_model("llama-gqa")
    with pooled_cache() as pools:
        assert batch_tokens(model, SHARED, 8, num_blocks=num_blocks) == reference_tokens(model, SHARED, 8)
    assert sum(hits) > 0
    assert all(found % 8 == 0 for found in hits)
    require_empty(pools)


def test_with_room_for_all_hits_are_those_of_transformers(hits: list[int]) -> None:
    model = tiny_model("llama-gqa")
    own = batch_tokens(model, SHARED, 6, num_blocks=200)
    theirs = list(hits)
    hits.clear()
    with pooled_cache():
        assert batch_tokens(model, SHARED, 6, num_blocks=200) == own
    assert hits == theirs


def test_without_sharing_nothing_is_cached(hits: list[int]) -> None:
    model = tiny_model("llama-gqa")
    with pooled_cache() as pools:
        tokens = batch_tokens(model, SHARED, 6, allow_block_sharing=False)
    assert tokens == reference_tokens(model, SHARED, 6)
    assert sum(hits) == 0
    require_empty(pools)


def test_pool_options_reach_the_pool() -> None:
    with pooled_cache(history_size=16) as pools:
        batch_tokens(tiny_model("llama-gqa"), SHARED, 2)
    assert pools[0].history()


def test_other_caches_are_as_they_were() -> None:
    model = tiny_model("llama-gqa")
    with pytest.raises(RuntimeError, match="in between"), pooled_cache() as pools:
        raise RuntimeError("in between")
    batch_tokens(model, SHARED[:2], 2)
    assert pools == []


@pytest.mark.parametrize("num_blocks", [64, 5])
def test_the_real_model(num_blocks: int) -> None:
    """With five blocks of 16 tokens one of the two prompts runs at a time, or is preempted and resumed."""
    model, tokenizer = load_model(demo_model_or_skip())
    text = "The museum opens at ten and closes at five. " * 4
    prompts = [tokenizer(text + end).input_ids for end in ("It is open from", "It is closed from")]
    options = {"page_size": 16, "num_blocks": num_blocks}
    with pooled_cache() as pools:
        assert batch_tokens(model, prompts, 6, **options) == reference_tokens(model, prompts, 6)
    require_empty(pools)


@pytest.mark.parametrize("shape", list(WINDOWED))
def test_models_with_windows_are_refused_by_name(shape: str) -> None:
    """Before anything is computed."""
    model = tiny_model(shape)
    with pooled_cache() as pools, pytest.raises(InvalidArgument, match=r"^the model has sliding_attention layers"):
        batch_tokens(model, SHARED[:2], 2)
    assert pools == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3_next", "linear_attention"), ("lfm2", "conv"), ("falcon_h1", "hybrid")],
)
def test_models_with_states_are_refused_by_the_kind_of_their_layers(name: str, kind: str) -> None:
    """transformers' own continuous batching has no cache for them either."""
    says = rf"^the model has {kind} layers, .*blockyard_engine"
    with pooled_cache() as pools, pytest.raises(InvalidArgument, match=says):
        batch_tokens(hybrid_model(name), SHARED[:2], 2)
    assert pools == []
