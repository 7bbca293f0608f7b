"""Coding agents: long sessions over one growing context, after figures that operators published."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...trace import TraceRequest
from .draws import SharedTexts, extend_prefix, lengths, numbers_below, streams, uniforms
from .generator import LONGEST_PROMPT, Generator, option


@dataclass(slots=True)
class Session:
    """An active session.

    Attributes:
        name: name in the trace.
        kind: number of its instruction text.
        turns_left: requests still to come.
        context_tokens: tokens of the last prompt and its answer.
        full_ids: ids of the last prompt's full blocks.
        spawns: whether it starts subagents.
        parent: for a subagent, the session that waits for it.
    """

    name: str
    kind: int
    turns_left: int
    context_tokens: int
    full_ids: NDArray[np.int64]
    spawns: bool
    parent: Session | None = None


@dataclass(slots=True)
class CodingDraws:
    """Endless streams of random values."""

    turns: Iterator[int]
    results: Iterator[int]
    outputs: Iterator[int]
    waits: Iterator[int]
    kinds: Iterator[int]
    chances: Iterator[float]
    subagent_turns: Iterator[int] = field(default_factory=lambda: iter(()))


@dataclass(kw_only=True)
class Coding(Generator):
    """Coding agents. A session has a median of 43 requests over one growing context.

    The median prompt has 142,000 tokens, the median answer 444, and more than 96 % of prompt tokens repeat the previous
    request's. A context that outgrows `max_prompt_tokens` is cut back to its instructions. Arrivals follow from tool
    times and answers (20 ms per token), so `rate`, `on_seconds` and `off_seconds` have no effect.

    Args:
        agents: number of concurrent sessions.
        turns: median number of requests in a session (lognormal with deviation `spread`).
        spread: deviation of the logarithm of `turns`.
        kinds: number of agent types, each with its own instructions.
        instruction_tokens: median length of a type's instructions and tool definitions.
        result_tokens: median tokens that a turn adds to the context (lognormal with deviation `tail`).
        tail: deviation of the logarithm of `result_tokens`.
        output_tokens: median length of an answer.
        wait_seconds: median run time of a tool (lognormal with deviation `wait_spread`).
        wait_spread: deviation of the logarithm of `wait_seconds`.
        subagents: fraction of sessions that start a subagent every tenth turn and wait for it. Subagents have their own
            instructions and a fifth of the turns.
    """

    hash_block_size: int = option(512, 1, 2**16)
    max_prompt_tokens: int = option(400_000, 1, LONGEST_PROMPT)
    agents: int = option(30, 1, 10**5)
    turns: int = option(43, 1, 10**6)
    spread: float = option(1.0, 0.0, 5.0)
    kinds: int = option(4, 1, 10**4)
    instruction_tokens: int = option(40_000, 1, LONGEST_PROMPT)
    result_tokens: int = option(2500, 1, LONGEST_PROMPT)
    output_tokens: int = option(444, 1, LONGEST_PROMPT)
    tail: float = option(1.0, 0.0, 5.0)
    wait_seconds: int = option(8, 1, 10**6)
    wait_spread: float = option(1.5, 0.0, 5.0)
    subagents: float = option(0.44, 0.0, 1.0)

    def endless(self) -> Iterator[TraceRequest]:
        texts, *rest = streams(self.seed, 8)
        longest = self.max_prompt_tokens
        shared = SharedTexts(
            texts, 2 * self.kinds, self.instruction_tokens, 0.3, max(longest // 2, 1), self.hash_block_size
        )
        draws = CodingDraws(
            lengths(rest[0], self.turns, self.spread, 10**6),
            lengths(rest[1], self.result_tokens, self.tail, longest),
            lengths(rest[2], self.output_tokens, 0.8, longest),
            lengths(rest[3], 1000 * self.wait_seconds, self.wait_spread, 10**9),
            numbers_below(rest[4], self.kinds),
            uniforms(rest[5]),
            lengths(rest[6], max(self.turns // 5, 1), self.spread, 10**6),
        )
        return iter(_Sessions(self, shared, draws))


class _Sessions:
    """Sessions ordered by the time of their next request. O(log sessions + blocks of the prompt) per request."""

    def __init__(self, options: Coding, texts: SharedTexts, draws: CodingDraws) -> None:
        self._options, self._texts, self._draws = options, texts, draws
        self._next_id, self._num_sessions = texts.num_ids, 0

    def __iter__(self) -> Iterator[TraceRequest]:
        order = self._options.agents
        due = [(0 if number == 0 else next(self._draws.waits), number, self._begin(None)) for number in range(order)]
        heapq.heapify(due)
        while True:
            when, _, session = heapq.heappop(due)
            request = self._request(when / 1000, session)
            yield request
            order += 1
            later = when + 20 * request.num_output_tokens + next(self._draws.waits)
            heapq.heappush(due, (later, order, self._next_of(session)))

    def _begin(self, parent: Session | None) -> Session:
        draws = self._draws
        kind = next(draws.kinds)
        self._num_sessions += 1
        if parent is None:
            turns, spawns = next(draws.turns), next(draws.chances) < self._options.subagents
        else:
            kind, turns, spawns = kind + self._options.kinds, next(draws.subagent_turns), False
        name = f"coding-{self._num_sessions}"
        return Session(name, kind, turns, self._texts.tokens[kind], self._texts.ids(kind), spawns, parent)

    def _request(self, arrival: float, session: Session) -> TraceRequest:
        options = self._options
        added = next(self._draws.results)
        if session.context_tokens + added > options.max_prompt_tokens:
            session.context_tokens = self._texts.tokens[session.kind]
            session.full_ids = self._texts.ids(session.kind)
        num_tokens = min(session.context_tokens + added, options.max_prompt_tokens)
        ids = extend_prefix(session.full_ids, num_tokens, options.hash_block_size, self._next_id)
        self._next_id += len(ids) - len(session.full_ids)
        num_output = next(self._draws.outputs)
        session.full_ids = ids[: num_tokens // options.hash_block_size]
        session.context_tokens = num_tokens + num_output
        session.turns_left -= 1
        return TraceRequest(arrival, num_tokens, num_output, ids, None, session.name)

    def _next_of(self, session: Session) -> Session:
        """Return the session to continue with: a subagent, the session itself, its waiting parent, or a new one."""
        if session.turns_left <= 0:
            return session.parent or self._begin(None)
        if session.spawns and session.turns_left % 10 == 0:
            return self._begin(session)
        return session
