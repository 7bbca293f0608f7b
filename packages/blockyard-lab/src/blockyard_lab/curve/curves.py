"""Hit-rate curves of one or several traces, and their forms: table, JSON and CSV."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard.cli import as_narrow_text, as_text

from ..policy_names import OPTIMUM
from ..printing import fine_percent, short_number

GIB = 2**30


#: Claims need this many sizes; with fewer, a policy's losses may go unnoticed.
ENOUGH_SIZES = 100
#: Smaller differences, in points, count as equal.
SAME_POINTS = 0.005
#: Only a gap between LRU and the optimum above this many points counts for `gap_closed`.
GAP_POINTS = 5.0
FIFTH = 0.2


@dataclass(frozen=True, slots=True)
class Claim:
    """A policy's distance from LRU over all sizes, in percentage points of block hit rate.

    Attributes:
        worst: lowest distance.
        median: median distance.
        mean: mean distance.
        best: highest distance.
        below: fraction of the sizes at which the policy is below LRU.
        gap_closed: mean fraction of the gap between LRU and the optimum, over the sizes where the gap exceeds 5 points.
            nan if there are none or no optimum was run.
        fifth: fraction of these sizes at which gap_closed is 0.2 or more; nan likewise.
        gap_sizes: number of these sizes.
    """

    worst: float
    median: float
    mean: float
    best: float
    below: float
    gap_closed: float
    fifth: float
    gap_sizes: int

    def as_dict(self) -> dict[str, float | None]:
        """Return the fields with None for nan, which JSON does not have."""
        return {name: None if value != value else value for name, value in dataclasses.asdict(self).items()}

    def as_row(self) -> dict[str, str]:
        """Return the cells of a table row."""
        points = {name: f"{getattr(self, name):+.2f}" for name in ("worst", "median", "mean", "best")}
        closed, fifth = (fine_percent(self.gap_closed), fine_percent(self.fifth)) if self.gap_sizes else ("-", "-")
        return {"sizes below": fine_percent(self.below), **points, "gap closed": closed, "a fifth or more": fifth}


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee of a policy's curve: above it, more blocks add fewer hits than an average block of the working set."""

    policy: str
    blocks: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class HitCurves:
    """Block hit rates by policy and capacity, of one trace or several.

    Attributes:
        trace: name of the trace.
        tokens_a_block: tokens per block.
        num_requests: number of requests in the trace.
        num_references: number of block references in the trace.
        working_set: blocks that would hold the whole trace.
        sample_rate: fraction of the contents that was simulated.
        sizes: (S,) capacities in blocks, ascending.
        hit_rates: (S,) fraction of the block references that hit, by policy. "optimum" bounds all others; "lru + hints"
            is "lru" with hints.
        num_hits: (S,) exact number of hits, by policy; of the sample if sampled.
        infinite: hit rate without a capacity limit.
        error: (S,) standard errors of a sampled curve, by policy; empty if the whole trace was simulated.
        knee: knee of LRU's curve over all capacities, also if LRU was not requested.
        parts: each trace's curves, if these combine several traces; else empty.
        letter: letter of a part, A, B and so on; else "".
        hints: description of the hints, if policies were also run with hints.
        tiers: description of the tiers below the pool. Hit rates are then of tokens, one line for the pool and each
            tier.
        beside: (S,) further statistics by name.
    """

    trace: str
    tokens_a_block: int
    num_requests: int
    num_references: int
    working_set: int
    sample_rate: float
    sizes: NDArray[np.int64]
    hit_rates: dict[str, NDArray[np.float64]]
    num_hits: dict[str, NDArray[np.int64]]
    infinite: float
    error: dict[str, NDArray[np.float64]]
    knee: Knee
    parts: tuple[HitCurves, ...] = ()
    letter: str = ""
    hints: str = ""
    tiers: str = ""
    beside: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def per_trace(self) -> tuple[HitCurves, ...]:
        """Curves of each trace."""
        return self.parts or (self,)

    def label(self, policy: str) -> str:
        """Return the name of a policy's line: "lru", or "lru B" for the second of several traces."""
        return f"{policy} {self.letter}" if self.letter else policy

    def above_lru(self) -> dict[str, NDArray[np.float64]]:
        """Return (S,) percentage points above LRU for each policy except the optimum. Empty without LRU."""
        if "lru" not in self.hit_rates:
            return {}
        lru = self.hit_rates["lru"]
        others = {policy: rates for policy, rates in self.hit_rates.items() if policy not in {"lru", OPTIMUM}}
        return {policy: 100 * (rates - lru) for policy, rates in others.items()}

    def claims(self) -> dict[str, Claim]:
        """Return a claim for each policy except LRU and the optimum. Empty without LRU. O(policies * sizes)."""
        gap = np.zeros(len(self.sizes))
        if OPTIMUM in self.hit_rates and "lru" in self.hit_rates:
            gap = 100 * (self.hit_rates[OPTIMUM] - self.hit_rates["lru"])
        has_gap = gap > GAP_POINTS
        claims = {}
        for policy, points in self.above_lru().items():
            closed = points[has_gap] / gap[has_gap]
            claims[policy] = Claim(
                worst=float(points.min()),
                median=float(np.median(points)),
                mean=float(points.mean()),
                best=float(points.max()),
                below=float(np.mean(points < -SAME_POINTS)),
                gap_closed=float(closed.mean()) if len(closed) else float("nan"),
                fifth=float(np.mean(closed >= FIFTH)) if len(closed) else float("nan"),
                gap_sizes=len(closed),
            )
        return claims

    def rows(self, bytes_per_block: int = 0) -> list[dict[str, Any]]:
        """Return a row of numbers for each size. Hit rates are 0 to 1.

        Args:
            bytes_per_block: bytes of keys and values in a block, to add sizes in GiB; 0 to leave them out.
        """
        rows = []
        for index, size in enumerate(self.sizes.tolist()):
            row: dict[str, Any] = {"blocks": size, "tokens": size * self.tokens_a_block}
            if bytes_per_block:
                row["GiB"] = size * bytes_per_block / GIB
            row |= {policy: float(rates[index]) for policy, rates in self.hit_rates.items()}
            row |= {f"{policy} error": float(errors[index]) for policy, errors in self.error.items()}
            row |= {name: float(values[index]) for name, values in self.beside.items()}
            rows.append(row)
        return rows

    def as_dict(self, bytes_per_block: int = 0) -> dict[str, Any]:
        """Return everything as plain values for JSON.

        Args:
            bytes_per_block: bytes of keys and values in a block, to add sizes in GiB; 0 to leave them out.
        """
        names = ("trace", "num_requests", "num_references", "working_set", "tokens_a_block")
        return {
            **{name: getattr(self, name) for name in names},
            "bytes_per_block": bytes_per_block,
            "sample_rate": self.sample_rate,
            "infinite": self.infinite,
            "hints": self.hints,
            "knee": dataclasses.asdict(self.knee),
            "num_hits": {policy: hits.tolist() for policy, hits in self.num_hits.items()},
            "sizes": self.rows(bytes_per_block),
            "claims": {policy: claim.as_dict() for policy, claim in self.claims().items()},
        }

    def as_text(self, bytes_per_block: int = 0, num_wanted: int | None = None) -> str:
        """Return a table with headline, claims and knees.

        Args:
            bytes_per_block: bytes of keys and values in a block, to add sizes in GiB; 0 to leave them out.
            num_wanted: number of sizes that was requested, if some of them rounded to the same number of blocks.
        """
        table = []
        for row in self.rows(bytes_per_block):
            cells = {"blocks": f"{row.pop('blocks'):,}", "tokens": short_number(row.pop("tokens"))}
            if bytes_per_block:
                cells["GiB"] = f"{row.pop('GiB'):,.2f}"
            table.append(cells | {name: fine_percent(value) for name, value in row.items()})
        sections = ["\n".join(part.headline() for part in self.per_trace)]
        sections.append(as_narrow_text(table, num_keys=3 if bytes_per_block else 2))
        for part in self.per_trace:
            sections += _claims_text(part, len(self.sizes) if num_wanted is None else num_wanted)
        sections.append("\n".join(part.conclusion(bytes_per_block) for part in self.per_trace))
        last = "knee: up to it a block adds more hits than the average block of the working set; beyond it, fewer"
        return "\n\n".join(sections) + f"\n{last}"

    def headline(self) -> str:
        """Return the trace's name and totals."""
        sampled = ""
        if self.sample_rate < 1:
            sampled = f"; a sample of one content in {round(1 / self.sample_rate)}"
        letter = f"{self.letter}: " if self.letter else ""
        return (
            f"{letter}{self.trace}: {self.num_requests:,} requests, {self.num_references:,} references to "
            f"{self.working_set:,} blocks of {self.tokens_a_block} tokens{sampled}"
            f"{f'; hints: {self.hints}' if self.hints else ''}"
        )

    def conclusion(self, bytes_per_block: int = 0) -> str:
        """Return the knee and the hit rate without limit, as a sentence."""
        knee = self.knee
        memory = f" ({knee.blocks * bytes_per_block / GIB:,.1f} GiB)" if bytes_per_block else ""
        return (
            f"knee of {self.label(knee.policy)}: {knee.blocks:,} blocks{memory} hit {fine_percent(knee.hit_rate)}; "
            f"with no limit {fine_percent(self.infinite)}"
        )


def _claims_text(curves: HitCurves, num_wanted: int) -> list[str]:
    """Return tables of claims and their explanations. Empty if only LRU and the optimum were run."""
    if not set(curves.hit_rates) - {"lru", OPTIMUM}:
        return []
    if num_wanted < ENOUGH_SIZES and not curves.hints:
        return [f"Claims about a policy need {ENOUGH_SIZES} sizes or more: --sizes 300"]
    if "lru" not in curves.hit_rates:
        return ["Claims about a policy are distances from lru: add lru to --policies"]
    of = f" ({curves.letter})" if curves.letter else ""
    table = as_text([{"policy": policy, **claim.as_row()} for policy, claim in curves.claims().items()])
    said = [
        f"above lru over {len(curves.sizes)} sizes, in points{of}:\n{table}",
        "sizes below: share of the sizes at which the policy is below lru",
    ]
    if OPTIMUM not in curves.hit_rates:
        return [*said, "To see how much of the gap from lru to the optimum is closed, add optimum to --policies"]
    what = f"where optimum is more than {GAP_POINTS:g} points above lru"
    said[-1] += (
        f"\ngap closed: how far from lru to optimum, mean over the sizes {what};\n"
        f"a fifth or more: share of these sizes where it is {fine_percent(FIFTH)} or more"
    )
    return said
