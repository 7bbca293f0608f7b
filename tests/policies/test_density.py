"""What the density policy is made of, and that what it learns makes a difference."""

from __future__ import annotations

import random

import numpy as np
import pytest
from librt.vecs import vec
from mypy_extensions import i64

from blockyard.core.policies import POLICIES
from blockyard.core.policies.fate import (
    NUM_CLASSES,
    chain_class,
    class_of,
    is_end_of,
    pack,
    shared_class,
    shared_of,
    time_of,
    turn_of,
)
from blockyard.core.policies.return_rates import NUM_AGES, ReturnRates
from blockyard.core.policies.tracked import Tracked
from blockyard.lab.simulation.policy_run import PolicyRun

from ..support.seeds import run_seed


@pytest.mark.parametrize("time", [0, 1, 2**46 - 1])
@pytest.mark.parametrize("end", [False, True])
def test_a_fate_is_unpacked_as_it_was_packed(time: int, end: bool) -> None:
    for kind, turn, shared in ((0, 0, 0), (19, 3, 255), (7, 2, 128)):
        state = pack(time, kind, turn, end, shared)
        assert (time_of(state), class_of(state), turn_of(state), is_end_of(state), shared_of(state)) == (
            (time, kind, turn, end, shared)
        )


def test_classes_do_not_overlap() -> None:
    chains = {int(chain_class(turn, added)) for turn in range(4) for added in (0, 1, 2, 4, 5, 31, 32, 999)}
    shared = {int(shared_class(number)) for number in range(1, 256)}
    assert chains == set(range(10))
    assert shared == set(range(12, NUM_CLASSES))


@pytest.mark.parametrize("seed", [1, 2, run_seed()])
def test_the_memory_against_a_list(seed: int) -> None:
    """What it finds is right and among the latest; it may forget early only where five keys fall into one row."""
    choose = random.Random(seed)
    tracked = Tracked(64)
    latest: list[tuple[int, int]] = []
    num_found = 0
    for state in range(3000):
        key = choose.randrange(100) * 2**55
        place = tracked.find(key)
        known = dict(latest[-64:]).get(key)
        if place >= 0:
            num_found += 1
            assert tracked.state(place) == known
            assert tracked.number(place) == max(number for number, item in enumerate(latest) if item[0] == key)
            assert tracked.key(place) == key
            tracked.forget(place)
            assert tracked.find(key) == -1
        tracked.put(key, state)
        latest.append((key, state))
        assert tracked.find(key) == tracked.place(state)
    assert num_found > 600


def test_without_observations_all_is_worth_the_same() -> None:
    assert len(set(ReturnRates(1000, 1).worths())) == 1


def test_what_returns_late_is_worth_more_when_that_time_comes() -> None:
    rates = ReturnRates(1000, 1)
    for _ in range(20_000):
        for age in range(11):
            rates.entered(5 * NUM_AGES + age)
        rates.returned(5 * NUM_AGES + 10)
    worths = list(rates.worths())[5 * NUM_AGES : 6 * NUM_AGES]
    assert worths[0] < worths[6] < worths[9] < worths[10]
    assert worths[11] < worths[10]


def test_part_of_a_loop_is_kept() -> None:
    """A loop of 1,200 blocks in a pool of 1,000: LRU hits nothing, this policy most of what can be hit."""
    ids = vec[i64](np.tile(np.arange(1200), 100))
    starts = vec[i64](np.arange(0, 120_001, 20))
    hits = {}
    for name in ("lru", "density"):
        run = PolicyRun(POLICIES[name](1021), 1000, 1200, 20)
        run.run(ids, starts)
        hits[name] = run.num_hits / 120_000
    assert hits["lru"] == 0
    assert hits["density"] > 0.5
