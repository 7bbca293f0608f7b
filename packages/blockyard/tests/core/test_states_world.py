"""Random worlds with states: everything at once, on a memory that knows which tokens every state is of.

In a pool that never runs short a dictionary of states beside the manager says exactly what each prompt hits.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard_testing import seeds
from blockyard_testing.states_world import World, config

#: Where long outputs have a state each, and nobody is told of its blocks one by one.
OUTPUTS: dict[str, Any] = {
    "num_cpu_blocks": 0,
    "track_misses": False,
    "history_size": 0,
    "max_steps_in_flight": 1,
    "state_checkpoints": ("ends",),
}


@pytest.mark.parametrize("fields", [{}, OUTPUTS])
def test_a_dictionary_of_states_says_what_every_prompt_hits(fields: dict[str, Any]) -> None:
    draw = random.Random(f"{seeds.run_seed()} ample {bool(fields)}")
    num_hits, num_replaced, num_worlds = 0, 0, seeds.draws(60, 3)
    while num_worlds > 0 or not num_hits or not num_replaced:
        num_worlds -= 1
        world = World(draw, config(draw, 4000, **fields), True)
        world.num_steps = 80 if fields else world.num_steps
        world.run(120)
        num_hits += world.num_hits
        num_replaced += world.num_replaced


@pytest.mark.parametrize("policy", ["lru", "density", "arc"])
def test_no_state_is_seen_that_is_not_its_own_where_blocks_are_short(policy: str) -> None:
    draw = random.Random(f"{seeds.run_seed()} {policy}")
    for _ in range(seeds.draws(60, 2)):
        retained = draw.choice([0, 20])
        fields = draw.choice([{}, OUTPUTS])
        made = config(draw, draw.choice([40, 130]), eviction_policy=policy, retention_blocks=retained, **fields)
        World(draw, made, False).run(120)


def test_a_pool_that_fills_and_shrinks_keeps_its_books() -> None:
    draw = random.Random(f"{seeds.run_seed()} resize")
    for _ in range(seeds.draws(30, 2)):
        world = World(draw, config(draw, 300), False)
        for num_blocks in (200, 60, 400, 120):
            world.run(25)
            world.flying, world.tokens, world.leases = [], {}, []
            world.cache.resize(num_blocks)
            world.cache.check()
