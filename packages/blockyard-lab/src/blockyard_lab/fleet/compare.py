"""Here every router runs on every load, and the figures of each are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from blockyard.errors import InvalidArgument
from blockyard.routing import COSTS, make_cost

from ..sweep import run_all
from .bounds import AssignmentSearch, endless_pool
from .loads import Load
from .replica import Speed
from .run import Change, FleetRun, Outcome

#: What a search may give a replica above the mean.
MOST_BALANCE = 1.2


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """This is a fleet to try: replicas of `num_blocks` blocks, how fast they are, and who comes and goes when."""

    num_replicas: int
    num_blocks: int
    speed: Speed
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Compared:
    """One router's figures, means over the runs. computed: prompt tokens. most_balance: of the worst run."""

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


def parse_routers(text: str) -> list[str]:
    """Read "all", or names with commas. Raises `InvalidArgument` for a name that is none, and for one given twice."""
    names = list(COSTS) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in COSTS or names.count(name) > 1:
            raise InvalidArgument(f"routing has {name!r}; it takes all, or some of {', '.join(COSTS)}, each once")
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
    """Run each router on each load; router number k draws with seed k's load. Also return the outcomes, by router."""
    cells = [(load, router, seed, plan) for router in routers for seed, load in enumerate(loads)]
    found = run_all(run_one, cells, jobs=jobs, backend=backend, on_done=on_done)
    outcomes = [found[place : place + len(loads)] for place in range(0, len(found), len(loads))]
    return [_compared(router, runs) for router, runs in zip(routers, outcomes, strict=True)], outcomes


def run_one(load: Load, router: str, seed: int, plan: FleetPlan) -> Outcome:
    """Do one run."""
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
    """Return what one endless cache of all would compute, a mean over the loads."""
    return mean(endless_pool(load) for load in loads)


def search(load: Load, outcomes: Sequence[Outcome], plan: FleetPlan, num_moves: int, seed: int) -> tuple[int, float]:
    """Return tokens and balance of the assignment that a search finds from the outcome that computed the fewest."""
    start = min(outcomes, key=lambda outcome: outcome.num_computed)
    rows = {name: row for row, name in enumerate(start.computed)}
    placed = [(job, rows[name]) for job, name in start.placed]
    found = AssignmentSearch(load, len(rows), plan.num_blocks, placed, MOST_BALANCE)
    found.improve(num_moves, seed)
    return found.num_computed, found.balance
