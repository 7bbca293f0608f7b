"""A part of `python -m tests.wires`: after one heartbeat the mirror is exact, whatever the network did."""

from __future__ import annotations

from blockyard_testing import seeds
from blockyard_testing.seeds import draws, run_seed

from ..wires import CALLS_A_WORLD, run_world, run_worlds

NUM_WORLDS = draws(180, 4)
#: Worlds in which, together, each of it happens, at least twice where it is rare.
EVENTFUL = (16, 17, 19, 20, 34, 37)


def test_after_a_heartbeat_the_mirror_is_the_cache() -> None:
    counts = run_worlds(NUM_WORLDS, CALLS_A_WORLD, run_seed())
    for seed in EVENTFUL:
        counts += run_world(seed, CALLS_A_WORLD)
    seeds.lines.append("wires: " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items())))
    happened = ("matches", "lost", "late", "doubled", "not heard", "replays cut", "restarts")
    happened += ("merged", "never whole", "whole without a snapshot")
    happened += (
        "unreadable",
        "unreadable in a replay",
        "answers of an earlier life",
        "answers dropped",
        "lives told apart",
    )
    assert all(counts[name] > 0 for name in happened), counts
