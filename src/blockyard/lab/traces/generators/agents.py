"""Agents that call tools: long shared instructions, many quick steps, results that are longer than answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...trace import TraceRequest
from .draws import arrivals, geometric, lengths, numbers_below, streams, uniforms, zipf
from .options import LONGEST_PROMPT, Generator, option
from .shared import SharedTexts
from .talks import Draws, Talks


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
        """The requests, without end. Memory: the last prompts of the agents at work."""
        texts, when, who, which, turns, inputs, outputs, again = streams(self.seed, 8)
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        shared = SharedTexts(texts, self.kinds, self.instruction_tokens, self.spread, max(longest // 2, 1), block_size)
        draws = Draws(
            arrivals(when, self.rate, self.on_seconds, self.off_seconds),
            numbers_below(who, self.agents),
            zipf(which, self.kinds, self.zipf),
            geometric(turns, self.steps),
            lengths(inputs, self.result_tokens, self.spread, longest),
            lengths(outputs, self.output_tokens, self.spread, longest),
            (share < self.retry for share in uniforms(again)),
        )
        return iter(Talks("agent", draws, shared, self.agents, block_size, longest))
