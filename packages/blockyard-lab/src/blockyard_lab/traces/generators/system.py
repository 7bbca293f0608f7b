"""Questions after shared system prompts: evenly mixed, or in bursts that prefer one system prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...trace import TraceRequest
from .draws import SharedTexts, arrivals, extend_prefix, lengths, streams, uniforms, zipf
from .generator import LONGEST_PROMPT, Generator, option


@dataclass(kw_only=True)
class System(Generator):
    """Shared system prompts, each followed by a unique question.

    Args:
        system_prompts: number of system prompts.
        zipf: exponent of Zipf's law for their popularity.
        system_tokens: median length of a system prompt (lognormal).
        user_tokens: median length of a question (lognormal).
        output_tokens: median length of an answer (lognormal).
        spread: deviation of the logarithm of these lengths.
    """

    system_prompts: int = option(100, 1, 10**6)
    zipf: float = option(1.0, 0.0, 10.0)
    system_tokens: int = option(1000, 1, LONGEST_PROMPT)
    user_tokens: int = option(150, 1, LONGEST_PROMPT)
    output_tokens: int = option(150, 1, LONGEST_PROMPT)
    spread: float = option(0.8, 0.0, 5.0)

    def endless(self) -> Iterator[TraceRequest]:
        when, rest = self._streams()
        popular = zipf(rest.pop(), self.system_prompts, self.zipf)
        times = arrivals(when, self.rate, self.on_seconds, self.off_seconds)
        return self.questions(((arrival, next(popular)) for arrival, _ in times), rest)

    def _streams(self) -> tuple[np.random.Generator, list[np.random.Generator]]:
        when, *rest = streams(self.seed, 5)
        return when, rest

    def questions(self, times: Iterator[tuple[float, int]], rest: list[np.random.Generator]) -> Iterator[TraceRequest]:
        """Yield a request for each (arrival, system prompt)."""
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        texts = SharedTexts(
            rest[0], self.system_prompts, self.system_tokens, self.spread, max(longest // 2, 1), block_size
        )
        inputs = lengths(rest[1], self.user_tokens, self.spread, longest)
        outputs = lengths(rest[2], self.output_tokens, self.spread, longest)
        next_id = texts.num_ids
        for arrival, text in times:
            prefix = texts.ids(text)
            num_tokens = min(texts.tokens[text] + next(inputs), longest)
            ids = extend_prefix(prefix, num_tokens, block_size, next_id)
            next_id += len(ids) - len(prefix)
            yield TraceRequest(arrival, num_tokens, next(outputs), ids)


@dataclass(kw_only=True)
class Bursts(System):
    """Shared system prompts that arrive in bursts, each with a favourite.

    Args:
        off_seconds: mean pause between bursts; 40 by default.
        focus: fraction of a burst's requests that use its favourite system prompt.
    """

    off_seconds: float = option(40.0, 0.0, 1e6)
    focus: float = option(0.7, 0.0, 1.0)

    def endless(self) -> Iterator[TraceRequest]:
        when, rest = self._streams()
        popular = rest.pop()
        choices = uniforms(popular.spawn(1)[0])
        texts = zipf(popular, self.system_prompts, self.zipf)
        times = arrivals(when, self.rate, self.on_seconds, self.off_seconds)
        return self.questions(self._choose_texts(times, texts, choices), rest)

    def _choose_texts(
        self, times: Iterator[tuple[float, int]], texts: Iterator[int], choices: Iterator[float]
    ) -> Iterator[tuple[float, int]]:
        current, favourite = -1, 0
        for arrival, burst in times:
            if burst != current:
                current, favourite = burst, next(texts)
            yield arrival, favourite if next(choices) < self.focus else next(texts)
