"""What a replay found, and why prompt tokens did not hit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blockyard import KVCacheManager, StepPlan
from blockyard.config import CacheConfig
from blockyard.errors import TraceError
from blockyard.extending import SeenContents

from ..references import blocks_of
from ..trace import TraceRequest
from .timeline import Timeline

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
        """Return all prompts, of which `num_hit` tokens hit."""
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
    """Return the tokens of whole blocks."""
    return num_tokens // block_size * block_size


#: Requests between two reports of progress.
REPORT_EVERY = 256


def never_fits(config: CacheConfig, request: TraceRequest) -> str:
    """Why a request with its output cannot run even alone; "" if it can. O(1): nothing of it is made to find out."""
    num_tokens = request.num_prompt_tokens + max(request.num_output_tokens, 1)
    num_blocks, usable = -(-num_tokens // config.block_size), config.num_blocks - 1 - config.watermark_blocks
    if num_blocks > usable:
        return f"it needs {num_blocks} blocks of {config.block_size} tokens with its output; the pool can give {usable}"
    if num_tokens > config.max_model_len:
        return f"it has {num_tokens} tokens with its output; max_model_len is {config.max_model_len}"
    return ""


@dataclass(frozen=True, slots=True)
class SimulatedTime:
    """What the service-time model makes of a replay by timestamps, in its seconds.

    arrivals, duration: from the first arrival to the last one, and to the last token. first_token, queueing: (median,
    90th, 99th percentile) from arrival to the first output token, and to the first computed token. num_steps: of the
    engine.
    """

    arrivals: float
    duration: float
    num_steps: int
    first_token: tuple[float, float, float]
    queueing: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One replay: a policy and a size.

    num_requests: finished. num_refused: that not even an empty pool could hold, left out; first_refused says which.
    num_prompt_tokens, num_hit_tokens: of first allocations; what a preempted request computed again is
    num_recomputed_tokens. misses: the tokens that did not hit, by cause; None if not asked for.
    peak_used_blocks: most blocks held at once. peak_running: most requests at once. wasted_share: slots held and not
    filled, of all slots held, when each request ended, 0 to 1. num_blocks_handled: blocks of all prompts and outputs.
    num_saved_blocks, num_fetched_blocks: moved from the pool to the CPU pool, and back.
    seconds: that the replay took, 0 without a clock. simulated: of a replay by timestamps, else None. timeline: of one
    for which it was asked, else None.
    """

    policy: str
    num_blocks: int
    block_size: int
    num_requests: int
    num_refused: int
    first_refused: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    num_recomputed_tokens: int
    misses: MissedTokens | None
    num_evicted_blocks: int
    num_preemptions: int
    peak_used_blocks: int
    peak_running: int
    wasted_share: float
    num_blocks_handled: int
    num_saved_blocks: int
    num_fetched_blocks: int
    seconds: float
    simulated: SimulatedTime | None = None
    timeline: Timeline | None = None

    @property
    def hit_rate(self) -> float:
        """Return the share of the prompt tokens that hit, 0 to 1."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def blocks_per_second(self) -> float:
        """Return blocks handled in a second of the replay."""
        return self.num_blocks_handled / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Tally:
    """Counters of a replay on its way."""

    num_requests: int = 0
    num_refused: int = 0
    first_refused: str = ""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    peak_running: int = 0
    num_blocks_handled: int = 0
    num_slots: int = 0
    num_filled: int = 0
    num_saved_blocks: int = 0
    num_fetched_blocks: int = 0

    def move(self, plan: StepPlan) -> int:
        """Count the blocks that a plan moves between the pool and the CPU pool; returns how many there are."""
        num_saved, num_fetched = len(plan.swap_outs), len(plan.swap_ins)
        self.num_saved_blocks += num_saved
        self.num_fetched_blocks += num_fetched
        return num_saved + num_fetched

    def refuse(self, number: int, why: str, strict: bool) -> None:
        """Count request `number`, from 1, that can never fit; with `strict`, raise `TraceError`."""
        if strict:
            raise TraceError(f"request {number}: {why}")
        self.num_refused += 1
        self.first_refused = self.first_refused or f"request {number}: {why}"

    def finish(self, num_tokens: int, num_output_tokens: int, block_size: int) -> None:
        """Count a request that ended with `num_tokens` computed."""
        num_blocks = -(-num_tokens // block_size)
        self.num_requests += 1
        self.num_output_tokens += num_output_tokens
        self.num_blocks_handled += num_blocks
        self.num_slots += num_blocks * block_size
        self.num_filled += num_tokens

    def result(
        self,
        policy: str,
        cache: KVCacheManager,
        causes: Causes | None,
        seconds: float,
        simulated: SimulatedTime | None,
        timeline: Timeline | None,
    ) -> ReplayResult:
        """Return all of it, with the manager's own counters."""
        stats = cache.stats()
        return ReplayResult(
            policy=policy,
            num_blocks=cache.config.num_blocks,
            block_size=cache.config.block_size,
            num_requests=self.num_requests,
            num_refused=self.num_refused,
            first_refused=self.first_refused,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_hit_tokens=stats.num_hit_tokens,
            num_recomputed_tokens=stats.num_resumed_tokens - stats.num_resumed_hit_tokens,
            misses=causes.totals(stats.num_hit_tokens, stats.num_prompt_tokens) if causes is not None else None,
            num_evicted_blocks=stats.num_evicted_blocks,
            num_preemptions=self.num_preemptions,
            peak_used_blocks=stats.peak_used_blocks,
            peak_running=self.peak_running,
            wasted_share=1 - self.num_filled / self.num_slots if self.num_slots else 0.0,
            num_blocks_handled=self.num_blocks_handled,
            num_saved_blocks=self.num_saved_blocks,
            num_fetched_blocks=self.num_fetched_blocks,
            seconds=seconds,
            simulated=simulated,
            timeline=timeline,
        )
