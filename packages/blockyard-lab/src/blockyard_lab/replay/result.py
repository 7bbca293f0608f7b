"""The result of a replay, and the causes of its misses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockyard import KVCacheManager, StepPlan
from blockyard.cli import as_text
from blockyard.config import CacheConfig
from blockyard.errors import TraceError
from blockyard.extending import SeenContents

from ..printing import fine_percent, short_number
from ..references import blocks_of
from ..trace import TraceRequest
from .timeline import Timeline

#: 128 MiB, exact for the first eight million contents of a trace.
_NUM_SLOTS = 2**24


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Prompt tokens that did not hit, by cause.

    Attributes:
        never_seen: tokens in blocks that no earlier prompt had.
        evicted: tokens in blocks that an earlier prompt had and the pool no longer has.
        tail: tokens after the last block that can hit, including a prompt's last token.
        share_known: 1, or the fraction of contents that the numbers were estimated from.
    """

    never_seen: int
    evicted: int
    tail: int
    share_known: float = 1.0


class MissCounter:
    """Compares every prompt with all earlier ones, to find the hits of an unlimited cache.

    Only served prompts may be added, since a refused one leaves nothing in the cache. Memory is bounded; beyond it the
    numbers are estimated from a sample of the contents.
    """

    def __init__(self, tokens_a_block: int, block_size: int) -> None:
        self._tokens_a_block = tokens_a_block
        self._block_size = block_size
        self._seen = SeenContents(_NUM_SLOTS)
        self._num_reachable = 0
        self._num_hittable = 0

    def add(self, request: TraceRequest) -> tuple[int, int]:
        """Add a served prompt. O(its blocks).

        Returns:
            Its tokens in blocks that can hit at all, and how many of them an unlimited cache would hit (0 once
                sampled).
        """
        reachable = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        self._num_reachable += reachable
        size = self._tokens_a_block or self._block_size
        ids = blocks_of(request, size)
        if ids is None:
            return reachable, 0
        leading = self._seen.add(np.ascontiguousarray(ids))
        hittable = min(max(leading, 0) * size, reachable) // self._block_size * self._block_size
        self._num_hittable += hittable
        return reachable, hittable

    def totals(self, num_hit: int, num_prompt_tokens: int) -> MissedTokens:
        """Return the misses of all prompts together, given that `num_hit` of their tokens hit."""
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


#: Requests between two reports of progress.
REPORT_EVERY = 256


def explain_misfit(config: CacheConfig, request: TraceRequest) -> str:
    """Return why a request with its output cannot run even in an empty pool, or "" if it can. O(1)."""
    num_tokens = request.num_prompt_tokens + max(request.num_output_tokens, 1)
    num_blocks, usable = -(-num_tokens // config.block_size), config.num_blocks - 1 - config.watermark_blocks
    if num_blocks > usable:
        return f"it needs {num_blocks} blocks of {config.block_size} tokens with its output; the pool has {usable}"
    if num_tokens > config.max_model_len:
        return f"it has {num_tokens} tokens with its output; max_model_len is {config.max_model_len}"
    return ""


@dataclass(frozen=True, slots=True)
class SimulatedTime:
    """Times of a replay by timestamps, in modelled seconds.

    Attributes:
        arrivals: first arrival to last arrival.
        duration: first arrival to last token.
        num_steps: steps of the engine.
        first_token: arrival to first output token: median, 90th and 99th percentile.
        queueing: arrival to first computed token, likewise.
    """

    arrivals: float
    duration: float
    num_steps: int
    first_token: tuple[float, float, float]
    queueing: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of one replay: one policy and one pool size.

    Attributes:
        policy: name of the policy.
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        num_requests: finished requests.
        num_refused: requests left out because even an empty pool could not hold them.
        first_refused: the first of them, and why.
        num_prompt_tokens: tokens of all prompts, counted at their first allocation.
        num_output_tokens: tokens of all outputs.
        num_hit_tokens: prompt tokens that hit, at the first allocation.
        num_recomputed_tokens: tokens computed again after a preemption.
        misses: prompt tokens that did not hit, by cause; None if not requested.
        num_evicted_blocks: evictions.
        num_preemptions: preemptions.
        peak_used_blocks: most blocks held at once.
        peak_running: most requests running at once.
        wasted_share: fraction of the held slots that were empty, over all requests at their end.
        num_blocks_handled: blocks of all prompts and outputs.
        num_saved_blocks: blocks moved to the CPU pool.
        num_fetched_blocks: blocks moved back.
        seconds: duration of the replay itself; 0 without a clock.
        simulated: times of a replay by timestamps, else None.
        timeline: counts over time if requested, else None.
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
        """Fraction of the prompt tokens that hit, 0 to 1."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def blocks_per_second(self) -> float:
        """Blocks handled per second of the replay itself."""
        return self.num_blocks_handled / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the timeline as plain values for JSON."""
        content = dataclasses.asdict(dataclasses.replace(self, timeline=None))
        del content["timeline"]
        if self.simulated is not None:
            for name in ("first_token", "queueing"):
                values = getattr(self.simulated, name)
                content["simulated"][name] = dict(zip(("p50", "p90", "p99"), values, strict=True))
        return {**content, "hit_rate": self.hit_rate, "blocks_per_second": self.blocks_per_second}

    def as_row(self, *, with_cpu_pool: bool = False) -> dict[str, str]:
        """Return the cells of a table row. Shares are of prompt tokens."""
        misses, tokens = self.misses, max(self.num_prompt_tokens, 1)
        row = {
            "policy": self.policy,
            "blocks": f"{self.num_blocks:,}",
            "tokens": short_number(self.num_blocks * self.block_size),
        }
        if self.num_refused:
            row["left out"] = f"{self.num_refused:,}"
        row["hit"] = fine_percent(self.hit_rate)
        if misses is not None:
            about = "" if misses.share_known == 1 else "~"
            row |= {
                "never seen": about + fine_percent(misses.never_seen / tokens),
                "evicted": about + fine_percent(misses.evicted / tokens),
                "tail": fine_percent(misses.tail / tokens),
            }
        row |= {
            "evictions": f"{self.num_evicted_blocks:,}",
            "peak blocks": f"{self.peak_used_blocks:,}",
            "waste": fine_percent(self.wasted_share),
        }
        if with_cpu_pool:
            row |= {"saved": f"{self.num_saved_blocks:,}", "fetched": f"{self.num_fetched_blocks:,}"}
        if self.simulated is not None:
            median, _, slowest = self.simulated.first_token
            row |= {
                "preempted": f"{self.num_preemptions:,}",
                "at once": str(self.peak_running),
                "TTFT p50": f"{median:.2f} s",
                "p99": f"{slowest:.2f} s",
                "took": f"{self.simulated.duration:,.0f} s",
            }
        row["blocks/s"] = short_number(self.blocks_per_second)
        return row


def results_as_text(results: Sequence[ReplayResult], *, with_cpu_pool: bool = False) -> str:
    """Return a table with a row per result. The columns are those of the longest row."""
    rows = [result.as_row(with_cpu_pool=with_cpu_pool) for result in results]
    columns = max(rows, key=len)
    return as_text([{column: row.get(column, "") for column in columns} for row in rows])


@dataclass(slots=True)
class Tally:
    """Counters of a running replay."""

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
        """Count the blocks that a plan moves between the pool and the CPU pool, and return their number."""
        num_saved, num_fetched = len(plan.swap_outs), len(plan.swap_ins)
        self.num_saved_blocks += num_saved
        self.num_fetched_blocks += num_fetched
        return num_saved + num_fetched

    def refuse(self, number: int, why: str, strict: bool) -> None:
        """Count request `number` (from 1) as one that never fits; raise `TraceError` if `strict`."""
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
        causes: MissCounter | None,
        seconds: float,
        simulated: SimulatedTime | None,
        timeline: Timeline | None,
    ) -> ReplayResult:
        """Return the result, combined with the manager's own counters."""
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
