"""Which build is tested, from which seed, and in how many processes."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Generator
from typing import Any

import pytest

from . import seeds, source_only
from .seeds import run_seed

if os.environ.get("BLOCKYARD_INTERPRETED") == "1":
    if any(name.partition(".")[0] == "blockyard" for name in sys.modules):
        raise pytest.UsageError("BLOCKYARD_INTERPRETED=1, but blockyard is imported already")
    source_only.install("blockyard")
# Tiny models are faster in one thread; and threads of several test processes would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    run_seed()  # drawn before pytest-xdist starts its processes, so that all have the same


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and what they import stay to the end: the collector need not walk millions of them in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `drawn`, except a sixth by the seed of the run. TEST_DRAWS=6, or naming a file, runs all."""
    if any(".py" in argument for argument in config.args):
        return
    for item in items:
        if (
            item.get_closest_marker("drawn")
            and random.Random(f"{run_seed()} {item.nodeid}").randrange(seeds.PARTS) >= seeds.num_parts()
        ):
            item.add_marker(pytest.mark.skip(reason="another run draws it; TEST_DRAWS=6 runs all"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["lines"] = seeds.lines


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    seeds.lines.extend(getattr(node, "workeroutput", {}).get("lines", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    import blockyard
    from blockyard._build import build_name

    terminalreporter.write_line(f"blockyard {blockyard.__version__}, {build_name()}")
    terminalreporter.write_line(f"BLOCKYARD_SEED={run_seed()}")
    for line in seeds.lines:
        terminalreporter.write_line(line)
