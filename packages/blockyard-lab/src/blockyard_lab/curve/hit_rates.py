"""Runs every policy at every size, and finds the knee of a curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgument, PolicyError
from blockyard.extending import Belady, HintedRun, LRUStack, PolicyRun

from ..oracle import HintOracle
from ..policy_names import OPTIMUM, PolicyName, error_location, exit_as_error, label_of, labels_of, policy_for
from ..references import References
from ..sweep import run_all
from .curves import HitCurves, Knee


def find_knee(sizes: NDArray[np.float64], hit_rates: NDArray[np.float64], working_set: float, infinite: float) -> int:
    """Return the index of the point farthest above the line from no cache to a cache of everything.

    Both axes are scaled to 0 to 1, and sizes are not on a logarithmic scale since every block costs the same (Kneedle:
    Satopää et al., ICDCS workshops 2011). Without hits the result is 0. O(S).

    Args:
        sizes: (S,) capacities in blocks, S >= 1.
        hit_rates: (S,) hit rates.
        working_set: blocks that hold everything.
        infinite: hit rate with them, the end of the line.
    """
    if infinite <= 0:
        return 0
    return int(np.argmax(hit_rates / infinite - sizes / working_set))


#: Suffix of a policy's name in runs with hints.
WITH_HINTS = " + hints"


def hit_curves(
    references: References,
    policies: Sequence[PolicyName],
    sizes: Sequence[int],
    *,
    hints: HintOracle | None = None,
    name: str = "",
    jobs: int = 1,
    backend: str = "processes",
    on_done: Callable[[int], None] | None = None,
) -> HitCurves:
    """Run every policy at every size.

    LRU takes one pass for all sizes, O(references * log references); every other policy takes one per size. A sampled
    trace runs in caches that are smaller by the same rate (miniature simulation: Waldspurger et al., USENIX ATC 2017).

    Args:
        references: the trace, read with sessions if there are hints.
        policies: names, or callables that make a policy from a number of blocks and are labelled by `__name__`.
            "optimum" is Belady's.
        sizes: capacities in blocks, ascending.
        hints: also run every policy with these hints, under its name and `WITH_HINTS`.
        name: name of the trace.
        jobs: number of processes; 1 runs everything in this one.
        backend: "processes", "ray" or "dask".
        on_done: called with the number of finished runs.

    Raises:
        InvalidArgument: for an unknown policy, or none, or no size.
        PolicyError: if a policy fails.
    """
    if not policies or not sizes:
        raise InvalidArgument(f"policies has {len(policies)} entries and sizes {len(sizes)}; each needs at least one")
    wanted = labels_of(policies)
    made = dict(zip(wanted, policies, strict=True))
    if len(made) < len(wanted):
        raise InvalidArgument(f"policies has {', '.join(wanted)}; each name may occur only once")
    capacities = [max(round(size * references.rate), 1) for size in sizes]
    others = [policy for policy in wanted if policy != "lru"]
    cells: list[tuple[Any, ...]] = [
        (references, made[policy], capacity) for policy in others for capacity in capacities
    ]
    if hints is not None:
        ends = hints.mark_ends(references)
        hinted = [policy for policy in wanted if policy != OPTIMUM]
        cells += [(references, made[policy], capacity, ends) for policy in hinted for capacity in capacities]
        others += [f"{policy}{WITH_HINTS}" for policy in hinted]
        wanted = [row for policy in wanted for row in (policy, f"{policy}{WITH_HINTS}") if row in (policy, *others)]
    counted = iter(run_all(count_hits, cells, jobs=jobs, backend=backend, on_done=on_done))
    num_hits = {policy: np.array([next(counted) for _ in capacities], np.int64) for policy in others}
    stack = lru_hits(references)
    num_hits = {
        policy: stack[np.minimum(capacities, len(stack) - 1)] for policy in wanted if policy == "lru"
    } | num_hits
    num_hits = {policy: num_hits[policy] for policy in wanted}
    hit_rates = {policy: _within_bound(references, sizes, hits) for policy, hits in num_hits.items()}
    infinite = float(_rates(references, stack[-1:])[0])
    return HitCurves(
        trace=name,
        tokens_a_block=references.tokens_a_block,
        num_requests=references.num_requests,
        num_references=references.num_references,
        working_set=references.working_set,
        sample_rate=references.rate,
        sizes=np.array(sizes, np.int64),
        hit_rates=hit_rates,
        num_hits=num_hits,
        infinite=infinite,
        error=_sampling_errors(references, capacities) if references.halvings and "lru" in wanted else {},
        knee=_knee_of_lru(references, stack, infinite),
        hints="" if hints is None else hints.description,
    )


def count_hits(references: References, policy: PolicyName, capacity: int, ends: NDArray[np.int64] | None = None) -> int:
    """Return the number of block references that hit in `capacity` blocks. O(references * cost of the policy).

    Args:
        references: the trace.
        policy: a name, a callable that makes a policy from a number of blocks, or "optimum".
        capacity: blocks of the cache.
        ends: result of `HintOracle.mark_ends`, for a run with hints.

    Raises:
        PolicyError: if the policy raises, or evicts a block that is not cached.
    """
    ids, starts = np.ascontiguousarray(references.ids), np.ascontiguousarray(references.starts)
    if policy == OPTIMUM:
        optimum = Belady(capacity, ids, references.num_contents)
        optimum.run(starts)
        return optimum.num_hits
    with exit_as_error(label_of(policy)):
        longest, num_contents = references.longest_sampled, references.num_contents
        made = policy_for(policy, capacity + longest + 1)
        run: PolicyRun
        try:
            if ends is None:
                run = PolicyRun(made, capacity, num_contents, longest)
                run.run(ids, starts)
            else:
                num_sessions = int(references.sessions.max(initial=-1)) + 1
                run = hinted = HintedRun(made, capacity, num_contents, longest, num_sessions)
                hinted.run_turns(ids, starts, references.sessions, ends)
        except Exception as error:
            where = f"policy {label_of(policy)}, {capacity} blocks{error_location(error)}"
            raise PolicyError(f"{where}: {type(error).__name__}: {error}") from error
    return run.num_hits


def lru_hits(references: References) -> NDArray[np.int64]:
    """Return LRU's hits at every capacity from 0 to num_contents, in one pass. O(references * log references)."""
    stack = LRUStack(len(references.ids), references.num_contents)
    stack.run(np.ascontiguousarray(references.ids), np.ascontiguousarray(references.starts))
    return np.cumsum(np.array(stack.num_hits_at))


def _knee_of_lru(references: References, stack: NDArray[np.int64], infinite: float) -> Knee:
    """Return the knee of the whole curve, whatever sizes were requested. O(contents)."""
    sizes = np.arange(1, len(stack)) / references.rate
    rates = _within_bound(references, sizes, stack[1:])
    place = find_knee(sizes, rates, references.working_set, infinite)
    return Knee("lru", round(float(sizes[place])), float(rates[place]))


def _rates(references: References, hits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return hits as a fraction of all references.

    A sample's hits are divided by the number of references that it is expected to have. It differs from the number
    drawn by references to the most popular contents, which hit in any cache.
    """
    expected = references.num_references * references.rate
    rates = (hits + (expected - len(references.ids))) / expected if references.halvings else hits / expected
    return np.clip(rates, 0.0, 1.0)


def _within_bound(
    references: References, sizes: Sequence[int] | NDArray[np.float64], hits: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return hit rates, limited by the fact that a request hits at most as many blocks as the cache has.

    A sample's smallest cache, one block, stands for many, so it overestimates smaller ones.
    """
    rates = _rates(references, hits)
    return np.minimum(rates, np.array(sizes, np.float64) * references.num_requests / references.num_references)


def _sampling_errors(references: References, capacities: Sequence[int]) -> dict[str, NDArray[np.float64]]:
    """Return the standard error of LRU's sampled curve, estimated from four quarters of the sample."""
    quarters = []
    for group in range(4):
        part = references.select(group)
        hits = lru_hits(part)
        quarters.append(_rates(part, hits[np.minimum([max(c // 4, 1) for c in capacities], len(hits) - 1)]))
    return {"lru": np.std(quarters, axis=0, ddof=1) / 2}
