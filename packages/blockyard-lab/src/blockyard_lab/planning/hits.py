"""Hit rates of a trace in caches of the sizes that a plan considers."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.sizing import KVCacheSpec

from ..curve import hit_curves
from ..references import References
from .gpu_memory import cached_tokens


@dataclass(frozen=True, slots=True)
class HitsAt:
    """The hit rate of a cache of one size.

    Attributes:
        num_blocks: size in the engine's blocks.
        trace_blocks: size in the trace's blocks.
        hit_rate: fraction of the trace's block references that hit.
        error: standard error of a sampled trace; 0 if not sampled or unknown.
    """

    num_blocks: int
    trace_blocks: int
    hit_rate: float
    error: float


@dataclass(frozen=True, slots=True)
class HitForecast:
    """Hit rates of one replica's cache if it sees the whole trace.

    Attributes:
        policy: eviction policy.
        tokens_a_block: tokens per block of the trace.
        sample_rate: fraction of the contents that was simulated.
        expected: in the blocks that running requests leave.
        whole_pool: hit rate with all blocks, an upper bound.
        one_more_gib: like `expected`, with one more GiB on each GPU.
        tenth_more: like `expected`, with a tenth more blocks.
        with_cpu: like `expected`, with the CPU tier's blocks added (an upper bound); None without a tier.
        unlimited: without a capacity limit.
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
    """Run the trace in caches of these sizes, given in the engine's blocks, by `hit_curves`.

    Args:
        spec: the model's cache.
        references: the trace.
        policy: eviction policy.
        expected: size for `HitForecast.expected`.
        whole_pool: size for `whole_pool`.
        one_more_gib: size for `one_more_gib`.
        tenth_more: size for `tenth_more`.
        with_cpu: size for `with_cpu`, or None.
    """
    sizes = [expected, whole_pool, one_more_gib, tenth_more, *([] if with_cpu is None else [with_cpu])]
    wanted = sorted({max(min(_trace_blocks(spec, references, n), references.working_set), 1) for n in sizes})
    curves = hit_curves(references, [policy], wanted)

    def at(num_blocks: int) -> HitsAt:
        trace_blocks = _trace_blocks(spec, references, num_blocks)
        if trace_blocks == 0:
            return HitsAt(num_blocks, 0, 0.0, 0.0)
        # Sizes above the working set were run at its size, the last one.
        index = min(int(curves.sizes.searchsorted(trace_blocks)), len(curves.sizes) - 1)
        error = float(curves.error[policy][index]) if policy in curves.error else 0.0
        return HitsAt(num_blocks, trace_blocks, float(curves.hit_rates[policy][index]), error)

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
