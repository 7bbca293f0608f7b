"""What a trace is: requests in the order they arrived, and the names of their prompts' blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    arrival: seconds since the trace began. num_prompt_tokens, num_output_tokens: their lengths; a prompt has at least
    one token. hash_ids: (ceil(num_prompt_tokens / hash_block_size),) int64, 0 to 2**60 - 1; equal ids name equal blocks
    of tokens *under equal prefixes*, so a prompt's cached prefix is a run of ids from the start. The last may name a
    block that is only partly filled; no id stands twice. None where the trace says nothing of contents. token_ids:
    (num_prompt_tokens,) int32, where the trace has them. Both arrays may be shared and are read-only. session: the
    conversation it belongs to, "" if unknown.
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: NDArray[np.int64] | None = None
    token_ids: NDArray[np.int32] | None = None
    session: str = ""


@dataclass(slots=True)
class Skips:
    """What a reader left out or corrected, by cause: (how often, the first place and what was wrong there)."""

    causes: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, cause: str, where: str) -> None:
        """Count one more of this cause."""
        count, first = self.causes.get(cause, (0, where))
        self.causes[cause] = (count + 1, first)

    @property
    def total(self) -> int:
        """Return all of them."""
        return sum(count for count, _ in self.causes.values())


class Trace(Protocol):
    """Requests that can be walked through any number of times, each walk from the beginning, without holding them.

    name: for people. hash_block_size: tokens that one hash id stands for; 0 where requests have no hash_ids.
    skips: what the latest walk left out.
    """

    name: str
    hash_block_size: int
    skips: Skips

    def __iter__(self) -> Iterator[TraceRequest]: ...
