"""A mix of all kinds of load, as one fleet may see it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...trace import TraceRequest
from ..line_fields import read_only
from .conversations import Agents, Chat
from .generator import ID_BITS, Generator
from .rag import Rag
from .scan import Scan
from .system import Bursts, System

#: Each kind's share of the requests, in percent.
SHARES: tuple[tuple[type[Generator], int], ...] = (
    (Chat, 40),
    (System, 15),
    (Agents, 20),
    (Rag, 15),
    (Scan, 5),
    (Bursts, 5),
)


@dataclass(kw_only=True)
class Mix(Generator):
    """All kinds of load at once: 40 % chat, 20 % agents, 15 % system, 15 % rag, 5 % scan, 5 % bursts.

    Each kind has its default options and its share of the rate. They share no blocks.
    """

    def check_together(self) -> None:
        self._parts()

    def _parts(self) -> list[Generator]:
        return [self._part(number, kind, share) for number, (kind, share) in enumerate(SHARES)]

    def _part(self, number: int, kind: type[Generator], share: int) -> Generator:
        # Bursts keep their default phases.
        phases = Bursts if kind is Bursts else self
        return kind(
            seed=int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0]),
            hash_block_size=self.hash_block_size,
            rate=self.rate * share / 100,
            on_seconds=phases.on_seconds,
            off_seconds=phases.off_seconds,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    def endless(self) -> Iterator[TraceRequest]:
        walks = [_separate_ids(number, part) for number, part in enumerate(self._parts())]
        return heapq.merge(*walks, key=lambda request: request.arrival)


def _separate_ids(number: int, part: Generator) -> Iterator[TraceRequest]:
    """Yield the part's requests with ids that no other part uses."""
    for request in part.endless():
        if request.hash_ids is not None:
            yield replace(request, hash_ids=read_only(request.hash_ids + (number << ID_BITS)))
