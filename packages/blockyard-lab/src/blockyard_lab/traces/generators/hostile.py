"""Loads that mislead learning policies: the pattern reverses, keeps changing, or does not exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from ...trace import TraceRequest
from ..line_fields import read_only
from .conversations import Agents, Chat
from .draws import arrivals, lengths, numbers_below, streams, uniforms
from .generator import ID_BITS, LONGEST_PROMPT, Generator, option
from .rag import Rag
from .scan import Scan
from .system import System


@dataclass(kw_only=True)
class Documents(Generator):
    """Base of the loads whose prompts are whole documents.

    Args:
        document_tokens: median length of a document (lognormal).
        output_tokens: median length of an answer (lognormal).
        spread: deviation of the logarithm of both.
    """

    document_tokens: int = option(1000, 1, LONGEST_PROMPT)
    output_tokens: int = option(100, 1, LONGEST_PROMPT)
    spread: float = option(0.5, 0.0, 5.0)

    def endless(self) -> Iterator[TraceRequest]:
        lengths_of, when, inputs, draws = streams(self.seed, 4)
        tokens = lengths(lengths_of, self.document_tokens, self.spread, self.max_prompt_tokens)
        outputs = lengths(inputs, self.output_tokens, self.spread, self.max_prompt_tokens)
        known: dict[int, tuple[int, int]] = {}
        next_id = 0
        for (arrival, _), (document, is_last) in zip(
            arrivals(when, self.rate, self.on_seconds, self.off_seconds), self.documents(draws), strict=False
        ):
            if document not in known:
                known[document] = next_id, next(tokens)
                next_id += -(-known[document][1] // self.hash_block_size)
            first, num_tokens = known[document]
            if is_last:
                del known[document]
            ids = read_only(np.arange(first, first + -(-num_tokens // self.hash_block_size)))
            yield TraceRequest(arrival, num_tokens, next(outputs), ids)

    def documents(self, draws: np.random.Generator) -> Iterator[tuple[int, bool]]:
        """Yield (document number, whether this is the document's last request) for each request."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Trap(Documents):
    """Scans of a collection, again and again, then new documents that are each requested a few times.

    Args:
        scans: number of requests that first read the collection in order, again and again.
        collection: number of documents in it.
        repeats: requests for each later document.
        window: number of later documents in use at a time, so that one is requested about every `window` requests.
    """

    scans: int = option(900, 0, 10**9)
    collection: int = option(150, 1, 10**6)
    repeats: int = option(4, 1, 1000)
    window: int = option(12, 1, 10**5)

    def documents(self, draws: np.random.Generator) -> Iterator[tuple[int, bool]]:
        """Yield the collection in order, then random ones of `window` open documents."""
        for number in range(self.scans):
            yield number % self.collection, number >= self.scans - self.collection
        fresh = count(self.collection)
        opened = [(next(fresh), self.repeats) for _ in range(self.window)]
        for seat in numbers_below(draws, self.window):
            document, left = opened[seat]
            opened[seat] = (document, left - 1) if left > 1 else (next(fresh), self.repeats)
            yield document, left == 1


@dataclass(kw_only=True)
class Memoryless(Documents):
    """Requests without a pattern: every document in use is equally likely, whatever came before.

    Args:
        collection: number of documents in use at a time.
        ends: probability that a request is the last one for its document; a new document then replaces it.
    """

    collection: int = option(200, 1, 10**6)
    ends: float = option(0.2, 0.0, 1.0)

    def documents(self, draws: np.random.Generator) -> Iterator[tuple[int, bool]]:
        which, chances = draws.spawn(2)
        fresh = count(self.collection)
        opened = list(range(self.collection))
        for seat, chance in zip(numbers_below(which, self.collection), uniforms(chances), strict=False):
            document = opened[seat]
            if chance < self.ends:
                opened[seat] = next(fresh)
            yield document, chance < self.ends


#: The loads that `Turns` rotates through.
PARTS: tuple[type[Generator], ...] = (Chat, Scan, Rag, Agents, System)


@dataclass(kw_only=True)
class Turns(Generator):
    """Chat, scan, rag, agents and system in rotation, so that anything learned in one phase is wrong in the next.

    The parts share no blocks, and each continues where it stopped.

    Args:
        turn: number of requests in a phase.
    """

    turn: int = option(40, 1, 10**9)

    def check_together(self) -> None:
        self._parts()

    def _parts(self) -> list[Generator]:
        seeds = [int(np.random.SeedSequence([self.seed, n]).generate_state(1)[0]) for n in range(len(PARTS))]
        return [
            kind(seed=seed, hash_block_size=self.hash_block_size, max_prompt_tokens=self.max_prompt_tokens)
            for kind, seed in zip(PARTS, seeds, strict=True)
        ]

    def endless(self) -> Iterator[TraceRequest]:
        (when,) = streams(self.seed, 1)
        walks = [part.endless() for part in self._parts()]
        for place, (arrival, _) in enumerate(arrivals(when, self.rate, self.on_seconds, self.off_seconds)):
            number = place // self.turn % len(walks)
            request = next(walks[number])
            if request.hash_ids is not None:
                ids = read_only(request.hash_ids + (number << ID_BITS))
                yield replace(request, arrival=arrival, hash_ids=ids)
