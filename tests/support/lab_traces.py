"""Traces for tests, held in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from blockyard.lab import Skips, TraceRequest


class ListedTrace:
    """The requests of a list, as a `Trace`."""

    def __init__(self, requests: Sequence[TraceRequest], hash_block_size: int = 16, name: str = "listed") -> None:
        self.name = name
        self.hash_block_size = hash_block_size
        self.skips = Skips()
        self._requests = list(requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)


def named(ids: Sequence[Sequence[int]], *, size: int = 16, output: int = 1, every: float = 1.0) -> ListedTrace:
    """A trace of full blocks with these ids; a request arrives `every` seconds."""
    return ListedTrace(
        [
            TraceRequest(number * every, len(request) * size, output, np.array(request, np.int64))
            for number, request in enumerate(ids)
        ],
        size,
    )


def lengths(pairs: Sequence[tuple[int, int]], *, every: float = 1.0) -> ListedTrace:
    """A trace of (prompt, output) lengths without contents."""
    return ListedTrace([TraceRequest(i * every, prompt, output) for i, (prompt, output) in enumerate(pairs)], 0)
