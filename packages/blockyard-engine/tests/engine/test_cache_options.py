"""Options of an engine's cache, and the time that the engine passes to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import InvalidArgument
from blockyard.config import CACHE_OPTIONS, UNUSED_OPTIONS
from blockyard.tenants import Tenant
from blockyard_engine import Engine, SamplingParams
from blockyard_testing.hybrid_models import hybrid_model
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model, tokens_of

#: Options that do something without states, and those that need one.
EVERYTHING: dict[str, Any] = {
    "eviction_policy": "arc",
    "history_size": 50,
    "hash_seed": 7,
    "keep_evicted": False,
    "max_sessions": 100,
    "partial_hits": True,
    "residency_sample": 1,
    "retention_blocks": 5,
    "tenants": (Tenant("acme", min_blocks=2),),
    "track_misses": True,
    "watermark": 0.1,
}
OF_STATES: dict[str, Any] = {"state_order": "lru", "state_checkpoints": ("last",)}
WITHOUT_CACHING = {
    name: EVERYTHING[name] for name in EVERYTHING if name not in UNUSED_OPTIONS["enable_prefix_caching is False"]
}


def engine_with(options: Any, **others: Any) -> Engine:
    sizes = {"num_blocks": 30, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return Engine(tiny_model("llama-gqa"), cache_options=options, **{**sizes, **others})


def test_all_options_reach_the_config() -> None:
    assert tuple(sorted(EVERYTHING | OF_STATES)) == CACHE_OPTIONS
    config = engine_with(EVERYTHING).cache.config
    assert {name: config.option(name) for name in EVERYTHING} == EVERYTHING
    config = Engine(hybrid_model("qwen3_next"), num_blocks=200, block_size=4, cache_options=OF_STATES).cache.config
    assert {name: config.option(name) for name in OF_STATES} == OF_STATES


@pytest.mark.parametrize("name", sorted(OF_STATES))
def test_options_of_states_are_refused_for_a_model_without_any(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is .* does nothing"):
        engine_with({name: OF_STATES[name]})


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
def test_cache_options_change_no_token(caching: bool) -> None:
    """Prompts that share tokens up to the middle of a block, in a pool small enough to evict and preempt."""
    model = tiny_model("llama-gqa")
    engine = Engine(
        model,
        num_blocks=24,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=caching,
        cache_options=EVERYTHING if caching else WITHOUT_CACHING,
    )
    prompts = mixed_prompts((60, 51, 33, 70, 45, 52), shared=29)
    for _ in range(3):
        got = engine.generate(prompts, SamplingParams(max_tokens=20))
        assert tokens_of(got) == reference_tokens(model, prompts, 20)
        engine.cache.check()


def test_a_custom_policy_runs_in_the_engine() -> None:
    """A name or a callable, as for `CacheConfig`; the error for an unknown name lists the known ones."""
    assert engine_with({"eviction_policy": "density"}).generate([[5, 6, 7]])[0].completions
    with pytest.raises(InvalidArgument, match=r"fife.*must be one of"):
        engine_with({"eviction_policy": "fife"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 5}, "cache_options has 'num_blocks': 5; it may have eviction_policy, .*engine's own options"),
        ({"groups": ()}, "'groups'"),
        ({"watermark": 2}, "watermark is 2"),
        ([("watermark", 0.1)], "cache_options is a list; it must be a dict"),
    ],
)
def test_other_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        engine_with(options)


# ---------------------------------------------------------------- time


def ticks() -> Iterator[float]:
    """A clock that advances one second per step."""
    number = 100.0
    while True:
        yield number
        number += 1


def test_each_step_tells_the_cache_the_time() -> None:
    engine = engine_with({"history_size": 200, "residency_sample": 1}, clock=ticks().__next__)
    prompts = mixed_prompts((40, 41, 42, 43, 44, 45, 46, 47))
    engine.generate(prompts[:4], SamplingParams(max_tokens=6, ignore_eos=True))
    engine.generate(prompts[4:], SamplingParams(max_tokens=6, ignore_eos=True))
    engine.generate(prompts[:4], SamplingParams(max_tokens=6, ignore_eos=True))
    times = [event.time for event in engine.cache.history()]
    assert times == sorted(times)
    assert times[0] == 100
    assert len(set(times)) > 5
    residency = engine.cache.residency()
    assert residency.lifetime.num_samples == engine.cache.stats().num_evicted_blocks > 0
    assert 1 < residency.lifetime.mean < times[-1] - times[0]
    assert residency.idle_before_evict.mean < residency.lifetime.mean


def test_beam_searches_pass_the_time_too() -> None:
    engine = engine_with({"history_size": 20}, clock=ticks().__next__)
    engine.beam_search([5, 6, 7, 8], num_beams=2, max_tokens=4)
    assert {event.time for event in engine.cache.history()} == {100.0}


def test_retention_expires_by_the_clock() -> None:
    now = [10.0]
    engine = engine_with({"retention_blocks": 8}, clock=lambda: now[0])
    prompt = list(range(1, 34))
    engine.generate([prompt], SamplingParams(max_tokens=1))
    assert engine.cache.retain(prompt, priority=3, expires_at=60.0) == 4
    others = mixed_prompts((60, 60, 60, 60))
    engine.generate(others, SamplingParams(max_tokens=1))
    assert engine.generate([prompt], SamplingParams(max_tokens=1))[0].num_cached_tokens == 32
    now[0] = 61.0
    engine.generate(others, SamplingParams(max_tokens=1))
    assert engine.generate([prompt], SamplingParams(max_tokens=1))[0].num_cached_tokens < 32
