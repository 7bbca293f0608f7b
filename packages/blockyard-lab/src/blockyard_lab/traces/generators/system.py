"""Questions under system prompts that are shared: one after another, or in bursts of which most want the same thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...trace import TraceRequest
from .draws import SharedTexts, arrivals, continued, lengths, streams, uniforms, zipf
from .options import LONGEST_PROMPT, Generator, option


@dataclass(kw_only=True)
class System(Generator):
    """Shared system prompts: each request is one of them and a question that comes once.

    system_prompts: how many, popular by Zipf's law with exponent zipf. system_tokens, user_tokens, output_tokens:
    medians of lognormal lengths; spread: their deviation, of the logarithm.
    """

    system_prompts: int = option(100, 1, 10**6)
    zipf: float = option(1.0, 0.0, 10.0)
    system_tokens: int = option(1000, 1, LONGEST_PROMPT)
    user_tokens: int = option(150, 1, LONGEST_PROMPT)
    output_tokens: int = option(150, 1, LONGEST_PROMPT)
    spread: float = option(0.8, 0.0, 5.0)

    def endless(self) -> Iterator[TraceRequest]:
        """Return the requests, without end. Memory: 16 bytes a system prompt."""
        when, rest = self._streams()
        popular = zipf(rest.pop(), self.system_prompts, self.zipf)
        times = arrivals(when, self.rate, self.on_seconds, self.off_seconds)
        return self.questions(((arrival, next(popular)) for arrival, _ in times), rest)

    def _streams(self) -> tuple[np.random.Generator, list[np.random.Generator]]:
        when, *rest = streams(self.seed, 5)
        return when, rest

    def questions(self, asked: Iterator[tuple[float, int]], rest: list[np.random.Generator]) -> Iterator[TraceRequest]:
        """Yield a request for each (arrival, system prompt)."""
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        texts = SharedTexts(
            rest[0], self.system_prompts, self.system_tokens, self.spread, max(longest // 2, 1), block_size
        )
        inputs = lengths(rest[1], self.user_tokens, self.spread, longest)
        outputs = lengths(rest[2], self.output_tokens, self.spread, longest)
        next_id = texts.num_ids
        for arrival, text in asked:
            prefix = texts.ids(text)
            num_tokens = min(texts.tokens[text] + next(inputs), longest)
            ids = continued(prefix, num_tokens, block_size, next_id)
            next_id += len(ids) - len(prefix)
            yield TraceRequest(arrival, num_tokens, next(outputs), ids)


@dataclass(kw_only=True)
class Bursts(System):
    """Bursts: shared system prompts as in `System`, in phases, with one favourite a phase.

    focus: share of a burst's requests that take its favourite. off_seconds is 40 unless it is given.
    """

    off_seconds: float = option(40.0, 0.0, 1e6)
    focus: float = option(0.7, 0.0, 1.0)

    def endless(self) -> Iterator[TraceRequest]:
        """Return the requests, without end. Memory: 16 bytes a system prompt."""
        when, rest = self._streams()
        popular = rest.pop()
        choices = uniforms(popular.spawn(1)[0])
        texts = zipf(popular, self.system_prompts, self.zipf)
        times = arrivals(when, self.rate, self.on_seconds, self.off_seconds)
        return self.questions(self._asked(times, texts, choices), rest)

    def _asked(
        self, times: Iterator[tuple[float, int]], texts: Iterator[int], choices: Iterator[float]
    ) -> Iterator[tuple[float, int]]:
        current, favourite = -1, 0
        for arrival, burst in times:
            if burst != current:
                current, favourite = burst, next(texts)
            yield arrival, favourite if next(choices) < self.focus else next(texts)
