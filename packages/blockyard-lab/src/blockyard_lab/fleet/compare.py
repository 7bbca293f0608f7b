"""Runs every router on every load and summarises each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from blockyard.errors import InvalidArgument
from blockyard.routing import COSTS, make_cost

from ..printing import fine_percent, short_number
from ..sweep import run_all
from .bounds import AssignmentSearch, endless_pool
from .loads import Load
from .replica import Speed
from .simulation import Change, FleetRun, Outcome

#: Largest ratio of a replica's tokens to the mean in a search.
MOST_BALANCE = 1.2


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet to simulate.

    Args:
        num_replicas: replicas at the start.
        num_blocks: blocks of each replica.
        speed: step times.
        changes: replicas that join or leave.
    """

    num_replicas: int
    num_blocks: int
    speed: Speed
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Compared:
    """One router's results: means over the runs, and sums of the last three.

    Attributes:
        router: name of the router.
        computed: prompt tokens computed.
        hit_rate: fraction of the prompt tokens that hit.
        balance: most tokens of a replica, divided by the mean.
        most_balance: balance of the worst run.
        first_token_p50: median seconds to the first token.
        first_token_p99: 99th percentile.
        num_retried: requests that a killed replica lost.
        num_refused: requests that never fit.
        num_unserved: requests that arrived when there was no replica.
    """

    router: str
    computed: float
    hit_rate: float
    balance: float
    most_balance: float
    first_token_p50: float
    first_token_p99: float
    num_retried: int
    num_refused: int
    num_unserved: int

    def as_row(self, least: float) -> dict[str, str]:
        """Return the cells of a table row. `least` is the bound of computed tokens."""
        return {
            "router": self.router,
            "computed": short_number(self.computed),
            "of the bound": f"{self.computed / least:.2f}",
            "hits": fine_percent(self.hit_rate),
            "balance": f"{self.balance:.2f}",
            "worst": f"{self.most_balance:.2f}",
            "first token p50": f"{1000 * self.first_token_p50:,.0f} ms",
            "p99": f"{1000 * self.first_token_p99:,.0f} ms",
            "retried": f"{self.num_retried:,}",
            "too long": f"{self.num_refused:,}",
            "unserved": f"{self.num_unserved:,}",
        }


def parse_routers(text: str) -> list[str]:
    """Return the routers in "all" or a comma-separated list.

    Raises:
        InvalidArgument: for an unknown or repeated name.
    """
    names = list(COSTS) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in COSTS or names.count(name) > 1:
            raise InvalidArgument(f"routing has {name!r}; it must be all, or some of {', '.join(COSTS)}, each once")
    return names


def compare(
    loads: Sequence[Load],
    routers: Sequence[str],
    plan: FleetPlan,
    *,
    jobs: int = 1,
    backend: str = "processes",
    on_done: Callable[[int], None] | None = None,
) -> tuple[list[Compared], list[list[Outcome]]]:
    """Run each router on each load. The router's random seed is the load's index.

    Args:
        loads: the loads, one per run.
        routers: names of routers.
        plan: the fleet.
        jobs: number of processes; 1 runs everything in this one.
        backend: "processes", "ray" or "dask".
        on_done: called with the number of finished runs.

    Returns:
        A summary per router, and the outcomes by router and run.
    """
    cells = [(load, router, seed, plan) for router in routers for seed, load in enumerate(loads)]
    found = run_all(run_one, cells, jobs=jobs, backend=backend, on_done=on_done)
    outcomes = [found[place : place + len(loads)] for place in range(0, len(found), len(loads))]
    return [_compared(router, runs) for router, runs in zip(routers, outcomes, strict=True)], outcomes


def run_one(load: Load, router: str, seed: int, plan: FleetPlan) -> Outcome:
    return FleetRun(load, make_cost(router, seed), plan.num_replicas, plan.num_blocks, plan.speed, plan.changes).run()


def _compared(router: str, runs: Sequence[Outcome]) -> Compared:
    return Compared(
        router,
        mean(run.num_computed for run in runs),
        mean(run.hit_rate for run in runs),
        mean(run.balance for run in runs),
        max(run.balance for run in runs),
        mean(run.first_token(50) for run in runs),
        mean(run.first_token(99) for run in runs),
        sum(run.num_retried for run in runs),
        sum(run.num_refused for run in runs),
        sum(run.num_unserved for run in runs),
    )


def bound(loads: Sequence[Load]) -> float:
    """Return the tokens that one unlimited cache would compute, as a mean over the loads."""
    return mean(endless_pool(load) for load in loads)


def search(load: Load, outcomes: Sequence[Outcome], plan: FleetPlan, num_moves: int, seed: int) -> tuple[int, float]:
    """Return tokens and balance of the best assignment found, starting from the best outcome.

    Args:
        load: the load.
        outcomes: outcomes of routers on it.
        plan: the fleet.
        num_moves: moves to try.
        seed: seed of the moves.
    """
    start = min(outcomes, key=lambda outcome: outcome.num_computed)
    rows = {name: row for row, name in enumerate(start.computed)}
    assignments = [(job, rows[name]) for job, name in start.assignments]
    found = AssignmentSearch(load, len(rows), plan.num_blocks, assignments, MOST_BALANCE)
    found.improve(num_moves, seed)
    return found.num_computed, found.balance
