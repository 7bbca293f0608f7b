"""The random program of `tests.world` on models with states: keys and values, states, swaps and resizes in one memory.

A block holds the keys and values of one layer group or a part of a state, and a write of one is the end of the other.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import blockyard
from blockyard import InvalidArgument
from blockyard_testing import seeds
from blockyard_testing.states_on_a_data_plane import StatesOnADataPlane
from blockyard_testing.world_memory import Seq

from ..support.tenant_world import TenantWorld


class TenantsWithStates(TenantWorld, StatesOnADataPlane):
    """The same with tenants that share the pool; none loses blocks within its guarantee to a step of others.

    Who runs in a step may give its own for a state that has no room in the end, where a copy on write was spared.
    """

    running: frozenset[str] = frozenset()
    num_replaced = 0

    def act(self, actor: Any) -> None:
        self.num_replaced = self.cache.stats().num_replaced_states
        super().act(actor)

    def compute(self, plan: Any, seqs: list[Seq]) -> None:
        self.running = frozenset(self.name_of(seq.keys) for seq in seqs)
        # A state of an output that the next one takes the place of goes unasked.
        num_replaced = self.cache.stats().num_replaced_states - self.num_replaced
        num_gone = num_replaced * plan.states.save_blocks.shape[1]
        self.watched.num_unasked = max(self.watched.num_unasked - num_gone, 0)
        super().compute(plan, seqs)
        self.running = frozenset()

    def require_guarantees(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        super().require_guarantees({name: use for name, use in before.items() if name not in self.running}, after)

    def choose_config(self) -> Any:
        while True:
            try:
                return super().choose_config()
            except InvalidArgument:  # a limit below what a sequence with its states takes
                self.seed += 1


def run_worlds(kind: type[StatesOnADataPlane], num_worlds: int, wanted: tuple[str, ...]) -> Counter[str]:
    """So many worlds, and more until what is wanted has happened; what they did, added up."""
    draw = random.Random(f"{seeds.run_seed()} {kind.__name__}")
    counts: Counter[str] = Counter()
    while num_worlds > 0 or not all(counts[name] for name in wanted):
        seed = draw.randrange(2**32)
        world = kind(blockyard, seed)
        try:
            world.run(150)
        except Exception as error:
            error.add_note(f"{kind.__name__}(blockyard, {seed}), after {len(world.story)} calls")
            raise
        counts += world.counts
        num_worlds -= 1
    return counts


def test_keys_and_values_and_states_share_a_pool() -> None:
    counts = run_worlds(StatesOnADataPlane, seeds.draws(90, 10), ("states loaded", "states found", "states brought"))
    names = ("states loaded", "states found", "states brought", "blocks swapped out", "contexts read")
    seeds.lines.append("states on a data plane: " + ", ".join(f"{counts[name]} {name}" for name in names))


def test_tenants_of_models_with_states_keep_their_guarantees() -> None:
    run_worlds(TenantsWithStates, seeds.draws(60, 4), ("states loaded", "guarantees kept", "blocks taken back"))
