"""One failed allocation in a process of its own, by CPython's `_testcapi`."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable


def run_in_fork(act: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Run `act` in a fork, and return its result: an outcome, and where it came from.

    If a signal ends the child, the outcome is "ended by a signal". mypyc's boxing does not check for NULL, so some
    failed allocations do that.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "ended by a signal", signal.Signals(os.WTERMSIG(status)).name
    outcome, where = json.loads(text)
    return str(outcome), str(where)


def fail_allocation(number: int, call: Callable[[], object]) -> BaseException | None:
    """Call it while its allocation of this number, from 1, fails; return what it raised."""
    import _testcapi

    raised: BaseException | None = None
    _testcapi.set_nomemory(number, number + 1)
    try:
        call()
    except BaseException as error:
        raised = error
    finally:
        _testcapi.remove_mem_hooks()  # the next line would allocate
    return raised


def where_of(error: BaseException) -> str:
    """Return the innermost lines of an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames[-3:]))
