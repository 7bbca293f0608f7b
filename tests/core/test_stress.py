"""A short run of the stress test; `make stress` runs a million operations."""

from __future__ import annotations

import random

import pytest

import blockyard

from ..stress import Broken, Stress, random_config, run_stress
from ..support import seeds
from ..support.seeds import run_seed

NUM_OPERATIONS = 50_000 if blockyard.compiled() else 10_000
#: Seed of 400 operations in which all of it happens: with the few of an interpreted run, one in 10,000 has no refusal.
EVENTFUL = 18


def test_fifty_thousand_operations() -> None:
    counts = run_stress(EVENTFUL, 400, num_managers=1) + run_stress(
        run_seed(), NUM_OPERATIONS, num_managers=25, check_every=500
    )
    named = ("operations", "allocate", "reserve", "commit", "fork", "free", "waits", "tokens hit")
    seeds.lines.append("stress: " + ", ".join(f"{counts[name]} {name}" for name in named))
    assert counts["operations"] >= NUM_OPERATIONS
    for name in ("tokens hit", "blocks copied", "blocks evicted", "waits", "no blocks", "failed steps", "preempted"):
        assert counts[name] > 0, name


def test_a_wrong_content_is_seen() -> None:
    """The stress test itself can fail: a store that loses a slot shows at the next look."""
    for number in range(20):
        stress = Stress(random_config(random.Random(number)), number)
        while not any(track.proved and stress.num_computed(track) for track in stress.running):
            stress.arrive()
            stress.step()
        stress.verify()
        track = next(track for track in stress.running if track.proved and stress.num_computed(track))
        stress.store[stress.cache.block_ids(track.handle)[0] * stress.config.block_size] += 1
        with pytest.raises(Broken, match="lost what it had computed"):
            stress.verify()
