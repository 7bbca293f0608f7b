"""Conversations of people and of agents: each prompt is the previous prompt, its answer, and new tokens.

A fixed number of conversations (`seats`) is active at a time, which bounds memory. Each arrival is the next turn of a
random seat, so turns of one seat are exponentially spaced with mean seats / rate seconds. When a conversation ends, a
new one takes its seat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from ...trace import TraceRequest
from .draws import SharedTexts, arrivals, extend_prefix, geometric, lengths, numbers_below, streams, uniforms, zipf
from .generator import LONGEST_PROMPT, Generator, option


@dataclass(slots=True)
class Seat:
    """An active conversation.

    Attributes:
        session: name in the trace.
        context_tokens: tokens of the last prompt and its answer.
        full_ids: ids of the last prompt's full blocks.
        turns_left: requests still to come.
    """

    session: str
    context_tokens: int
    full_ids: NDArray[np.int64]
    turns_left: int


@dataclass(slots=True)
class ConversationDraws:
    """Endless streams of random values. `again` tells whether a turn repeats the last prompt unchanged (a retry)."""

    arrivals: Iterator[tuple[float, int]]
    seats: Iterator[int]
    texts: Iterator[int]
    turns: Iterator[int]
    inputs: Iterator[int]
    outputs: Iterator[int]
    again: Iterator[bool]


class Conversations:
    """Endless requests of conversations. O(blocks of the prompt) per request."""

    def __init__(
        self, name: str, draws: ConversationDraws, texts: SharedTexts, seats: int, block_size: int, longest: int
    ) -> None:
        self._name, self._draws, self._texts = name, draws, texts
        self._seats: list[Seat | None] = [None] * seats
        self._last: list[TraceRequest | None] = [None] * seats
        self._block_size, self._longest = block_size, longest
        self._next_id, self._num_conversations = texts.num_ids, 0

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
        # A first turn alone may be too long: its new tokens are cut, the shared ones are not.
        num_tokens = min(seat.context_tokens + new_tokens, self._longest)
        ids = extend_prefix(seat.full_ids, num_tokens, self._block_size, self._next_id)
        self._next_id += len(ids) - len(seat.full_ids)
        request = TraceRequest(arrival, num_tokens, next(self._draws.outputs), ids, None, seat.session)
        seat.turns_left -= 1
        if seat.turns_left == 0:
            self._seats[number] = self._last[number] = None
        else:
            # A partly filled last block gets another id: in the next prompt it holds further tokens.
            seat.full_ids = ids[: num_tokens // self._block_size]
            seat.context_tokens = num_tokens + request.num_output_tokens
            self._last[number] = request
        return request

    def _begin(self) -> Seat:
        text = next(self._draws.texts)
        self._num_conversations += 1
        session = f"{self._name}-{self._num_conversations}"
        return Seat(session, self._texts.tokens[text], self._texts.ids(text), next(self._draws.turns))


@dataclass(kw_only=True)
class Chat(Generator):
    """Multi-turn chat: a prompt is the previous prompt, its answer, and the user's next message.

    Args:
        users: number of active conversations; users / rate seconds pass between turns on average.
        turns: mean number of turns in a conversation (geometric).
        system_prompts: number of system prompts.
        zipf: exponent of Zipf's law for their popularity.
        system_tokens: median length of a system prompt (lognormal).
        user_tokens: median length of a message (lognormal).
        output_tokens: median length of an answer (lognormal).
        spread: deviation of the logarithm of these lengths.
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
        texts, when, who, which, turns, inputs, outputs = streams(self.seed, 7)
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        # At least half of the longest prompt is left for tokens that are not shared.
        shared = SharedTexts(
            texts, self.system_prompts, self.system_tokens, self.spread, max(longest // 2, 1), block_size
        )
        draws = ConversationDraws(
            arrivals(when, self.rate, self.on_seconds, self.off_seconds),
            numbers_below(who, self.users),
            zipf(which, self.system_prompts, self.zipf),
            geometric(turns, self.turns),
            lengths(inputs, self.user_tokens, self.spread, longest),
            lengths(outputs, self.output_tokens, self.spread, longest),
            repeat(False),
        )
        return iter(Conversations("chat", draws, shared, self.users, block_size, longest))


@dataclass(kw_only=True)
class Agents(Generator):
    """Agents with tools: a prompt is the previous prompt, the tool call, and the tool's result.

    Args:
        agents: number of active agents; agents / rate seconds pass between steps on average.
        steps: mean number of steps in a task (geometric).
        kinds: number of agent types, each with its own instructions and tool definitions.
        zipf: exponent of Zipf's law for their popularity.
        instruction_tokens: median length of instructions (lognormal).
        result_tokens: median length of a tool's result (lognormal).
        output_tokens: median length of a tool call (lognormal).
        spread: deviation of the logarithm of these lengths.
        retry: fraction of steps that send the last prompt again unchanged.
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
        texts, when, who, which, turns, inputs, outputs, again = streams(self.seed, 8)
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        shared = SharedTexts(texts, self.kinds, self.instruction_tokens, self.spread, max(longest // 2, 1), block_size)
        draws = ConversationDraws(
            arrivals(when, self.rate, self.on_seconds, self.off_seconds),
            numbers_below(who, self.agents),
            zipf(which, self.kinds, self.zipf),
            geometric(turns, self.steps),
            lengths(inputs, self.result_tokens, self.spread, longest),
            lengths(outputs, self.output_tokens, self.spread, longest),
            (share < self.retry for share in uniforms(again)),
        )
        return iter(Conversations("agent", draws, shared, self.agents, block_size, longest))
