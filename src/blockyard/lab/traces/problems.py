"""What is wrong with a line, before it is known whether it is skipped or raised."""

from __future__ import annotations

import reprlib

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


class LineProblem(Exception):
    """A line cannot be used. cause: one of few, to count by. text: field, value and limit, for people."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause
        self.text = text


def shown(value: object) -> str:
    """The value as an error shows it: at most a few dozen characters, however large it is."""
    return _REPR.repr(value)
