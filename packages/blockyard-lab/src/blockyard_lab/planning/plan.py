"""A capacity plan and its forms: text and JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.sizing import BlockSizeAdvice, CacheBudgetAdvice, KVCacheSpec

from ..printing import fine_percent, percent
from ..replay.tier_result import TierRow, tiers_as_text
from .gpu_memory import GIB, GpuBudget
from .hits import HitForecast, HitsAt

_WIDTH = 100
_LABEL = 26


@dataclass(frozen=True, slots=True)
class RequestsAt:
    """Concurrent requests of one length, prompt and output together.

    Attributes:
        label: "" for a requested length, else its meaning in the trace ("trace mean").
        num_tokens: the length.
        num_blocks: most blocks that a request holds.
        concurrent: requests that fit at once on a replica.
        concurrent_in_all: requests that fit at once on all replicas.
        num_bytes: bytes of these blocks on each GPU, and of the request's state.
        padding_bytes: bytes of them that stay empty because tokens differ in size between layer groups.
    """

    label: str
    num_tokens: int
    num_blocks: int
    concurrent: int
    concurrent_in_all: int
    num_bytes: int
    padding_bytes: int


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The result of `plan_capacity`. Blocks and tokens are those of one replica.

    Each rank of a replica holds a part of every block.

    Attributes:
        spec: the model's cache.
        num_gpus: number of GPUs.
        num_replicas: independent engines of `spec.tensor_parallel_size` GPUs, each with its own pool.
        gpu: memory of one GPU.
        num_blocks: blocks, including the null block.
        num_tokens: tokens that the pool can keep.
        fits: whether a request of the shortest length fits.
        smallest_tensor_parallel: if not, the smallest power of two of GPUs that would hold one; 0 if 1024 would not.
        num_cpu_blocks: blocks of the CPU tier.
        requests: concurrent requests, by length.
        running: expected running requests on a replica; None if unknown.
        cache_budget: blocks that they leave for cached prefixes.
        hits: hit rates; None without a trace that says what its prompts contain.
        block_size: the recommended block size.
        assumptions: everything assumed, as sentences.
    """

    spec: KVCacheSpec
    num_gpus: int
    num_replicas: int
    gpu: GpuBudget
    num_blocks: int
    num_tokens: int
    fits: bool
    smallest_tensor_parallel: int
    num_cpu_blocks: int
    requests: tuple[RequestsAt, ...]
    running: int | None
    cache_budget: CacheBudgetAdvice | None
    hits: HitForecast | None
    block_size: BlockSizeAdvice
    assumptions: tuple[str, ...]

    def as_dict(self, model: str, trace: str = "", tiers: Sequence[TierRow] = ()) -> dict[str, Any]:
        """Return plain values for JSON: bytes, tokens, rates from 0 to 1, and None for unknown values.

        Args:
            model: name of the model.
            trace: name of the trace; "" for none.
            tiers: replays with tiers.
        """
        spec, gpu = self.spec, self.gpu
        return {
            "model": model,
            "trace": trace or None,
            "fits": self.fits,
            "smallest_tensor_parallel": self.smallest_tensor_parallel or None,
            "num_gpus": self.num_gpus,
            "tensor_parallel": spec.tensor_parallel_size,
            "num_replicas": self.num_replicas,
            "memory": {**dataclasses.asdict(gpu), "usable_bytes": gpu.usable_bytes, "cache_bytes": gpu.cache_bytes},
            "cache": {
                "dtype": spec.dtype,
                "block_size": spec.block_size,
                "bytes_per_block": spec.bytes_per_block,
                "padding_bytes_per_block": [spec.bytes_per_block - page.used_bytes for page in spec.page_groups],
                "bytes_per_token": spec.bytes_per_token,
                "state_bytes_per_sequence": spec.state_bytes_per_sequence,
                "num_layers_by_kind": spec.num_layers_by_kind,
                "groups": [dataclasses.asdict(group) for group in spec.groups],
                "num_blocks": self.num_blocks,
                "num_tokens": self.num_tokens,
                "num_cpu_blocks": self.num_cpu_blocks,
            },
            "requests": [dataclasses.asdict(row) for row in self.requests],
            "running": self.running,
            "cache_budget": None if self.cache_budget is None else dataclasses.asdict(self.cache_budget),
            "hits": None if self.hits is None else dataclasses.asdict(self.hits),
            "tiers": [row.as_dict() for row in tiers],
            "block_size_advice": dataclasses.asdict(self.block_size),
            "assumptions": list(self.assumptions),
        }

    def as_text(self, model: str, trace: str = "", tiers: Sequence[TierRow] = ()) -> str:
        """Return the plan in sections; the assumptions come last.

        Args:
            model: name of the model.
            trace: name of the trace; "" for none.
            tiers: replays with tiers.
        """
        sections = [[_headline(self, model)], _memory(self)]
        if self.fits:
            sections += [_requests(self), _cache(self), _hits(self, trace)]
            sections.append(_bullets(f"Block size: {self.block_size.block_size} tokens", self.block_size.reasons))
        else:
            sections.append(_misfit(self))
        if tiers:
            sections.append([tiers_as_text(tiers)])
        sections.append(_bullets("Assumptions:", self.assumptions))
        return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _headline(plan: CapacityPlan, model: str) -> str:
    ranks = plan.spec.tensor_parallel_size
    engines = f"{plan.num_replicas} replica{'s' * (plan.num_replicas > 1)} of {ranks} GPU{'s' * (ranks > 1)}"
    return f"{model} on {plan.num_gpus} GPU{'s' * (plan.num_gpus > 1)}: {engines}"


def _memory(plan: CapacityPlan) -> list[str]:
    gpu = plan.gpu
    lines = [
        "Memory of one GPU",
        _line(f"{100 * gpu.utilization:g} % of {gpu.total_bytes / GIB:g} GiB", _gib(gpu.usable_bytes)),
        _line("weights", _gib(gpu.weight_bytes)),
        _line("activations", _gib(gpu.activation_bytes)),
        *([_line("states", _gib(gpu.state_bytes))] if gpu.state_bytes else []),
    ]
    if gpu.cache_bytes < 0:
        return [*lines, _line("missing", _gib(-gpu.cache_bytes))]
    return [*lines, _line("left for blocks", _gib(gpu.cache_bytes))]


def _misfit(plan: CapacityPlan) -> list[str]:
    shortest = min(plan.requests, key=lambda row: row.num_tokens)
    ranks, smallest = plan.spec.tensor_parallel_size, plan.smallest_tensor_parallel
    way_out = (
        f"It fits with --tensor-parallel {smallest}." if smallest else "It does not fit with up to 1024 GPUs either."
    )
    text = (
        f"It does not fit with --tensor-parallel {ranks}: a request of {shortest.num_tokens:,} tokens needs "
        f"{shortest.num_blocks:,} blocks and the null block, but only {plan.num_blocks:,} fit. {way_out}"
    )
    return textwrap.wrap(text, _WIDTH)


def _requests(plan: CapacityPlan) -> list[str]:
    heads = f"{'Requests of':<{_LABEL}}{'tokens':>12}{'blocks each':>14}{'MiB each':>12}{'at once':>10}"
    lines = [heads + _in_all(plan, "in all")]
    for row in plan.requests:
        line = f"  {row.label or 'a given length':<{_LABEL - 2}}{row.num_tokens:>12,}{row.num_blocks:>14,}"
        line += f"{row.num_bytes / 2**20:>12,.1f}{row.concurrent:>10,}{_in_all(plan, f'{row.concurrent_in_all:,}')}"
        lines.append(line if row.concurrent else f"{line}  does not fit")
    return lines


def _in_all(plan: CapacityPlan, text: str) -> str:
    return f"{text:>10}" if plan.num_replicas > 1 else ""


def _cache(plan: CapacityPlan) -> list[str]:
    spec = plan.spec
    each = f"of {spec.block_size} tokens, {spec.bytes_per_block / 2**20:.3f} MiB on each GPU"
    has_windows = any(group.sliding_window for group in spec.groups)
    condition = " if every layer keeps all of them" if has_windows else ""
    lines = [
        "Cache of one replica",
        _line("blocks", f"{plan.num_blocks:,}", each),
        _line("tokens", f"{plan.num_tokens:,}", f"{spec.bytes_per_token / 2**10:g} KiB each on each GPU{condition}"),
        *_unfilled(plan),
    ]
    if plan.num_cpu_blocks:
        lines.append(_line("CPU blocks", f"{plan.num_cpu_blocks:,}"))
    budget = plan.cache_budget
    if budget is not None:
        lines.append(
            _line(
                "held by running requests",
                f"{budget.reserved_blocks:,}",
                f"{plan.running:,} running, plus a fifth for growth",
            )
        )
        if budget.missing_blocks:
            # Replicas share the running requests equally.
            replicas = -(-budget.reserved_blocks * plan.num_replicas // (plan.num_blocks - 1))
            more = f"{replicas * plan.spec.tensor_parallel_size:,} GPUs ({replicas:,} replicas) are enough"
            why = f"the pool is too small for this load; {more}"
            lines.append(_line("missing for them", f"{budget.missing_blocks:,}", why))
        lines.append(_line("left for cached prefixes", f"{budget.num_blocks:,}"))
    return lines


def _unfilled(plan: CapacityPlan) -> list[str]:
    """Return how much of the worst request's blocks stays empty because tokens differ in size between layer groups."""
    most = max(plan.requests, key=lambda row: row.padding_bytes / row.num_bytes)
    if not most.padding_bytes:
        return []
    share = percent(most.padding_bytes / most.num_bytes)
    return [
        _line(
            "never filled",
            share,
            f"of a request of {most.num_tokens:,} tokens, because tokens differ in size between layer groups",
        )
    ]


def _hits(plan: CapacityPlan, trace: str) -> list[str]:
    if plan.hits is None:
        if not trace:
            why = "because there is no --trace"
        elif plan.cache_budget is None:
            why = "because all requests arrive at once and --running is not given"
        else:
            why = "because the trace does not say what its prompts contain"
        return [f"Hit rate: not known, {why}."]
    hits = plan.hits
    rows = [("expected", hits.expected), ("whole pool", hits.whole_pool), ("one more GiB per GPU", hits.one_more_gib)]
    rows.append(("a tenth more blocks", hits.tenth_more))
    if hits.with_cpu is not None:
        rows.append(("with the CPU tier", hits.with_cpu))
    lines = [f"Hit rate over {trace}", *(_hit_line(label, at, hits) for label, at in rows)]
    return [*lines, _line("with no limit", fine_percent(hits.unlimited))]


def _hit_line(label: str, at: HitsAt, hits: HitForecast) -> str:
    gained = (
        "" if label in ("expected", "whole pool") else f", {100 * (at.hit_rate - hits.expected.hit_rate):+.2f} points"
    )
    error = f" ± {100 * at.error:.2f}" if at.error else ""
    bound = ", at most" if label == "with the CPU tier" else ""
    return _line(label, fine_percent(at.hit_rate), f"{error}in {at.num_blocks:,} blocks{gained}{bound}".strip())


def _bullets(title: str, sentences: tuple[str, ...]) -> list[str]:
    lines = [title]
    for sentence in sentences:
        lines += textwrap.wrap(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _line(label: str, value: str, more: str = "") -> str:
    return f"  {label:<{_LABEL - 2}}{value:>12}  {more}".rstrip()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
