"""The trace interface: requests in order of arrival, with ids of their prompts' blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Its arrays are read-only and may be shared.

    Attributes:
        arrival: seconds since the trace began.
        num_prompt_tokens: length of the prompt, 1 or more.
        num_output_tokens: length of the output.
        hash_ids: (ceil(num_prompt_tokens / hash_block_size),) int64, 0 to 2**60 - 1, or None if the trace has none.
            Equal ids mean equal blocks *after equal prefixes*, so a prompt's cached prefix is a run of ids from the
            start. The last id may name a partly filled block. Ids within a prompt differ.
        token_ids: (num_prompt_tokens,) int32, or None if the trace has none.
        session: name of the conversation; "" if unknown.
        pause: seconds from the answer before it in the session to this request; None if unknown.
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: NDArray[np.int64] | None = None
    token_ids: NDArray[np.int32] | None = None
    session: str = ""
    pause: float | None = None


@dataclass(slots=True)
class Skips:
    """Lines that a reader skipped or corrected.

    Attributes:
        causes: by cause, the number of lines and a description of the first.
    """

    causes: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, cause: str, where: str) -> None:
        """Count one more line for this cause."""
        count, first = self.causes.get(cause, (0, where))
        self.causes[cause] = (count + 1, first)

    @property
    def total(self) -> int:
        """Number of lines, all causes together."""
        return sum(count for count, _ in self.causes.values())


class Trace(Protocol):
    """Requests that can be walked through any number of times, without holding all of them in memory.

    Attributes:
        name: name to show.
        hash_block_size: tokens per hash id; 0 if requests have no hash_ids.
        skips: lines that the latest walk skipped.
    """

    name: str
    hash_block_size: int
    skips: Skips

    def __iter__(self) -> Iterator[TraceRequest]: ...
