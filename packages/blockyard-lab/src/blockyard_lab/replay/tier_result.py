"""Results of replays with tiers below the pool, and their table. Needs no tiers package."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.cli import as_text

from ..printing import fine_percent


@dataclass(frozen=True, slots=True)
class TierHits:
    """Hits, writes and evictions of one tier.

    Attributes:
        num_hit_tokens: prompt tokens loaded from it.
        written_bytes: bytes stored in it.
        written_bytes_a_day: bytes stored per day of the trace's time; None if the trace has no duration.
        num_evicted: objects evicted.
        num_bytes: bytes in it at the end.
    """

    num_hit_tokens: int
    written_bytes: int
    written_bytes_a_day: float | None
    num_evicted: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TierReplayResult:
    """The result of a replay with tiers.

    Attributes:
        num_requests: served requests.
        num_refused: requests that never fit into the pool.
        num_prompt_tokens: tokens of all prompts.
        num_pool_tokens: prompt tokens that hit in the pool.
        tiers: each tier's contribution, nearest first.
        missed: computed prompt tokens of whole blocks, by cause (`Offload`).
        mean_seconds: mean time from the start of a request to its first token: loading and computing, no queue.
    """

    num_requests: int
    num_refused: int
    num_prompt_tokens: int
    num_pool_tokens: int
    tiers: tuple[TierHits, ...]
    missed: dict[str, int]
    mean_seconds: float


@dataclass(frozen=True, slots=True)
class TierRow:
    """One pool with its tiers, and the result of a replay with them.

    Attributes:
        policy: the pool's eviction policy.
        num_blocks: blocks of the pool.
        tier_bytes: size of each tier, nearest first.
        result: counts of the replay.
        optimum: upper bound of the hit rate for one cache of the same total size; None if unknown.
    """

    policy: str
    num_blocks: int
    tier_bytes: tuple[int, ...]
    result: TierReplayResult
    optimum: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        pool = {"policy": self.policy, "num_blocks": self.num_blocks, "tier_bytes": list(self.tier_bytes)}
        return {**pool, **dataclasses.asdict(self.result), "optimum": self.optimum}

    def as_row(self) -> dict[str, str]:
        """Return the cells of a table row. Shares are of prompt tokens."""
        result, tokens = self.result, max(self.result.num_prompt_tokens, 1)
        hits = [tier.num_hit_tokens for tier in result.tiers]
        cells = {"policy": self.policy, "blocks": f"{self.num_blocks:,}"}
        cells |= {f"tier {number}": f"{size / 2**30:,.4g} GiB" for number, size in enumerate(self.tier_bytes, 1)}
        cells |= {"pool": fine_percent(result.num_pool_tokens / tokens)}
        cells |= {f"hit {number}": fine_percent(hit / tokens) for number, hit in enumerate(hits, 1)}
        cells |= {
            "not worth": fine_percent(result.missed["not_worth"] / tokens),
            "all": fine_percent((result.num_pool_tokens + sum(hits)) / tokens),
            "optimum": "-" if self.optimum is None else fine_percent(self.optimum),
        }
        for number, tier in enumerate(result.tiers, 1):
            a_day = tier.written_bytes_a_day
            cells[f"GiB a day {number}"] = "-" if a_day is None else f"{a_day / 2**30:,.4g}"
        return {**cells, "first token": f"{result.mean_seconds:.3f} s"}


def tiers_as_text(rows: Sequence[TierRow]) -> str:
    """Return a heading and a table with a row per pool and its tiers."""
    return f"With tiers below the pool: requests one after another\n\n{as_text([row.as_row() for row in rows])}"
