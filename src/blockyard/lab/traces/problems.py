"""What is wrong with a line of a trace, and the largest numbers that a trace may hold."""

from __future__ import annotations

import reprlib

#: Bytes of a line, compressed or not. A longer one is passed over in bounded memory.
MAX_LINE_BYTES = 64 * 2**20
#: Tokens of a prompt, and of an output; the longest sequence that a `CacheConfig` allows.
MAX_PROMPT_TOKENS = 2**27
MAX_OUTPUT_TOKENS = 2**27
#: Ids of blocks and of tokens.
MAX_HASH_ID = 2**60 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_HASH_BLOCK_SIZE = 4096
#: Timestamps in whatever unit the format has; below it a double is exact to the unit.
MAX_TIMESTAMP = 2**53
#: Requests that `max_requests` and the generators count to.
MAX_REQUESTS = 10**12
#: Lines that are looked at for one that says what format a file has.
DETECTION_LINES = 64


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
