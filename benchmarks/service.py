"""Requests of a trace in one block manager, many at a time. Needs numpy alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .workload import BLOCK_SIZE, Request

#: Sequences that decode at a time.
PLACES = 32
#: How many times the pool's size of blocks are taken.
TURNOVERS = 2


class Engine(Protocol):
    """A block manager as a service drives it."""

    num_blocks: int

    def admit(self, request: Request) -> tuple[Any, npt.NDArray[np.int32]]:
        """Hold what is cached, take blocks for the rest of the prompt; the sequence, and the ids of its hit.

        The last token of the prompt is never hit: it is left to be computed.
        """

    def grow(self, sequence: Any) -> None:
        """Take one block more."""

    def end(self, sequence: Any) -> None:
        """Publish what was generated, and free all."""


@dataclass
class Running:
    """A sequence that decodes."""

    request: Request
    sequence: Any
    num_blocks: int


class Service:
    """Requests in turns: prompts are taken whole, 32 sequences get a block each in turn, and who is done is freed.

    num_taken: blocks that were allocated. num_hits: blocks that requests hit. adjacency: the share of those that have
    a block before them in their hit, and lie right above or below it; of all hits since the pool was first full.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_taken = self.num_hits = self._num_pairs = self._num_neighbours = 0
        self._num_promised = 0
        self._running: deque[Running] = deque()

    @property
    def adjacency(self) -> float:
        return self._num_neighbours / max(self._num_pairs, 1)

    def run(self, requests: Iterable[Request]) -> None:
        """Serve until the pool was taken twice over, or all requests are through; then let the last ones end."""
        num_usable = self._engine.num_blocks - 1
        until = TURNOVERS * self._engine.num_blocks
        for request in requests:
            if request.num_blocks > num_usable:
                continue
            while len(self._running) == PLACES or self._num_promised + request.num_blocks > num_usable:
                self._decode()
            self._admit(request)
            if self.num_taken >= until:
                break
        while self._running:
            self._decode()

    def _admit(self, request: Request) -> None:
        sequence, hit = self._engine.admit(request)
        num_blocks = -(-request.num_prompt_tokens // BLOCK_SIZE)
        self._count(hit)
        self.num_taken += num_blocks - len(hit)
        self._num_promised += request.num_blocks
        self._running.append(Running(request, sequence, num_blocks))

    def _count(self, hit: npt.NDArray[np.int32]) -> None:
        self.num_hits += len(hit)
        if self.num_taken >= self._engine.num_blocks and len(hit) > 1:
            self._num_pairs += len(hit) - 1
            self._num_neighbours += int(side_by_side(hit).sum())

    def _decode(self) -> None:
        """A block more for each sequence; one that has all of its blocks ends."""
        for _ in range(len(self._running)):
            one = self._running.popleft()
            if one.num_blocks < one.request.num_blocks:
                self._engine.grow(one.sequence)
                one.num_blocks += 1
                self.num_taken += 1
                self._running.append(one)
            else:
                self._engine.end(one.sequence)
                self._num_promised -= one.request.num_blocks


def side_by_side(block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """For each block from the second on, whether its id is one above or below the block before."""
    return np.abs(np.diff(block_ids.astype(np.int64))) == 1


def neighbours(block_ids: npt.NDArray[np.int32]) -> float:
    """The share of blocks, from the second on, whose id is one above or below the block before."""
    return float(side_by_side(block_ids).mean())
