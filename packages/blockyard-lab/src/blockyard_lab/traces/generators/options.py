"""A generator's options: a dataclass, each with its limits, and a walk over the requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument

from ...trace import Skips, TraceRequest
from ..lines import MAX_HASH_BLOCK_SIZE, MAX_REQUESTS

#: Ids of one generator stay below; `mix` puts the number of the part above.
ID_BITS = 56
#: The longest prompt that a generator can make. A request's ids take 8 bytes a block.
LONGEST_PROMPT = 2**22


def option(default: float, low: float, high: float) -> Any:
    """Return a field with limits. An integer default wants integers."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(kw_only=True)
class Generator:
    """What all generators share. Each is a `Trace`: every walk begins anew and gives the same requests.

    requests: how many, 1 to 10**12. seed: of everything random. hash_block_size: tokens that a hash id stands for.
    rate: mean arrivals a second, a Poisson process. off_seconds: with more than 0, arrivals come in phases, on for
    on_seconds and off for off_seconds, both means of exponential lengths; the mean rate stays. max_prompt_tokens: no
    prompt is longer.

    Raises `InvalidArgument` for an option outside its limits.
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
        """Raise `InvalidArgument` if options that are sound alone do not go together."""

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(self.endless(), self.requests)

    def endless(self) -> Iterator[TraceRequest]:
        """Return the requests, without end."""
        raise NotImplementedError


def require_in(name: str, value: object, low: float, high: float) -> float:
    """Return a finite number within limits."""
    number = require_number(name, value)
    if not low <= number <= high:
        raise InvalidArgument(f"{name} is {number}; it must be from {low} to {high}")
    return number
