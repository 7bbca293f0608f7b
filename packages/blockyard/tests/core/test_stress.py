"""A short run of the stress test; `make stress` runs a million operations."""

from __future__ import annotations

import pytest

import blockyard
from blockyard_testing import seeds
from blockyard_testing.seeds import draws, run_seed

from ..stress import LargeWorld, run_stress

NUM_OPERATIONS = draws(100_000, 10_000)
#: Seeds of 1,000 operations in which all of it happens: some is rare in the few operations of an interpreted run.
EVENTFUL = (13, 187)
HAPPENS = (
    *("mapped blocks copied", "mapped blocks evicted", "mapped tokens hit", "regroup", "hint", "retain"),
    *("tokens hit", "blocks copied", "blocks evicted", "failed steps", "preempted", "misuse"),
    *("reserve: WAITS_FOR_PREFIX", "reserve: NO_BLOCKS", "abandon_step"),
)


def test_many_operations() -> None:
    counts = run_stress(run_seed(), NUM_OPERATIONS, num_worlds=25, check_every=500)
    for seed in EVENTFUL:
        counts += run_stress(seed, 1000, num_worlds=1)
    named = ("operations", "allocate", "reserve", "commit", "fork", "free", "reserve: WAITS_FOR_PREFIX", "tokens hit")
    seeds.lines.append("stress: " + ", ".join(f"{counts[name]} {name}" for name in named))
    assert counts["operations"] >= NUM_OPERATIONS
    assert [name for name in HAPPENS if not counts[name]] == []


def test_a_wrong_content_is_seen() -> None:
    """The stress test itself can fail: a store that loses a slot shows at the next look."""
    seen = 0
    for number in range(20):
        world = LargeWorld(blockyard, number)
        world.run_calls(60)
        if not any(seq.was_read and world.cache.num_computed_tokens(seq.handle) for seq in world.seqs):
            continue
        for memory in world.gpu.blocks:
            memory += 1
        with pytest.raises(AssertionError, match="wrong keys and values"):
            world.verify()
        seen += 1
    assert seen >= 10
