"""The leading tokens of a prompt that each worker holds, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tables.matching import Lengths
from .stream import Trust


class Match(NamedTuple):
    """The leading tokens of a prompt that one worker holds.

    Attributes:
        num_tokens: tokens on any medium.
        num_gpu_tokens: tokens on the GPU.
        trust: whether all of the worker's messages were received.
    """

    num_tokens: int
    num_gpu_tokens: int
    trust: Trust


class Matches(Mapping[str, Match]):
    """For each worker that holds any of a prompt, its match at the time of the call.

    For choosing among many workers there are arrays: `workers` has all names that the mirror knows; `num_tokens` and
    `num_gpu_tokens`, read-only, int64 (len(workers),), are 0 for workers that hold nothing. `Match` objects are made on
    access.
    """

    def __init__(self, rows: Mapping[str, int], lengths: Lengths, trusts: tuple[Trust, ...]) -> None:
        #: Rows of the workers by name.
        self._rows = rows
        self._lengths = lengths
        self._trusts = trusts

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names in the order of the arrays. O(workers)."""
        return tuple(self._rows)

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Return the leading tokens that each worker holds on any medium. O(1)."""
        return self._lengths.table()[:, 0]

    @property
    def num_gpu_tokens(self) -> NDArray[np.int64]:
        """Return the leading tokens that each worker holds on its GPU. O(1)."""
        return self._lengths.table()[:, 1]

    def __getitem__(self, worker: str) -> Match:
        num_tokens, num_gpu_tokens = self._lengths.of(self._rows[worker])
        if not num_tokens:
            raise KeyError(worker)
        return Match(num_tokens, num_gpu_tokens, self._trusts[self._rows[worker]])

    def __iter__(self) -> Iterator[str]:
        return (worker for worker, num_tokens in zip(self._rows, self.num_tokens.tolist(), strict=True) if num_tokens)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.num_tokens))

    def __repr__(self) -> str:
        return f"Matches({dict(self)})"
