"""A part of `python -m tests.nomemory`: after a failed allocation `check()` holds; a resize or swap changed nothing."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

import blockyard

from ..nomemory import NAMES
from ..support.places import ROOT
from ..support.seeds import run_seed

pytest.importorskip("_testcapi")


@pytest.mark.skipif(not blockyard.compiled(), reason="of interpreted code each line may fail in the middle")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="each allocation fails in a fork of the process")
def test_a_failed_allocation_breaks_nothing() -> None:
    """Of a resize, of swaps, and of three other calls that are drawn."""
    always = ["resize", "swap_out", "swap_in"]
    others = [name for name in NAMES if name not in always]
    names = [*always, *random.Random(run_seed()).sample(others, 3)]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.nomemory", *names], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "unchanged" in run.stdout
