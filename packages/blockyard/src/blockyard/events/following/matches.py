"""What workers have of a prompt: arrays, and an object for a worker only when you ask about that one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..tables.matching import Lengths
from .stream import Trust


class Match(NamedTuple):
    """What one worker has of a prompt. num_tokens: leading tokens that it has anywhere; num_gpu_tokens: on its GPU.

    trust: whether the worker's messages are all there.
    """

    num_tokens: int
    num_gpu_tokens: int
    trust: Trust


class Matches(Mapping[str, Match]):
    """What all workers have of one prompt, at the moment it was asked: for each that has any of it, a `Match`.

    As arrays, for those who choose among many: `workers`, all that the mirror knows; `num_tokens` and `num_gpu_tokens`,
    read-only, int64 (len(workers),), 0 where a worker has nothing. A `Match` is made when it is asked for.
    """

    def __init__(self, rows: Mapping[str, int], lengths: Lengths, trusts: tuple[Trust, ...]) -> None:
        #: By name, the row of a worker.
        self._rows = rows
        self._lengths = lengths
        self._trusts = trusts

    @property
    def workers(self) -> tuple[str, ...]:
        """Return names in the order of the arrays. O(workers)."""
        return tuple(self._rows)

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Return the leading tokens that each worker has anywhere. O(1)."""
        return self._lengths.table()[:, 0]

    @property
    def num_gpu_tokens(self) -> NDArray[np.int64]:
        """Return those on its GPU. O(1)."""
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
