"""One failed allocation, at each of the first of a call: what becomes of the cache, each time in a process of its own.

    python -m tests.nomemory                 # 15 calls on three kinds of managers, each of the first 60 allocations
    python -m tests.nomemory resize --all    # one call; every point with its outcome and where it came from

CPython's `_testcapi` makes one allocation fail, of any size. mypyc's boxing does not check: some points end the
process, whatever is written here (`ended by a signal`). At all others `check()` must hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blockyard._build import build_name

from .support.own_calls import MANAGER_CALLS, Call, Site
from .support.snapshot import snapshot

KINDS = ("plain", "cpu", "observed")
#: The calls of an engine's step and those around it, each as often as the table has it.
NAMES = (
    "allocate",
    "allocate_batch",
    "reserve",
    "commit",
    "append",
    "fork",
    "regroup",
    "truncate",
    "free",
    "swap_out",
    "swap_in",
    "resize",
    "set_eviction_policy",
    "retain",
    "hold_cached",
)
NUM_POINTS = 60
#: After so many calls in a row in which nothing failed, there are no more allocations.
MOST_DONE = 6


@dataclass(frozen=True)
class Point:
    """What one failed allocation did. where: the line that raised, or that `check` complains of."""

    kind: str
    call: str
    number: int
    outcome: str
    where: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether a promise is broken: `check` holds; failed swaps change nothing, nor does a failed `resize`."""
        is_changed = self.outcome == "changed" and self.call in ("resize", "swap_out", "swap_in")
        return self.outcome == "broken" or is_changed or (self.call == "resize" and "SystemError" in self.where)


def points(kind: str, call: Call, num_points: int = NUM_POINTS) -> Iterator[Point]:
    """Each of the first allocations of a call fails in turn, until the call seems to make no more of them."""
    site = Site(kind)
    arguments = call.arguments(site)
    before = snapshot(site.cache)
    gc.collect()
    gc.disable()
    num_done = 0
    try:
        for number in range(1, num_points + 1):
            outcome, where = _forked(site, call, arguments, before, number)
            yield Point(kind, call.name, number, outcome, where)
            num_done = num_done + 1 if outcome == "done" else 0
            if num_done == MOST_DONE:
                return
    finally:
        gc.enable()


def _forked(site: Site, call: Call, arguments: dict[str, Any], before: dict[str, Any], number: int) -> tuple[str, str]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            os.write(writing, json.dumps(_tried(site, call, arguments, before, number)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        said = told.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "ended by a signal", signal.Signals(os.WTERMSIG(status)).name
    outcome, where = json.loads(said)
    return str(outcome), str(where)


def _tried(site: Site, call: Call, arguments: dict[str, Any], before: dict[str, Any], number: int) -> tuple[str, str]:
    """In the child: run the call, then look."""
    import _testcapi

    method = getattr(getattr(site, call.owner), call.name)
    raised: BaseException | None = None
    _testcapi.set_nomemory(number, number + 1)
    try:
        method(**arguments)
    except BaseException as error:
        raised = error
    finally:
        # Of what is left to fail the next line would make use.
        _testcapi.remove_mem_hooks()
    where = "" if raised is None else _where(raised)
    try:
        site.check()
    except BaseException as error:
        return "broken", f"{type(error).__name__}: {error} | {where}"
    if raised is None:
        return "done", ""
    if not isinstance(raised, MemoryError):
        where = f"{type(raised).__name__}: {raised} | {where}"
    after = snapshot(site.cache)
    # What was looked up, and what the history has of a call that was undone, may differ.
    names = [
        name
        for name, value in after.items()
        if value != before.get(name) and not name.endswith("index.found") and ".observer." not in name
    ]
    if names:
        return "changed", f"{names[:4]} | {where}"
    return "unchanged", where


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames[-3:]))


def sweep(names: tuple[str, ...] = NAMES, kinds: tuple[str, ...] = KINDS) -> Iterator[Point]:
    """All points of these calls."""
    for kind in kinds:
        for call in MANAGER_CALLS:
            if call.name in names:
                yield from points(kind, call)


def main() -> None:
    """Print how often which outcome came, and each point that is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--all", action="store_true", help="print every point")
    options = parser.parse_args()
    print(build_name(), flush=True)
    counts: Counter[str] = Counter()
    num_wrong = 0
    for point in sweep(tuple(options.names)):
        counts[point.outcome] += 1
        num_wrong += point.is_wrong
        if options.all or point.is_wrong:
            print(f"{point.kind:8} {point.call:20} {point.number:3} {point.outcome:12} {point.where}", flush=True)
    for outcome, count in counts.most_common():
        print(f"{count:8,}  {outcome}")
    print(f"{num_wrong:8,}  of them wrong")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
