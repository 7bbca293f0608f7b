"""A bounded run of the random program over all features, and the same stories on both builds."""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import blockyard
from blockyard_testing import seeds, source_only
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.twin import plain, whole_state
from blockyard_testing.world import World, run_worlds

NUM_CALLS = draws(60_000, 6_000)
NUM_TWINS = draws(48, 24)
#: Seeds of worlds in which all that must have happened does, the rare as well.
EVENTFUL = (
    *(320, 437, 79, 308, 174, 109, 105, 138, 65, 148, 157, 242, 291, 1, 57, 394, 1027, 715),
    *(2010, 2019, 2051, 2113, 2123),
)
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
    "hint refused",
    "hint unknown",
    "blocks evicted by a hint",
    "mapped blocks evicted by a hint",
    "retentions evicted",
    "retentions expired",
    "retentions released",
    "retentions dropped",
    "swap_out: OutOfBlocks",
    "swap_in: OutOfBlocks",
    "allocate: OutOfBlocks",
    "allocate_batch: OutOfBlocks",
)


def test_every_context_reads_what_was_written() -> None:
    counts = run_worlds(blockyard, run_seed(), NUM_CALLS)
    for seed in EVENTFUL:
        counts += run_worlds(blockyard, seed, 150)
    named = ("worlds", "contexts read", "mapped tokens hit", "blocks loaded", "windows slid", "mapped blocks copied")
    seeds.lines.append("worlds: " + ", ".join(f"{counts[name]} {name}" for name in named))
    assert {name: counts[name] for name in EXERCISED if counts[name] < 5} == {}


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


class TwinWorld(World):
    """A world that tells all that its cache shows, hostile calls and their sentences included."""

    def actors(self) -> list[tuple[Any, float]]:
        return [*super().actors(), (self.misuse, 5)]

    def choose_config(self) -> Any:
        config = replace(super().choose_config(), hash_seed=self.seed)
        return config if self.seed % 4 else replace(config, groups=(), block_size=16, max_model_len=100)

    def carry_out(self, plan: Any) -> None:
        if hasattr(plan, "copies"):
            self.story.append(plain(plan))
        super().carry_out(plan)

    def state(self) -> Any:
        """All of it after each third call: it takes longer than the calls."""
        whole = len(self.story) % 3 == 0
        return whole_state(self.cache, [seq.handle for seq in self.seqs]) if whole else super().state()


@pytest.mark.skipif(not blockyard.compiled(), reason="this build is interpreted itself")
def test_both_builds_tell_the_same_story(interpreted: ModuleType) -> None:
    for number in range(NUM_TWINS):
        seed = random.Random(run_seed()).randrange(2**32) + number
        ours, theirs = TwinWorld(blockyard, seed), TwinWorld(interpreted, seed)
        ours.run(CALLS_A_TWIN)
        theirs.run(CALLS_A_TWIN)
        for step, (one, other) in enumerate(zip(ours.story, theirs.story, strict=True)):
            assert one == other, f"seed {seed}, call {step}"
        assert ours.counts == theirs.counts, f"seed {seed}"


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    return source_only.load_interpreted()
