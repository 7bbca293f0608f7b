"""People who talk with an assistant: conversations of several turns, minutes apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from ...trace import TraceRequest
from .draws import arrivals, geometric, lengths, numbers_below, streams, zipf
from .options import LONGEST_PROMPT, Generator, option
from .shared import SharedTexts
from .talks import Draws, Talks


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
        """The requests, without end. Memory: the live conversations' last prompts."""
        texts, when, who, which, turns, inputs, outputs = streams(self.seed, 7)
        longest, block_size = self.max_prompt_tokens, self.hash_block_size
        # Half of the longest prompt is left to what is not shared.
        shared = SharedTexts(
            texts, self.system_prompts, self.system_tokens, self.spread, max(longest // 2, 1), block_size
        )
        draws = Draws(
            arrivals(when, self.rate, self.on_seconds, self.off_seconds),
            numbers_below(who, self.users),
            zipf(which, self.system_prompts, self.zipf),
            geometric(turns, self.turns),
            lengths(inputs, self.user_tokens, self.spread, longest),
            lengths(outputs, self.output_tokens, self.spread, longest),
            repeat(False),
        )
        return iter(Talks("chat", draws, shared, self.users, block_size, longest))
