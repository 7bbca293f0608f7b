"""Which build is tested, and from which seed."""

from __future__ import annotations

import os
import sys

import pytest

from . import source_only
from .seeds import run_seed

if os.environ.get("BLOCKYARD_INTERPRETED") == "1":
    if any(name.partition(".")[0] == "blockyard" for name in sys.modules):
        raise pytest.UsageError("BLOCKYARD_INTERPRETED=1, but blockyard is imported already")
    source_only.install("blockyard")


def pytest_report_header() -> list[str]:
    import blockyard

    build = "compiled" if blockyard.compiled() else "interpreted"
    return [f"blockyard {blockyard.__version__}, {build}; BLOCKYARD_SEED={run_seed()}"]
