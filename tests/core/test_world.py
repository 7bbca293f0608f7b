"""A bounded run of the random program over all features, and the same stories on both builds."""

from __future__ import annotations

import random
from types import ModuleType

import pytest

import blockyard

from ..support import seeds, source_only
from ..support.seeds import run_seed
from ..world import World, run_worlds

NUM_CALLS = 60_000 if blockyard.compiled() else 6_000
NUM_TWINS = 24
CALLS_A_TWIN = 80

#: What a run has to have done, or it proves less than it seems to.
EXERCISED = (
    "tokens hit",
    "mapped tokens hit",
    "blocks copied",
    "mapped blocks copied",
    "mapped blocks evicted",
    "contexts read",
    "contents told of",
    "blocks saved",
    "blocks loaded",
    "blocks swapped out",
    "blocks swapped in",
    "windows slid",
    "hits over a span",
    "cuts inside a span",
    "regrouped forks",
    "allocate_batch",
    "append",
    "reset",
    "right can_append",
    "hint accepted",
    "hint clipped",
    "hint refused",
    "hint unknown",
    "blocks evicted by a hint",
    "mapped blocks evicted by a hint",
    "swap_out: OutOfBlocks",
    "swap_in: OutOfBlocks",
    "allocate: OutOfBlocks",
    "allocate_batch: OutOfBlocks",
)


def test_every_context_reads_what_was_written() -> None:
    counts = run_worlds(blockyard, run_seed(), NUM_CALLS)
    named = ("worlds", "contexts read", "mapped tokens hit", "blocks loaded", "windows slid", "mapped blocks copied")
    seeds.lines.append("worlds: " + ", ".join(f"{counts[name]} {name}" for name in named))
    exercised = EXERCISED if blockyard.compiled() else ("contexts read", "mapped tokens hit", "windows slid")
    assert {name: counts[name] for name in exercised if counts[name] < 5} == {}


def test_a_wrong_slot_is_seen() -> None:
    """The program itself can fail: when every block holds something else than was written, the next step says so."""
    seen = 0
    for seed in range(60):
        world = World(blockyard, seed)
        world.run_calls(40)
        for memory in world.gpu.blocks:
            memory += 1
        seen += "wrong keys and values" in complaint(world)
    assert seen >= 20


def complaint(world: World) -> str:
    """What the world's steps find, at most thirty of them; nothing where no running sequence has a past to read."""
    for _ in range(30):
        try:
            world.step()
        except AssertionError as error:
            return str(error)
        except blockyard.BlockyardError:
            continue
    return ""


@pytest.mark.skipif(not blockyard.compiled(), reason="this build is interpreted itself")
def test_both_builds_tell_the_same_story(interpreted: ModuleType) -> None:
    for number in range(NUM_TWINS):
        seed = random.Random(run_seed()).randrange(2**32) + number
        ours, theirs = World(blockyard, seed), World(interpreted, seed)
        ours.run(CALLS_A_TWIN)
        theirs.run(CALLS_A_TWIN)
        for step, (one, other) in enumerate(zip(ours.story, theirs.story, strict=True)):
            assert one == other, f"seed {seed}, call {step}"
        assert ours.counts == theirs.counts, f"seed {seed}"


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    return source_only.load_interpreted()
