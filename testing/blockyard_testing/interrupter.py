"""Ctrl-C at one line of a part of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


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
