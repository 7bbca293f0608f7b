"""States through the real manager hit what the simulation says, request by request."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from benchmarks.state_rules.replay import StateReplay

from blockyard import InvalidArgument
from blockyard_lab import StateRun
from blockyard_testing import seeds
from blockyard_testing.state_loads import Keys, Request, chats, pattern

PLACES = [
    ("branch", "ends", "pow2"),
    ("branch", "ends"),
    ("last",),
    ("every:64", "branch"),
]


def replay(
    run: StateRun | StateReplay, requests: list[Request], *, tells: bool = False, hints: random.Random | None = None
) -> list[int]:
    """hints: draws whose turn a request is, and which sessions are said to be over, truly or not."""
    keys, hits = Keys(), []
    for request in requests:
        num_prompt, requested = len(request.prompt), request.requested if tells else []
        found = keys.of(request.prompt + request.output)
        session = 0
        if hints is not None:
            session = hints.choice([0, request.prompt[len(request.prompt) // 2] % 5 + 1])
            if hints.random() < 0.4:
                run.over(hints.randrange(1, 6))
        hits.append(run.request(found, num_prompt, num_prompt + len(request.output), requested, [], session))
    return hits


def compare(draw: random.Random, order: str, count: int) -> None:
    for _ in range(count):
        requests = chats(draw.randrange(2**30), 60)
        places, tells = draw.choice(PLACES), draw.random() < 0.5
        state_tokens, budget = draw.choice([16, 96, 800]), draw.choice([3200, 9600, 40_000])
        run = StateRun(order, places, state_tokens, budget, memory=1000)
        real = StateReplay(order, places, state_tokens, budget, room=2000)
        seed = draw.choice([None, draw.randrange(2**30)])
        simulated, found = (
            replay(each, requests, tells=tells, hints=None if seed is None else random.Random(seed))
            for each in (run, real)
        )
        assert found == simulated, (places, state_tokens, budget, seed)
        real.cache.check()


@pytest.mark.parametrize("order", ["lru", "index"])
def test_the_manager_hits_what_the_simulation_does(order: str) -> None:
    compare(random.Random(f"20261124 {order}"), order, seeds.draws(30, 2))


def test_of_equal_states_the_one_goes_that_was_used_longest_ago() -> None:
    """Of equal score and equal length it was the one that stood first in a list, which manager and simulation order
    differently: one request of 60 hit 656 tokens in one and 528 in the other."""
    compare(random.Random("1811506596 value"), "index", 10)


@pytest.mark.parametrize("order", ["lru", "index"])
def test_requests_that_run_in_the_budget_stay_in_it(order: str) -> None:
    draw = random.Random(f"{seeds.run_seed()} {order} inside")
    for _ in range(seeds.draws(15, 1)):
        budget = draw.choice([3200, 9600])
        real = StateReplay(order, PLACES[0], draw.choice([16, 96, 800]), budget)
        replay(real, chats(draw.randrange(2**30), 60))
        real.cache.check()
        assert real.cache.num_free_blocks == budget // 16


def test_a_state_that_would_go_at_once_is_not_written_and_the_plan_says_where() -> None:
    fresh = [Request([10**6 * number + token for token in range(640)], [1], []) for number in range(1, 60)]
    real = StateReplay("index", ("ends", "pow2"), 1600, 4800)
    replay(real, fresh)
    refused = real.cache.stats().num_refused_states
    assert refused > 0
    told: list[int] = []
    seq = real.cache.allocate(list(range(5 * 10**8, 5 * 10**8 + 640)))
    while real.cache.num_computed_tokens(seq) < 640:
        plan = real.cache.reserve([seq])
        told += plan.states.refused[:, 1].tolist()
        assert not {tuple(place) for place in plan.states.refused.tolist()} & set(
            zip(plan.states.saves.tolist(), plan.states.save_positions.tolist(), strict=True)
        )
        real.cache.commit([seq], int(plan.num_scheduled[0]))
    assert real.cache.stats().num_refused_states - refused == len(told) > 0
    real.cache.free(seq)
    # To the order it is one that went at once, so that its class learns what it would have hit.
    registry = real.cache._parts.states.registry
    dropped = {int(each.position) for each in registry._known if not each.is_cached and each.last_used == registry.now}
    assert dropped >= set(told)


def test_in_the_budget_it_writes_fewer_states_than_two_a_request() -> None:
    """Free blocks that the next request takes are no room: a state that would go then is not written now."""
    requests = chats(1, 400)
    run, real = (make("index", PLACES[0], 400, 12_000) for make in (StateRun, StateReplay))
    hits = [sum(replay(each, requests)) for each in (run, real)]
    assert hits[1] >= 0.95 * hits[0]
    assert real.num_written <= 1.5 * len(requests)


@pytest.mark.parametrize(("shared", "unique"), [(1600, 600), (1500, 700)])
def test_of_64_prompts_that_begin_alike_all_but_the_first_hit(shared: int, unique: int) -> None:
    real = StateReplay("index", PLACES[0], 3152, 400_000, max_model_len=4096)
    assert replay(real, pattern(shared, unique)) == [0, 1024] + [shared // 16 * 16] * 62


def test_told_by_the_application_all_is_hit_from_the_second_request() -> None:
    real = StateReplay("index", PLACES[0], 3152, 400_000, max_model_len=4096)
    assert replay(real, pattern(1500, 700, 6), tells=True) == [0] + [1488] * 5


@pytest.mark.parametrize("make", [StateRun, StateReplay])
def test_a_session_is_a_number_from_1_on(make: Any) -> None:
    """-1 stood for what several sessions have used: all of it was said to be over."""
    run, keys = make("lru", PLACES[1], 16, 3200), np.arange(1, 5)

    def request(session: Any) -> int:
        return int(run.request(keys, 64, 64, [], [], session))

    assert [request(1), request(2)] == [0, 48]
    for session in (-1, 2**62 + 1, 2**70):
        with pytest.raises(InvalidArgument, match=r"session is .*; it must be"):
            run.over(session)
        with pytest.raises(InvalidArgument, match=r"session is .*; it must be"):
            request(session)
    with pytest.raises(InvalidArgument, match="session is 0; it must be from 1 to"):
        run.over(0)
    if make is StateRun:
        assert not [state for state in run.registry._known if state.is_over]
    for session in (2**62, 7):  # of which nothing is known
        run.over(session)
    assert request(2**62) == 48
