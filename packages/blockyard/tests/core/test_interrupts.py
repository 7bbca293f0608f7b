"""Ctrl-C in the middle of calls: a random share of all points; `python -m tests.interrupts` does them all."""

from __future__ import annotations

import pytest

import blockyard
from blockyard_testing import seeds
from blockyard_testing.seeds import draws, run_seed

from ..interrupts import interrupt_all
from ..support.own_calls import ALL_CALLS, KINDS

pytestmark = pytest.mark.skipif(
    not blockyard.compiled(), reason="interpreted code is interrupted between any two lines"
)

SHARE = draws(200, 0) / 1000


def test_an_interrupt_anywhere_leaves_the_state_before_or_after() -> None:
    found = interrupt_all(SHARE, run_seed())
    counts = ", ".join(f"{count} {name}" for name, count in sorted(found.outcomes.items()))
    seeds.lines.append(f"interrupts: {found.num_points} points, {counts}")
    assert found.broken == []
    assert found.num_points > len(KINDS) * len(ALL_CALLS) / 2


def test_an_interrupt_in_an_admission_with_keys_leaves_no_sequence() -> None:
    """It used to come when the row was open already: a sequence that nobody had a handle for."""
    found = interrupt_all(1.0, 0, kinds=("keys",), calls=("allocate", "allocate_batch", "extend"))
    assert found.broken == []
    assert found.num_points > 500


def test_interrupt_in_an_admission_with_tenants_leaves_no_sequence() -> None:
    """It used to come when the row was open already, and left a sequence of all tokens without blocks."""
    calls = ("allocate", "allocate_batch", "try_allocate")
    found = interrupt_all(1.0, 0, kinds=("tenants",), calls=calls)
    assert found.broken == []
    assert found.num_points > 300
