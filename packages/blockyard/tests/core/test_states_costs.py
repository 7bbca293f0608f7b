"""The state to evict is found without scanning the others: compared with a scan, and by counted lines."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

from blockyard.core.policies.states.checkpoint import Checkpoint
from blockyard.core.policies.states.registry import CheckpointRegistry
from blockyard.core.simulation.state_run import StateRun
from blockyard_testing import seeds, source_only
from blockyard_testing.state_loads import BLOCK, Keys, chats

PLACES = ("branch", "ends", "pow2")


def first_of_all(registry: CheckpointRegistry) -> int:
    """The state that goes first, by a scan of all."""

    def rank(state: Checkpoint) -> tuple[bool, bool, float, int, int]:
        score = registry.order.score(state, registry.get(state.above).position, registry.now)
        is_later = not registry.order.learns and not state.is_over
        return bool(state.is_held), is_later, score, -int(state.position), int(state.use_order)

    kept = [state for state in registry._known if state.is_cached]
    return int(min(kept, key=rank).number) if kept else 0


@pytest.mark.parametrize("order", ["index", "lru"])
def test_first_state_is_that_of_a_scan_of_all(order: str) -> None:
    draw = random.Random(f"{seeds.run_seed()} {order} scan")
    for _ in range(seeds.draws(12, 1)):
        run = StateRun(order, PLACES, draw.choice([1, 100, 800]), draw.choice([9000, 40_000]), in_flight=3)
        keys = Keys()
        for request in chats(draw.randrange(2**30), 150):
            num_prompt, num_total = len(request.prompt), len(request.prompt) + len(request.output)
            run.request(keys.of(request.prompt + request.output), num_prompt, num_total, [], [], draw.randrange(9))
            if draw.random() < 0.3:
                run.over(draw.randrange(1, 9))
            for state in list(run.registry._known):
                if state.is_cached and draw.random() < 0.1:
                    run.registry.set_held(state.number, not state.is_held)
            assert run.registry.next_to_drop() == first_of_all(run.registry)
            if draw.random() < 0.1:
                run.registry.check()
            for state in list(run.registry._known):
                run.registry.set_held(state.number, False)


def test_states_older_than_the_last_age_are_counted_in_it() -> None:
    run = StateRun("index", ("last",), 16, 10**6)
    for number in range(1, 12_500):
        run.request(np.array([number]), BLOCK + 1, BLOCK + 1, [], [])
        if number % 2_500 == 0:
            run.registry.check()
    assert run.request(np.array([1]), BLOCK + 1, BLOCK + 1, [], []) == BLOCK
    run.registry.check()
    assert run.registry.next_to_drop() == first_of_all(run.registry)


# ---------------------------------------------------------------- lines


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """The sources under another name: of compiled code no lines are seen."""
    name = source_only.load_interpreted("blockyard_counted").__name__
    return import_module(name + ".core.simulation.state_run")


class Lines:
    """Lines that run in the sources of states."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        sys.settrace(self.call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        del event, arg
        return self.line if "blockyard_counted" in frame.f_globals["__name__"] else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        del frame, arg
        self.count += event == "line"
        return self.line


def lines_of_turns(module: ModuleType, order: str, num_states: int) -> int:
    """Lines of 50 turns beside `num_states` states: each finds where it parts from another, keeps a state there, above
    one that is kept, ends a session, and evicts as many states as it leaves."""
    run = module.StateRun(order, ("branch", "last"), BLOCK, 3 * BLOCK * num_states)
    one, size = np.array([1, 2]), 2 * BLOCK + 1
    for number in range(num_states + 200):
        run.request(one + 3 * number, size, size, [], [], number + 1)
    assert run.registry.num_cached == num_states
    with Lines() as lines:
        for number in range(50):
            fresh = 10**8 + 4 * number
            for last in (fresh + 1, fresh + 2):
                run.request(np.array([fresh, last]), size, size, [], [], 10**6 + last)
            run.over(10**6 + fresh + 2)
    assert run.registry.num_held <= run.budget < run.registry.num_held + 6 * BLOCK
    assert run.num_written >= num_states + 150
    run.registry.check()
    return lines.count


@pytest.mark.parametrize("order", ["index", "lru"])
def test_eight_times_the_states_run_less_than_twice_the_lines(interpreted: ModuleType, order: str) -> None:
    few, many = (lines_of_turns(interpreted, order, number) for number in (400, 3200))
    assert many < 2 * few, (few, many)
