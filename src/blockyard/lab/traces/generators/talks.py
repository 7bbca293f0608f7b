"""Conversations: a prompt is the one before, its answer, and something new.

`seats` conversations are live at a time, which bounds the memory. Each arrival is the next turn of a random seat, so a
turn follows the one before after an exponential time of mean seats / rate seconds. When a conversation is over, its
seat begins another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...trace import TraceRequest
from .shared import SharedTexts, continued


@dataclass(slots=True)
class Seat:
    """A live conversation. context_tokens: all that was said. full_ids: ids of the blocks that its prompt filled."""

    session: str
    context_tokens: int
    full_ids: NDArray[np.int64]
    turns_left: int


@dataclass(slots=True)
class Draws:
    """Streams without end: when and where a turn comes, and how long things are.

    again: whether a turn repeats the last prompt as it was, because the answer was of no use.
    """

    arrivals: Iterator[tuple[float, int]]
    seats: Iterator[int]
    texts: Iterator[int]
    turns: Iterator[int]
    inputs: Iterator[int]
    outputs: Iterator[int]
    again: Iterator[bool]


class Talks:
    """Requests of conversations without end. O(blocks of the prompt) a request."""

    def __init__(self, name: str, draws: Draws, texts: SharedTexts, seats: int, block_size: int, longest: int) -> None:
        self._name, self._draws, self._texts = name, draws, texts
        self._seats: list[Seat | None] = [None] * seats
        self._last: list[TraceRequest | None] = [None] * seats
        self._block_size, self._longest = block_size, longest
        self._next_id, self._num_talks = texts.num_ids, 0

    def __iter__(self) -> Iterator[TraceRequest]:
        draws = self._draws
        for (arrival, _), number in zip(draws.arrivals, draws.seats, strict=False):
            last = self._last[number]
            if last is not None and next(draws.again):
                yield TraceRequest(
                    arrival, last.num_prompt_tokens, next(draws.outputs), last.hash_ids, None, last.session
                )
            else:
                yield self._turn(arrival, number, next(draws.inputs))

    def _turn(self, arrival: float, number: int, new_tokens: int) -> TraceRequest:
        seat = self._seats[number]
        if seat is None or seat.context_tokens + new_tokens > self._longest:
            seat = self._seats[number] = self._begin()
        # A first turn may be too long by itself; what is shared stays, what is new is cut.
        num_tokens = min(seat.context_tokens + new_tokens, self._longest)
        ids = continued(seat.full_ids, num_tokens, self._block_size, self._next_id)
        self._next_id += len(ids) - len(seat.full_ids)
        request = TraceRequest(arrival, num_tokens, next(self._draws.outputs), ids, None, seat.session)
        self._keep(number, seat, request, ids)
        return request

    def _keep(self, number: int, seat: Seat, request: TraceRequest, ids: NDArray[np.int64]) -> None:
        seat.turns_left -= 1
        if seat.turns_left == 0:
            self._seats[number] = self._last[number] = None
            return
        # The last block of the prompt was not full, or what follows would be in it: its content changes.
        seat.full_ids = ids[: request.num_prompt_tokens // self._block_size]
        seat.context_tokens = request.num_prompt_tokens + request.num_output_tokens
        self._last[number] = request

    def _begin(self) -> Seat:
        text = next(self._draws.texts)
        self._num_talks += 1
        session = f"{self._name}-{self._num_talks}"
        return Seat(session, self._texts.tokens[text], self._texts.ids(text), next(self._draws.turns))
