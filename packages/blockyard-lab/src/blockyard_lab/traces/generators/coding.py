"""Agents that write code: sessions of many turns over one long context, after figures that operators published."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...trace import TraceRequest
from .draws import SharedTexts, continued, lengths, numbers_below, streams, uniforms
from .options import LONGEST_PROMPT, Generator, option


@dataclass(slots=True)
class Session:
    """One at work. kind: its instructions. turns_left: to its end. context_tokens, full_ids: as a talk's seat.

    parent: the session that waits for this subagent.
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
    """Streams without end."""

    turns: Iterator[int]
    results: Iterator[int]
    outputs: Iterator[int]
    waits: Iterator[int]
    kinds: Iterator[int]
    chances: Iterator[float]
    subagent_turns: Iterator[int] = field(default_factory=lambda: iter(()))


@dataclass(kw_only=True)
class Coding(Generator):
    """Coding agents: a session is a median of 43 requests, with prompts of 142,000 tokens in the median and answers of
    444, over one context that grows, so that more than 96 % of the prompt tokens are of the request before.

    agents: sessions at work at a time. turns: median of a session (lognormal, spread). kinds: of agents, each with
    instructions and tools of instruction_tokens. result_tokens: median of what a turn adds to the context (lognormal of
    deviation tail). output_tokens: median of an answer. wait_seconds: median
    time of a tool, from seconds to minutes (lognormal of deviation wait_spread).
    subagents: share of the sessions that send out subagents, with instructions of their own and a fifth of the turns,
    at every tenth turn; the session waits for them. A context that gets too long is cut down to its instructions.
    Arrivals follow from tools and answers (20 ms a token): rate, on_seconds and off_seconds are not used.
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
        """The requests, without end. Memory: the last prompts of the sessions at work, and of those that wait."""
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
    """Sessions by the time of their next request. O(log sessions + blocks of the prompt) a request."""

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
        ids = continued(session.full_ids, num_tokens, options.hash_block_size, self._next_id)
        self._next_id += len(ids) - len(session.full_ids)
        num_output = next(self._draws.outputs)
        session.full_ids = ids[: num_tokens // options.hash_block_size]
        session.context_tokens = num_tokens + num_output
        session.turns_left -= 1
        return TraceRequest(arrival, num_tokens, num_output, ids, None, session.name)

    def _next_of(self, session: Session) -> Session:
        """Whose request is next: a subagent's, the session's own, the waiting one's, or a new session's."""
        if session.turns_left <= 0:
            return session.parent or self._begin(None)
        if session.spawns and session.turns_left % 10 == 0:
            return self._begin(session)
        return session
