"""The lab's compiled loops compared with slow and obvious ones, and with published figures."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard.core.policies import POLICIES, make_policy
from blockyard.core.simulation.belady import Belady
from blockyard.core.simulation.policy_run import PolicyRun
from blockyard.core.simulation.seen import SeenContents
from blockyard.core.simulation.stack_distance import LRUStack
from blockyard_testing import lab_reference
from blockyard_testing.lab_reference import Requests, prefix_trace

SEEDS = range(20)
CAPACITIES = (0, 1, 2, 3, 5, 9, 17, 40, 1000)


def flat(requests: Requests) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """ids, starts, number of contents."""
    ids = [content for request in requests for content in request]
    starts = np.cumsum([0, *map(len, requests)]).astype(np.int64)
    return np.array(ids, np.int64), starts, max(ids) + 1


def policy_hits(requests: Requests, policy: str, capacity: int) -> int:
    ids, starts, num_contents = flat(requests)
    longest = max(map(len, requests))
    run = PolicyRun(make_policy(policy, capacity + longest + 1), capacity, num_contents, longest)
    run.run(ids, starts)
    return run.num_hits


def optimum_hits(requests: Requests, capacity: int) -> int:
    ids, starts, num_contents = flat(requests)
    optimum = Belady(capacity, ids, num_contents)
    optimum.run(starts)
    return optimum.num_hits


def stack_hits(requests: Requests) -> list[int]:
    """Hits at every capacity."""
    ids, starts, num_contents = flat(requests)
    stack = LRUStack(len(ids), num_contents)
    stack.run(ids, starts)
    return np.cumsum(np.array(stack.num_hits_at)).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_lru_and_lfu_match_slow_references(seed: int) -> None:
    requests = prefix_trace(seed, 60)
    for capacity in CAPACITIES:
        assert policy_hits(requests, "lru", capacity) == lab_reference.lru(requests, capacity)
        assert policy_hits(requests, "lfu", capacity) == lab_reference.lfu(requests, capacity)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_pass_gives_lru_at_every_capacity(seed: int) -> None:
    requests = prefix_trace(seed, 80)
    hits = stack_hits(requests)
    assert hits[0] == 0
    for capacity in range(1, len(hits)):
        assert hits[capacity] == lab_reference.lru(requests, capacity), capacity


@pytest.mark.parametrize("seed", SEEDS)
def test_an_id_may_have_several_parents(seed: int) -> None:
    """A trace may be malformed in this way; an id after a missing one does not hit."""
    rng = np.random.default_rng(seed)
    requests = [rng.permutation(12)[: rng.integers(1, 9)].tolist() for _ in range(60)]
    hits = stack_hits(requests)
    for capacity in CAPACITIES[1:]:
        expected = lab_reference.lru(requests, capacity)
        assert hits[min(capacity, len(hits) - 1)] == policy_hits(requests, "lru", capacity) == expected
        assert optimum_hits(requests, capacity) >= expected


@pytest.mark.parametrize("seed", SEEDS)
def test_belady_matches_a_slow_reference(seed: int) -> None:
    requests = prefix_trace(seed, 60)
    for capacity in CAPACITIES:
        assert optimum_hits(requests, capacity) == lab_reference.belady(requests, capacity)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_no_cache_hits_more_than_belady_and_one_hits_as_much(seed: int, capacity: int) -> None:
    requests = prefix_trace(seed, 9, branches=2, longest=3)
    assert optimum_hits(requests, capacity) == lab_reference.best_possible(requests, capacity)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_no_policy_passes_the_optimum(policy: str, seed: int) -> None:
    requests = prefix_trace(seed, 400, branches=4, longest=8)
    for capacity in CAPACITIES:
        assert policy_hits(requests, policy, capacity) <= optimum_hits(requests, capacity)


@pytest.mark.parametrize("policy", POLICIES)
def test_unlimited_cache_hits_everything_seen_before(policy: str) -> None:
    requests = prefix_trace(1, 200)
    seen: set[int] = set()
    before = 0
    for request in requests:
        before += sum(content in seen for content in request)
        seen.update(request)
    assert policy_hits(requests, policy, 2000) == optimum_hits(requests, 2000) == stack_hits(requests)[-1] == before


def test_a_request_may_name_an_id_twice() -> None:
    requests = [[0, 1, 0], [0, 1, 0, 2, 2], [0, 1, 0, 2, 2]]
    for policy in POLICIES:
        assert policy_hits(requests, policy, 3) == 8


# ---------------------------------------------------------------- contents seen before


def seen_in(requests: Requests, max_slots: int) -> tuple[list[int], SeenContents]:
    seen = SeenContents(max_slots)
    return [seen.add(np.array(request, np.int64)) for request in requests], seen


@pytest.mark.parametrize("seed", SEEDS)
def test_seen_contents_are_exact_while_they_fit(seed: int) -> None:
    requests = prefix_trace(seed, 3000, branches=6, longest=9)
    known: set[int] = set()
    expected = []
    for request in requests:
        expected.append(sum(1 for _ in lab_reference.leading(request, frozenset(known))))
        known.update(request)
    found, seen = seen_in(requests, 2**18)
    assert found == expected
    assert seen.num_references == sum(map(len, requests))
    assert seen.halvings == 0


def test_seen_contents_are_estimated_when_they_do_not_fit() -> None:
    rng = np.random.default_rng(3)
    requests = [rng.integers(0, 40_000, 50).tolist() for _ in range(2000)]
    _, all_of_it = seen_in(requests, 2**18)
    found, sampled = seen_in(requests, 2**12)
    assert sampled.halvings >= 4
    assert found[-1] == -1
    share, expected = (seen.num_seen / seen.num_references for seen in (sampled, all_of_it))
    assert abs(share - expected) < 0.05
