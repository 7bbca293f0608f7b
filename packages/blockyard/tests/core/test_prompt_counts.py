"""Prompt tokens, hits and causes of misses are counted once a request, when it first computes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import LayerGroup, SeqStatus
from blockyard.answers import MissCauses
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt

KINDS: list[dict[str, Any]] = [
    {},
    {"groups": (LayerGroup(4), LayerGroup(4, 8))},
    {"num_cpu_blocks": 20},
    {"max_steps_in_flight": 2},
]


def tracked(num_blocks: int = 20, **settings: Any) -> Checked:
    return Checked(num_blocks, track_misses=True, **settings)


def counted(cache: Checked) -> tuple[int, int, int, int]:
    stats = cache.stats()
    totals = cache.miss_totals()
    assert totals.num_hit == stats.num_hit_tokens
    return stats.num_prompt_tokens, stats.num_hit_tokens, stats.num_resumed_tokens, stats.num_resumed_hit_tokens


def step(cache: Checked, seq: int, count: int | None = None) -> None:
    """Reserve and commit, whatever the number of steps in flight."""
    plan = cache.reserve([seq], count)
    assert plan.all_fit
    cache.commit([seq], plan.num_scheduled, None, step=plan.step or None)
    if plan.step:
        cache.end_step(plan.step)


@pytest.mark.parametrize("settings", KINDS)
def test_a_prompt_counts_when_it_first_computes_and_not_when_it_is_admitted(settings: dict[str, Any]) -> None:
    cache = tracked(**settings)
    seq = cache.allocate(prompt(1, 10))
    assert counted(cache) == (0, 0, 0, 0)
    step(cache, seq, 3)
    assert counted(cache) == (10, 0, 0, 0)
    step(cache, seq)
    cache.free(seq)
    again = cache.allocate(prompt(1, 10))
    assert counted(cache) == (10, 0, 0, 0)
    step(cache, again)
    assert counted(cache) == (20, 8, 0, 0)
    assert cache.miss_totals() == MissCauses(8, 4, 8, 0, 0, 0, -1)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_request_admitted_again_before_it_computes_counts_once(resumed: bool) -> None:
    cache = tracked()
    cache.free(cache.prefilled(prompt(1, 8)))
    before = counted(cache)
    for _ in range(3):
        seq = cache.allocate(prompt(1, 12), resumed=resumed)
        cache.reserve([seq], 4)  # another sequence of the step got no blocks, and this one is preempted for it
        cache.free(seq)
    assert counted(cache) == before
    seq = cache.allocate(prompt(1, 12), resumed=resumed)
    cache.compute(seq)
    added = tuple(after - old for after, old in zip(counted(cache), before, strict=True))
    assert added == ((0, 0, 12, 8) if resumed else (12, 8, 0, 0))


def test_a_step_that_failed_counts_nothing() -> None:
    cache = tracked()
    seq = cache.allocate(prompt(1, 10))
    cache.reserve([seq], 10)
    cache.commit([seq], 0)
    assert counted(cache) == (0, 0, 0, 0)
    cache.append([seq], [7])
    cache.compute(seq)
    assert counted(cache) == (10, 0, 0, 0), "what was appended is no prompt"


def test_a_hit_whose_producer_left_is_no_hit() -> None:
    """The waiter becomes the producer: the tokens were never cached, and its causes still add up."""
    cache = tracked()
    producer = cache.allocate(prompt(1, 12))
    waiter = cache.allocate(prompt(1, 12))
    assert cache.miss_causes(waiter).num_hit == 8
    assert cache.reserve([waiter], 4).status.tolist() == [SeqStatus.WAITS_FOR_PREFIX]
    cache.free(producer)
    assert cache.num_computed_tokens(waiter) == 0
    cache.compute(waiter)
    assert cache.miss_causes(waiter) == cache.miss_totals() == MissCauses(0, 4, 8, 0, 0, 0, -1)
    assert counted(cache) == (12, 0, 0, 0)


@pytest.mark.parametrize("call", ["fork", "truncate"])
def test_a_prompt_that_goes_on_without_computing_counts(call: str) -> None:
    """A prompt that is hit but for its last token can be forked, and cut, before it computes."""
    cache = tracked()
    cache.free(cache.prefilled(prompt(1, 8)))
    before = counted(cache)
    seq = cache.allocate(prompt(1, 9))
    if call == "fork":
        (child,) = cache.fork(seq)
        assert cache.miss_causes(child) == MissCauses(0, 0, 0, 0, 0, 0, -1)
        cache.free(seq)
        seq = child
    else:
        cache.truncate(seq, 6)
    assert counted(cache) == (before[0] + 9, before[1] + 8, 0, 0)
    cache.append([seq], [5])
    cache.compute(seq)
    assert counted(cache) == (before[0] + 9, before[1] + 8, 0, 0), "once"


@pytest.mark.parametrize("settings", [*KINDS[:3], {"partial_hits": True}])
def test_at_random_every_request_that_computes_is_counted_once(settings: dict[str, Any]) -> None:
    source = random.Random(run_seed())
    cache = tracked(24, **settings)
    asked = hit = resumed_tokens = 0
    for _ in range(60):
        tokens = [source.choice((1, 1, 2)) for _ in range(source.randint(1, 24))]
        resumed = source.random() < 0.3
        for _ in range(source.randrange(3)):
            seq = cache.allocate(tokens, resumed=resumed)
            if source.random() < 0.5:
                cache.reserve([seq])
            cache.free(seq)
        seq = cache.allocate(tokens, resumed=resumed)
        num_hit = int(cache.num_computed_tokens(seq))
        if source.random() < 0.8:
            while cache.num_computed_tokens(seq) < len(tokens):
                left = len(tokens) - int(cache.num_computed_tokens(seq))
                cache.compute_some(seq, source.randint(1, left))
            asked += 0 if resumed else len(tokens)
            hit += 0 if resumed else num_hit
            resumed_tokens += len(tokens) if resumed else 0
        cache.free(seq)
    assert counted(cache)[:3] == (asked, hit, resumed_tokens)
    totals = cache.miss_totals()
    missed = sum(totals.missed.values())
    assert missed + totals.num_hit == asked + resumed_tokens - cache.stats().num_resumed_hit_tokens
