"""Ctrl-C in the middle of calls: a random sixth of them; `python -m tests.interrupts` does all at all points."""

from __future__ import annotations

import random

import pytest

import blockyard
from blockyard_testing import seeds
from blockyard_testing.seeds import draws, run_seed

from ..interrupts import EVERY_CALL, interrupt_all
from ..support.own_calls import ALL_CALLS

pytestmark = pytest.mark.skipif(
    not blockyard.compiled(), reason="interpreted code is interrupted between any two lines"
)

NUM_CALLS = draws(len(EVERY_CALL), 0)
#: Of the points of each.
SHARE = 0.15


def test_an_interrupt_anywhere_leaves_the_state_before_or_after() -> None:
    calls = random.Random(run_seed()).sample(EVERY_CALL, NUM_CALLS)
    found = interrupt_all(SHARE, run_seed(), calls)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(found.outcomes.items()))
    seeds.lines.append(f"interrupts: {found.num_points} points, {counts}")
    assert found.broken == []
    assert found.num_points > NUM_CALLS / 2


@pytest.mark.parametrize(
    ("kind", "names"),
    [("keys", ("allocate", "allocate_batch", "extend")), ("tenants", ("allocate", "allocate_batch", "try_allocate"))],
)
def test_an_interrupted_admission_leaves_no_sequence(kind: str, names: tuple[str, ...]) -> None:
    """It used to come when the row was open already: a sequence that nobody had a handle for."""
    calls = [(kind, call) for call in ALL_CALLS if call.name in names]
    found = interrupt_all(draws(200, 0) / 100, run_seed(), calls)
    assert found.broken == []
    assert found.num_points > 100
