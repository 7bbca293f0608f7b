"""Other libraries' errors, cut down to what fits in one sentence of our own."""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
