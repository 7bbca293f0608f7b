"""The base class of generators: a dataclass of options with limits that can be walked as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument

from ...trace import Skips, TraceRequest
from ..lines import MAX_HASH_BLOCK_SIZE, MAX_REQUESTS

#: A generator's ids stay below 2**ID_BITS; the bits above number the parts of `Mix` and `Turns`.
ID_BITS = 56
#: Upper limit of `max_prompt_tokens`. A request's ids take 8 bytes per block.
LONGEST_PROMPT = 2**22


def option(default: float, low: float, high: float) -> Any:
    """Return a dataclass field with limits. If `default` is an int, only ints are accepted."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(kw_only=True)
class Generator:
    """Base class of generators. Each is a `Trace` whose walks all give the same requests.

    Args:
        requests: number of requests, 1 to 10**12.
        seed: seed of everything random.
        hash_block_size: tokens per hash id.
        rate: mean arrivals per second (Poisson).
        on_seconds: mean length of an on-phase (exponential); used if off_seconds > 0.
        off_seconds: mean length of an off-phase without arrivals (exponential); the mean rate stays the same.
        max_prompt_tokens: upper limit of a prompt's length.

    Raises:
        InvalidArgument: for an option outside its limits.
    """

    requests: int = option(1000, 1, MAX_REQUESTS)
    seed: int = option(0, 0, 2**63 - 1)
    hash_block_size: int = option(16, 1, MAX_HASH_BLOCK_SIZE)
    rate: float = option(2.0, 1e-6, 1e6)
    on_seconds: float = option(10.0, 1e-3, 1e6)
    off_seconds: float = option(0.0, 0.0, 1e6)
    max_prompt_tokens: int = option(32_768, 1, LONGEST_PROMPT)

    def __post_init__(self) -> None:
        for one in fields(self):
            value, low, high = getattr(self, one.name), one.metadata["low"], one.metadata["high"]
            if isinstance(one.default, int):
                setattr(self, one.name, require_int(one.name, value, low, high))
            else:
                setattr(self, one.name, require_in(one.name, value, low, high))
        self.name = f"{type(self).__name__.lower()}:requests={self.requests},seed={self.seed}"
        self.skips = Skips()
        self.check_together()

    def check_together(self) -> None:
        """Check options that depend on each other.

        Raises:
            InvalidArgument: if their combination is impossible.
        """

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(self.endless(), self.requests)

    def endless(self) -> Iterator[TraceRequest]:
        """Yield requests without end."""
        raise NotImplementedError


def require_in(name: str, value: object, low: float, high: float) -> float:
    """Return `value` if it is a finite number from `low` to `high`."""
    number = require_number(name, value)
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}; it must be from {low} to {high}")
    return number
