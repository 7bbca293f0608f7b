"""What the density policy is made of, and that what it learns makes a difference."""

from __future__ import annotations

import random

import numpy as np
import pytest
from librt.vecs import vec
from mypy_extensions import i64

from blockyard.core.policies import POLICIES
from blockyard.core.policies.learned.return_rates import (
    NUM_AGES,
    NUM_CLASSES,
    ReturnRates,
    chain_class,
    class_of,
    is_end_of,
    pack,
    shared_class,
    shared_of,
    time_of,
    turn_of,
)
from blockyard.core.policies.parts.keys import KeyRing, mix
from blockyard.core.simulation.policy_run import PolicyRun
from blockyard_testing.seeds import run_seed


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


@pytest.mark.parametrize("num_entries", [4, 16, 64])
@pytest.mark.parametrize("seed", [1, 2, run_seed()])
def test_the_memory_against_a_list(seed: int, num_entries: int) -> None:
    """It knows what was put latest, but of contents that share a row no more than four; no row forgets before that."""
    choose = random.Random(seed)
    tracked = KeyRing(num_entries)
    #: (key, number) in the order of their last use; the number is also the state.
    known: list[tuple[int, int]] = []
    keys = [0, 2**62 - 1, *(key * 2**55 for key in range(1, 100))]
    for number in range(2000):
        key = choose.choice(keys)
        assert [item for item in known if tracked.find(item[0]) < 0] == []
        assert (tracked.find(key) >= 0) == (key in dict(known))
        if key in dict(known):
            place = tracked.find(key)
            assert (tracked.key(place), tracked.state(place)) == (key, dict(known)[key])
            assert tracked.number(place) == dict(known)[key]
            tracked.forget(place)
            assert tracked.find(key) == -1
        known = [item for item in known if item[0] != key and item[1] > number - num_entries]
        same_row = [item for item in known if row_of(item[0], num_entries) == row_of(key, num_entries)]
        if len(same_row) == 4:
            known.remove(same_row[0])
        tracked.put(key, number)
        known.append((key, number))
        assert tracked.find(key) == tracked.place(number)


def row_of(key: int, num_entries: int) -> int:
    return (int(mix(key)) >> 5) % (num_entries // 4)


def test_the_first_content_stays_when_a_second_one_falls_into_its_row() -> None:
    """Every entry of an empty table names place 0, and so did those of the first content's row."""
    tracked = KeyRing(64)
    for state, key in enumerate((0, 2**62 - 1)):
        tracked.put(key, state)
    assert row_of(0, 64) == row_of(2**62 - 1, 64)
    assert [tracked.state(tracked.find(key)) for key in (0, 2**62 - 1)] == [0, 1]


def test_without_observations_all_is_worth_the_same() -> None:
    assert len(set(ReturnRates(1000, 1).worths())) == 1


def test_what_returns_late_is_worth_more_when_that_time_comes() -> None:
    rates = ReturnRates(1000, 1)
    for _ in range(20_000):
        for age in range(11):
            rates.count_entry(5 * NUM_AGES + age)
        rates.count_return(5 * NUM_AGES + 10)
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
