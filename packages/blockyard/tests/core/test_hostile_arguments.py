"""Hostile objects in arguments: a random hundredth of them; `python -m tests.hostile` tries them all."""

from __future__ import annotations

import random

import pytest

from blockyard_testing import seeds
from blockyard_testing.seeds import draws, run_seed

from ..hostile import EVERY_GIFT, TARGETS, Sweep, changed_while_read
from ..support.own_calls import MANAGER_CALLS, POOL_CALLS, Site

#: Calls without arguments.
BARE = {
    "reset_prefix_cache",
    "running",
    "history",
    "leak_report",
    "check",
    "free_block_ids",
    "take_events",
    "publish_events",
    "waiting",
    "oldest",
}


def test_hostile_arguments_do_no_harm() -> None:
    sweep = Sweep()
    gifts = random.Random(run_seed()).sample(EVERY_GIFT, len(EVERY_GIFT))
    wanted = draws(len(EVERY_GIFT) // 30, len(EVERY_GIFT) // 50)
    for number, gift in enumerate(gifts):
        if number >= wanted and min(sweep.outcomes["done"], sweep.outcomes["InvalidArgument"]) > 100:
            break
        sweep.give(*gift)
    seeds.lines.append(f"hostile arguments: {sweep.num_tried}, {dict(sweep.outcomes)}")
    assert sweep.wrong == []
    assert sweep.outcomes["done"] > 100
    assert sweep.outcomes["InvalidArgument"] > 100


def test_every_call_with_arguments_is_tried() -> None:
    assert {call.name for call in MANAGER_CALLS + POOL_CALLS} - {target.name for target in TARGETS} == BARE


@pytest.mark.parametrize("change", ["clear", "append", "reverse", "pop"])
def test_a_list_that_changes_while_it_is_read(change: str) -> None:
    """By one of its items: the call is refused and changes nothing, or takes a list that stood there."""
    changes = {"append": lambda given: given.append(given[-1])}
    for target in TARGETS:
        for name, value in target.arguments(Site("plain")).items():
            if isinstance(value, list):
                problem = changed_while_read(target, name, changes.get(change, getattr(list, change)))
                assert problem == "", (target.name, name, problem)
