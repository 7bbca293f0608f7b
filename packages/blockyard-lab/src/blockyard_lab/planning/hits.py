"""What a trace would hit in caches of the sizes that a plan is about."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.sizing import KVCacheSpec

from ..curve import HitCurves, hit_curves
from ..references import References
from .memory import cached_tokens


@dataclass(frozen=True, slots=True)
class HitsAt:
    """The hit rate of a cache of one size.

    num_blocks: of the engine's blocks. trace_blocks: the same in blocks of the trace. hit_rate: share of the trace's
    references to blocks that hit, 0 to 1. error: the standard error of a sampled trace; 0 if the whole was used, or
    where it is not known.
    """

    num_blocks: int
    trace_blocks: int
    hit_rate: float
    error: float


@dataclass(frozen=True, slots=True)
class HitForecast:
    """Hit rates of one replica's cache that sees the whole trace.

    expected: in the blocks that running requests leave. whole_pool: in all of them, the upper end of the range.
    one_more_gib, tenth_more: as expected, with one GiB more on each GPU, and with a tenth more blocks. with_cpu: as
    expected, with the CPU tier's blocks too, an upper bound; None without a tier. unlimited: with no limit.
    """

    policy: str
    tokens_a_block: int
    sample_rate: float
    expected: HitsAt
    whole_pool: HitsAt
    one_more_gib: HitsAt
    tenth_more: HitsAt
    with_cpu: HitsAt | None
    unlimited: float


def forecast_hits(
    spec: KVCacheSpec,
    references: References,
    policy: str,
    *,
    expected: int,
    whole_pool: int,
    one_more_gib: int,
    tenth_more: int,
    with_cpu: int | None,
) -> HitForecast:
    """Run the trace in caches of these sizes, in the engine's blocks. As `hit_curves`, one run a size at most."""
    sizes = [expected, whole_pool, one_more_gib, tenth_more, *([] if with_cpu is None else [with_cpu])]
    wanted = sorted({max(min(_trace_blocks(spec, references, n), references.working_set), 1) for n in sizes})
    curves = hit_curves(references, [policy], wanted)

    def at(num_blocks: int) -> HitsAt:
        return _hits_at(curves, policy, num_blocks, _trace_blocks(spec, references, num_blocks))

    return HitForecast(
        policy=policy,
        tokens_a_block=references.tokens_a_block,
        sample_rate=references.rate,
        expected=at(expected),
        whole_pool=at(whole_pool),
        one_more_gib=at(one_more_gib),
        tenth_more=at(tenth_more),
        with_cpu=None if with_cpu is None else at(with_cpu),
        unlimited=curves.infinite,
    )


def _trace_blocks(spec: KVCacheSpec, references: References, num_blocks: int) -> int:
    return cached_tokens(spec, num_blocks) // references.tokens_a_block


def _hits_at(curves: HitCurves, policy: str, num_blocks: int, trace_blocks: int) -> HitsAt:
    if trace_blocks == 0:
        return HitsAt(num_blocks, 0, 0.0, 0.0)
    # Where the cache holds the whole working set the last size was asked for instead.
    place = min(int(curves.sizes.searchsorted(trace_blocks)), len(curves.sizes) - 1)
    error = curves.error.get(policy)
    rate = float(curves.hit_rates[policy][place])
    return HitsAt(num_blocks, trace_blocks, rate, 0.0 if error is None else float(error[place]))
