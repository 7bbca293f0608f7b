"""The hit rate of every policy at every size, and the knee: where a curve bends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import InvalidArgument, PolicyError
from blockyard.extending import Belady, HintedRun, LRUStack, PolicyRun
from blockyard.policies import EvictionPolicy

from ..oracle import HintOracle
from ..policy_names import OPTIMUM, PolicyName, error_location, exit_as_error, label_of, policy_for
from ..references import References
from ..sweep import run_all


@dataclass(frozen=True, slots=True)
class Knee:
    """policy: whose curve it is of. blocks, hit_rate: the point."""

    policy: str
    blocks: int
    hit_rate: float


def find_knee(sizes: NDArray[np.float64], hit_rates: NDArray[np.float64], working_set: float, infinite: float) -> int:
    """Return the index of the point farthest above the line from no cache at all to a cache of everything.

    sizes, hit_rates: (S,), S at least 1. working_set: blocks of everything; infinite: the hit rate with them, the end
    of the line. Both axes are scaled to 0 to 1, sizes not
    by their logarithm: a block costs the same anywhere (Kneedle: Satopää et al., ICDCS workshops 2011). A trace without
    hits has its knee at the first size. O(S).
    """
    if infinite <= 0:
        return 0
    return int(np.argmax(hit_rates / infinite - sizes / working_set))


#: Behind the name of a policy that was told hints.
WITH_HINTS = " + hints"


@dataclass(frozen=True, slots=True)
class HitCurves:
    """Block hit rates of one trace, by policy and capacity.

    sizes: (S,) capacities in blocks of `tokens_a_block` tokens, ascending. hit_rates: policy to (S,) shares of the
    trace's block references that hit, 0 to 1; "optimum" is an upper bound for all others, "lru + hints" is "lru" with
    hints. infinite: with no limit. error: policy to (S,) standard errors of a sampled curve, empty if the whole trace
    was used. num_hits: policy to (S,) exact counts, of the sample if sampled. knee: of LRU's curve at every capacity,
    not only at `sizes`, whichever policies were asked for. parts: of curves of several traces put together, the curves
    of each; else empty. letter: of such a part. hints: what was said where rows have hints, in words. tiers: what lies
    below
    the pool, in words; then rates are of tokens too, a line for each place. beside: other figures, (S,) by their names.
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

    policies: names as `parse_policies` gives them, or what makes a policy from a number of blocks, known by its
    `__name__`; "optimum" is Belady's. sizes: blocks, ascending. hints: every policy is also run with what this
    says of the trace's sessions, under its name and `WITH_HINTS`; the references must have them. LRU takes one pass
    for all sizes, O(references * log references); every other policy one for each. A sampled trace is run in
    caches smaller by the same rate (miniature simulation: Waldspurger et al., USENIX ATC 2017). jobs, backend,
    on_done: as in `run_all`. Raises `InvalidArgument`.
    """
    if not policies or not sizes:
        raise InvalidArgument(f"policies has {len(policies)} names and sizes {len(sizes)}; each needs one at least")
    wanted = [label_of(policy) for policy in policies]
    made = dict(zip(wanted, policies, strict=True))
    if len(made) < len(wanted):
        raise InvalidArgument(f"policies has {', '.join(wanted)}; each name may stand once")
    capacities = [max(round(size * references.rate), 1) for size in sizes]
    others = [policy for policy in wanted if policy != "lru"]
    cells: list[tuple[Any, ...]] = [
        (references, made[policy], capacity) for policy in others for capacity in capacities
    ]
    if hints is not None:
        said = hints.mark_ends(references)
        hinted = [policy for policy in wanted if policy != OPTIMUM]
        cells += [(references, made[policy], capacity, said) for policy in hinted for capacity in capacities]
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


def count_hits(references: References, policy: PolicyName, capacity: int, said: NDArray[np.int64] | None = None) -> int:
    """Return block references that hit in `capacity` blocks. O(references * cost of the policy).

    said: what `HintOracle.say` returns, for a run with hints. Raises `PolicyError` if a policy raises or names what is
    not cached.
    """
    ids, starts = np.ascontiguousarray(references.ids), np.ascontiguousarray(references.starts)
    if policy == OPTIMUM:
        optimum = Belady(capacity, ids, references.num_contents)
        optimum.run(starts)
        return optimum.num_hits
    with exit_as_error(label_of(policy)):
        run = _run_of(policy_for(policy, capacity + references.longest_sampled + 1), references, capacity, said)
        try:
            if isinstance(run, HintedRun) and said is not None:
                run.run_turns(ids, starts, references.sessions, said)
            else:
                run.run(ids, starts)
        except Exception as error:
            where = f"policy {label_of(policy)}, {capacity} blocks{error_location(error)}"
            raise PolicyError(f"{where}: {type(error).__name__}: {error}") from error
    return run.num_hits


def _run_of(policy: EvictionPolicy, references: References, capacity: int, said: NDArray[np.int64] | None) -> PolicyRun:
    longest = references.longest_sampled
    if said is None:
        return PolicyRun(policy, capacity, references.num_contents, longest)
    num_sessions = int(references.sessions.max(initial=-1)) + 1
    return HintedRun(policy, capacity, references.num_contents, longest, num_sessions)


def lru_hits(references: References) -> NDArray[np.int64]:
    """Count the hits of LRU at every capacity from 0 to num_contents, in one pass. O(references * log references)."""
    stack = LRUStack(len(references.ids), references.num_contents)
    stack.run(np.ascontiguousarray(references.ids), np.ascontiguousarray(references.starts))
    return np.cumsum(np.array(stack.num_hits_at))


def _knee_of_lru(references: References, stack: NDArray[np.int64], infinite: float) -> Knee:
    """Find it on the whole curve, which one pass has counted: the same whatever sizes are asked for. O(contents)."""
    sizes = np.arange(1, len(stack)) / references.rate
    rates = _within_bound(references, sizes, stack[1:])
    place = find_knee(sizes, rates, references.working_set, infinite)
    return Knee("lru", round(float(sizes[place])), float(rates[place]))


def _rates(references: References, hits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Hits as a share of all references. A sample has its expected number of them, whatever it drew: what it has too
    many or too few are references to the most popular contents, which hit in any cache."""
    expected = references.num_references * references.rate
    rates = (hits + (expected - len(references.ids))) / expected if references.halvings else hits / expected
    return np.clip(rates, 0.0, 1.0)


def _within_bound(
    references: References, sizes: Sequence[int] | NDArray[np.float64], hits: NDArray[np.int64]
) -> NDArray[np.float64]:
    """No request hits more blocks than the cache has. A sample's smallest cache, of one block, stands for many, and
    says too much of those with fewer."""
    rates = _rates(references, hits)
    return np.minimum(rates, np.array(sizes, np.float64) * references.num_requests / references.num_references)


def _sampling_errors(references: References, capacities: Sequence[int]) -> dict[str, NDArray[np.float64]]:
    """Return the standard error of LRU's sampled curve, from how four quarters of the sample differ."""
    quarters = []
    for group in range(4):
        part = references.select(group)
        hits = lru_hits(part)
        quarters.append(_rates(part, hits[np.minimum([max(c // 4, 1) for c in capacities], len(hits) - 1)]))
    return {"lru": np.std(quarters, axis=0, ddof=1) / 2}
