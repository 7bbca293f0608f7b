"""Options through additional_config["blockyard"], causes of misses and events, through vLLM's scheduler."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import generate_latest
from vllm.config.kv_events import KVEventsConfig

from blockyard_vllm.misses import counter

from .engine import LEVELS, Engine, request_of
from .test_programs import Program


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "lru"}, "has 'policy'; it may have level, eviction_policy"),
        ({"eviction_policy": "best"}, "eviction_policy is 'best'; it must be one of arc"),
        ({"level": "names", "residency_sample": 4}, "residency_sample needs level 'tokens', but this is 'names'"),
        ({"level": "names", "retention_blocks": 4}, "retention_blocks needs level 'tokens', but this is 'names'"),
        ({"level": "names", "events": "tcp://127.0.0.1:*"}, "as requested\\); use vLLM's --kv-events-config"),
        ({"events": 5557}, "events is 5557; it must be an address"),
        ({"events": "tcp://127.0.0.1:port"}, "it must end with a port"),
        ({"miss_causes": -1}, "miss_causes is -1; it must be an integer from 0"),
        ({"level": "names", "admission": "room"}, "admission needs level 'tokens', but this is 'names'"),
        ({"admission": "lifo"}, "admission is 'lifo'; it must be one of arrival, fewest, room"),
        ({"admission": "room", "admission_lane": 0}, "admission_lane is 0; it must be a number from 1"),
        ({"retention_blocks": "4"}, "retention_blocks is '4'; it must be an integer from 0"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        Engine("tokens", 20, options=options)


def served(engine: Engine, name: str, tokens: list[int], salt: str | None = None) -> None:
    """Serve one request from beginning to end."""
    engine.add(request_of(name, tokens, 1, salt=salt))
    engine.drain()


def seen(totals: dict[str, int]) -> dict[str, int]:
    """Return the causes counted so far."""
    return {cause: tokens for cause, tokens in totals.items() if tokens}


@pytest.mark.parametrize("level", LEVELS)
def test_every_prompt_token_has_a_cause(level: str) -> None:
    """20 blocks: prompts that the flood evicts miss with the cause "evicted", and each token has one cause."""
    before = {sample.labels["cause"]: sample.value for sample in samples()}
    engine = Engine(level, 21, options={"miss_causes": 1000})
    first = list(range(40))
    misses = engine.manager.misses
    totals = misses.totals
    served(engine, "a", first)
    assert seen(totals) == {"never_seen": 32, "tail": 8}
    served(engine, "b", first)
    assert seen(totals) == {"hit": 32, "never_seen": 32, "tail": 16}
    served(engine, "flood", list(range(1000, 1320)))
    served(engine, "c", first)
    assert seen(totals) == {"hit": 32, "evicted": 32, "never_seen": 32 + 304, "tail": 16 + 16 + 8}
    served(engine, "salted", first, "tenant")
    assert totals["other_keys"] == 32
    assert engine.scheduler.reset_prefix_cache()
    served(engine, "d", first)
    assert totals["reset"] == 32
    assert sum(totals.values()) == engine.queries
    assert totals["hit"] == engine.hits
    after = {sample.labels["cause"]: sample.value for sample in samples()}
    assert {cause: after[cause] - before[cause] for cause in totals} == totals
    assert b'blockyard:prompt_tokens_total{cause="evicted"}' in generate_latest()
    engine.require_empty()


@pytest.mark.parametrize("level", LEVELS)
def test_skipped_lookup_counts_nothing(level: str) -> None:
    """A request for the prompt's log-probabilities never hits; vLLM does not count it either."""
    engine = Engine(level, 41, options={"miss_causes": 1000})
    served(engine, "a", list(range(40)))
    request = request_of("b", list(range(40)), 1)
    request.skip_reading_prefix_cache = True
    engine.add(request)
    engine.drain()
    assert sum(engine.manager.misses.totals.values()) == engine.queries == 40
    engine.require_empty()


def samples() -> list[Any]:
    """Return the counter's samples, without their creation times."""
    return [sample for metric in counter().collect() for sample in metric.samples if sample.name.endswith("_total")]


@pytest.mark.parametrize("level", LEVELS)
def test_causes_add_up_under_random_programs(level: str) -> None:
    """With preemptions, aborts and resets: every prompt token that vLLM counts has one cause, and hits are vLLM's."""
    engine = Engine(level, 60, max_model_len=512, max_num_batched_tokens=128, options={"miss_causes": 50})
    Program(7, [engine]).run(300)
    misses = engine.manager.misses
    assert sum(misses.totals.values()) == engine.queries
    assert misses.totals["hit"] == engine.hits > 0
    assert misses.totals["evicted"] > 0
    assert len(misses.removed) <= 50


def test_retained_blocks_outlive_a_flood() -> None:
    """Through the pool, as docs/vllm.md says."""
    hits = []
    for retained in (0, 2):
        engine = Engine("tokens", 21, options={"retention_blocks": 8})
        served(engine, "a", list(range(40)))
        if retained:
            assert engine.pool.retain(list(range(32))) == retained
        for start in (1000, 2000):
            served(engine, f"flood {start}", list(range(start, start + 288)))
        served(engine, "b", list(range(40)))
        hits.append(engine.hits)
        engine.require_empty()
    assert hits == [0, 32]


def test_residency_is_sampled() -> None:
    engine = Engine("tokens", 21, options={"residency_sample": 8})
    for number in range(20):
        served(engine, f"r{number}", [*range(number, number + 40)])
    assert engine.pool.residency().lifetime.num_samples > 0
    engine.require_empty()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [50, 300])
def test_events_equal_vllms(seed: int, num_blocks: int) -> None:
    """Under a random program both levels give vLLM's publisher the same events in the same order as stock."""
    events: dict[str, list[Any]] = {}
    engines = []
    for level in ("stock", *LEVELS):
        settings = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        engine = Engine(level, num_blocks, max_model_len=512, max_num_batched_tokens=128, events=settings)
        collect(engine, events.setdefault(level, []))
        engines.append(engine)
    Program(seed, engines).run(150)
    for engine in engines:
        engine.manager.take_events()  # of the reset at the end
    assert {type(event).__name__ for event in events["stock"]} >= {"BlockStored", "AllBlocksCleared"}
    assert num_blocks > 50 or any(type(event).__name__ == "BlockRemoved" for event in events["stock"])
    assert events["tokens"] == events["stock"]
    assert events["names"] == events["stock"]


def collect(engine: Engine, into: list[Any]) -> None:
    """Keep what the scheduler takes to publish."""
    take = engine.manager.take_events

    def taken() -> list[Any]:
        found = take()
        into.extend(found)
        return list(found)

    engine.manager.take_events = taken
