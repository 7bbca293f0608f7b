"""Why prompt tokens did not hit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..references import blocks_of
from ..simulation.seen import SeenContents
from ..trace import TraceRequest

#: 128 MiB: exact for the first eight million contents of a trace.
_NUM_SLOTS = 2**24


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Why prompt tokens did not hit: never_seen, in a block that no earlier prompt had; evicted, in one that an earlier
    prompt had and the pool no longer; tail, behind the last block that can hit, the last token of a prompt included.

    share_known: 1, or the share of contents that they were estimated from, where there were too many to remember.
    """

    never_seen: int
    evicted: int
    tail: int
    share_known: float = 1.0


class Causes:
    """Compares every prompt with all earlier ones: what a cache without limit would have hit.

    A prompt counts as seen once it was served, so refused requests must not be added. Memory is bounded;
    beyond it the shares are estimates from a sample of the contents.
    """

    def __init__(self, tokens_a_block: int, block_size: int) -> None:
        self._tokens_a_block = tokens_a_block
        self._block_size = block_size
        self._seen = SeenContents(_NUM_SLOTS)
        self._num_reachable = 0
        self._num_hittable = 0

    def add(self, request: TraceRequest) -> tuple[int, int]:
        """Note a prompt that is served. O(its blocks). Returns its tokens in blocks that can hit at all, and those of
        them that a cache without limit would hit; the latter is 0 once contents are sampled."""
        reachable = _whole(request.num_prompt_tokens - 1, self._block_size)
        self._num_reachable += reachable
        size = self._tokens_a_block or self._block_size
        ids = blocks_of(request, size)
        if ids is None:
            return reachable, 0
        leading = self._seen.add(np.ascontiguousarray(ids))
        hittable = _whole(min(max(leading, 0) * size, reachable), self._block_size)
        self._num_hittable += hittable
        return reachable, hittable

    def totals(self, num_hit: int, num_prompt_tokens: int) -> MissedTokens:
        """All prompts, of which `num_hit` tokens hit."""
        hittable = self._num_hittable
        if self._seen.halvings:
            hittable = round(self._num_reachable * int(self._seen.num_seen) / max(int(self._seen.num_references), 1))
        hittable = max(hittable, num_hit)
        return MissedTokens(
            never_seen=self._num_reachable - hittable,
            evicted=hittable - num_hit,
            tail=num_prompt_tokens - self._num_reachable,
            share_known=0.5**self._seen.halvings,
        )


def _whole(num_tokens: int, block_size: int) -> int:
    """The tokens of whole blocks."""
    return num_tokens // block_size * block_size
