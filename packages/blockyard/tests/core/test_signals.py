"""A few hundred real interruptions; `python -m tests.signals` makes a hundred thousand."""

from __future__ import annotations

import signal
import threading

import pytest

import blockyard
from blockyard_testing import seeds
from blockyard_testing.seeds import run_seed

from ..signals import interrupt_many
from ..support.own_calls import KINDS

pytestmark = [
    pytest.mark.skipif(not blockyard.compiled(), reason="interpreted code is interrupted between any two lines"),
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers that send signals"),
]

NUM_INTERRUPTIONS = 400


def test_signals_at_any_moment_break_nothing() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals arrive in the main thread alone")
    counts, broken = interrupt_many(NUM_INTERRUPTIONS, run_seed())
    inside = counts["in the middle of a call"]
    seeds.lines.append(f"signals: {counts['interruptions']} interruptions, {inside} in the middle of a call")
    assert broken == []
    assert counts["interruptions"] == NUM_INTERRUPTIONS >= len(KINDS)
