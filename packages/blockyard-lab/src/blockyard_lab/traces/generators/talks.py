"""Conversations of people and of agents: a prompt is the one before, its answer, and something new.

`seats` conversations are live at a time, which bounds the memory. Each arrival is the next turn of a random seat, so a
turn follows the one before after an exponential time of mean seats / rate seconds. When a conversation is over, its
seat begins another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from ...trace import TraceRequest
from .draws import SharedTexts, arrivals, continued, geometric, lengths, numbers_below, streams, uniforms, zipf
from .options import LONGEST_PROMPT, Generator, option


@dataclass(slots=True)
class Seat:
    """A live conversation. context_tokens: all that was said. full_ids: ids of the blocks that its prompt filled."""

    session: str
    context_tokens: int
    full_ids: NDArray[np.int64]
    turns_left: int


@dataclass(slots=True)
class TalkLengths:
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

    def __init__(
        self, name: str, draws: TalkLengths, texts: SharedTexts, seats: int, block_size: int, longest: int
    ) -> None:
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


@dataclass(kw_only=True)
class Chat(Generator):
    """Multi-turn chat: a prompt is the prompt before, the answer to it, and what the user says next.

    users: conversations that are live at a time; between turns pass users / rate seconds on average. turns: mean of a
    conversation (geometric). system_prompts: how many, popular by Zipf's law with exponent zipf. system_tokens,
    user_tokens, output_tokens: medians of lognormal lengths; spread: their deviation, of the logarithm.
    """

    users: int = option(100, 1, 10**6)
    turns: float = option(5.0, 1.0, 1e6)
    system_prompts: int = option(10, 1, 10**6)
    zipf: float = option(1.0, 0.0, 10.0)
    system_tokens: int = option(300, 1, LONGEST_PROMPT)
    user_tokens: int = option(80, 1, LONGEST_PROMPT)
    output_tokens: int = option(200, 1, LONGEST_PROMPT)
    spread: float = option(0.8, 0.0, 5.0)

    def endless(self) -> Iterator[TraceRequest]:
        """Return the requests, without end. Memory: the live conversations' last prompts."""
        texts, when, who, which, turns, inputs, outputs = streams(self.seed, 7)
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        # Half of the longest prompt is left to what is not shared.
        shared = SharedTexts(
            texts, self.system_prompts, self.system_tokens, self.spread, max(longest // 2, 1), block_size
        )
        draws = TalkLengths(
            arrivals(when, self.rate, self.on_seconds, self.off_seconds),
            numbers_below(who, self.users),
            zipf(which, self.system_prompts, self.zipf),
            geometric(turns, self.turns),
            lengths(inputs, self.user_tokens, self.spread, longest),
            lengths(outputs, self.output_tokens, self.spread, longest),
            repeat(False),
        )
        return iter(Talks("chat", draws, shared, self.users, block_size, longest))


@dataclass(kw_only=True)
class Agents(Generator):
    """Agents with tools: each step's prompt is the one before, the tool call, and the tool's result.

    agents: that work at a time; between steps pass agents / rate seconds on average. steps: mean of a task (geometric).
    kinds: of agents, each with its own instructions and tool definitions, popular by Zipf's law with exponent zipf.
    instruction_tokens, result_tokens, output_tokens: medians of lognormal lengths; spread: their deviation, of the
    logarithm. retry: share of steps that send the last prompt again as it was.
    """

    agents: int = option(20, 1, 10**6)
    steps: float = option(12.0, 1.0, 1e6)
    kinds: int = option(5, 1, 10**6)
    zipf: float = option(1.0, 0.0, 10.0)
    instruction_tokens: int = option(3000, 1, LONGEST_PROMPT)
    result_tokens: int = option(600, 1, LONGEST_PROMPT)
    output_tokens: int = option(80, 1, LONGEST_PROMPT)
    spread: float = option(0.8, 0.0, 5.0)
    retry: float = option(0.05, 0.0, 1.0)

    def endless(self) -> Iterator[TraceRequest]:
        """Return the requests, without end. Memory: the last prompts of the agents at work."""
        texts, when, who, which, turns, inputs, outputs, again = streams(self.seed, 8)
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        shared = SharedTexts(texts, self.kinds, self.instruction_tokens, self.spread, max(longest // 2, 1), block_size)
        draws = TalkLengths(
            arrivals(when, self.rate, self.on_seconds, self.off_seconds),
            numbers_below(who, self.agents),
            zipf(which, self.kinds, self.zipf),
            geometric(turns, self.steps),
            lengths(inputs, self.result_tokens, self.spread, longest),
            lengths(outputs, self.output_tokens, self.spread, longest),
            (share < self.retry for share in uniforms(again)),
        )
        return iter(Talks("agent", draws, shared, self.agents, block_size, longest))
