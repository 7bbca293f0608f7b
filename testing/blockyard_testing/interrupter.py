"""Ctrl-C at one line of a part of the package, or at one event of a call."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from opcode import opmap
from types import FrameType
from typing import Any

from blockyard.errors import BlockyardError


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line, from 1, that runs in files of a place; `reached` says whether it came.

    place: in the name of the file, as "blockyard/parallel".
    """

    def __init__(self, place: str, line: int) -> None:
        self.place = place
        self.left = line
        self.reached = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.place not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if event == "line" and not self.reached:
            self.left -= 1
            if self.left == 0:
                self.reached = True
                raise KeyboardInterrupt
        return self

    def run(self, call: Callable[[], object]) -> bool:
        """Call it; returns `reached`."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            assert self.reached
        finally:
            sys.settrace(before)
        return self.reached


class Injection:
    """Counts the events of a call's Python frames, and raises KeyboardInterrupt at one of them.

    Ctrl-C arrives where the interpreter looks for signals: in frames of Python. `sys.settrace` is called at each call,
    line and return of such frames. Two line events in `with` blocks are left out, after which the lock would stay held,
    because the interpreter looks for no signals there: at `try`, and at the end of the block, before `__exit__`.

    Args:
        stop_at: number of the event, from 0; -1 for none.
        outside: files whose frames are the caller's.
    """

    def __init__(self, stop_at: int, outside: Container[str] = ()) -> None:
        self.stop_at = stop_at
        self.outside = outside
        self.num_events = 0
        self.where = ""

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename in self.outside:
            return None
        return self.at(frame, event, argument)

    def at(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line" and _sees_no_signals(frame):
            return self.at
        self.num_events += 1
        if self.num_events - 1 == self.stop_at:
            self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno} ({event})"
            raise KeyboardInterrupt("injected")
        return self.at

    def run(self, call: Callable[[], Any]) -> BaseException | None:
        """Call it, and return what it raised."""
        sys.settrace(self.trace)
        try:
            call()
        except (BlockyardError, KeyboardInterrupt) as error:
            return error
        finally:
            sys.settrace(None)
        return None


def _sees_no_signals(frame: FrameType) -> bool:
    """Return whether the frame is at `try`, or about to call `__exit__(None, None, None)`."""
    code, at = frame.f_code, frame.f_lasti
    if code.co_code[at] == opmap["NOP"]:
        return True
    if code.co_code[at] == opmap["SWAP"]:  # of `return` in the block
        at += 2
    none = code.co_consts.index(None) if None in code.co_consts else 256
    return none < 256 and code.co_code[at : at + 6] == bytes([opmap["LOAD_CONST"], none]) * 3


@dataclass
class Findings:
    """What the points of some calls came to."""

    num_points: int = 0
    broken: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
