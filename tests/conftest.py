"""Which build is tested, and from which seed."""

from __future__ import annotations

import os
import sys

import pytest

from .support import seeds, source_only
from .support.seeds import run_seed

if os.environ.get("BLOCKYARD_INTERPRETED") == "1":
    if any(name.partition(".")[0] == "blockyard" for name in sys.modules):
        raise pytest.UsageError("BLOCKYARD_INTERPRETED=1, but blockyard is imported already")
    source_only.install("blockyard")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    import blockyard

    terminalreporter.write_line(f"blockyard {blockyard.__version__}, {blockyard.build_name()}")
    terminalreporter.write_line(f"BLOCKYARD_SEED={run_seed()}")
    for line in seeds.lines:
        terminalreporter.write_line(line)
