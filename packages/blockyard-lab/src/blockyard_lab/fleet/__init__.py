"""Fleets of replicas behind a router are simulated here, for a load and every router, beside bounds.

Read it in this order:

    loads, made      jobs with the blocks of their prompts and answers; of a trace, or from a seed
    replica          a pool under LRU, and an engine whose steps take time
    run              a load through a router and replicas, some of which come and go
    bounds           one endless cache, and a search that knows the future
    compare          every router on every run

`docs/fleet.md` has the command, and what its figures mean.
"""

from __future__ import annotations

from .compare import Compared, FleetPlan, bound, compare, parse_routers, search
from .loads import Job, Load, load_of_trace
from .replica import Speed
from .run import Change, FleetRun, Outcome

__all__ = [
    "Change",
    "Compared",
    "FleetPlan",
    "FleetRun",
    "Job",
    "Load",
    "Outcome",
    "Speed",
    "bound",
    "compare",
    "load_of_trace",
    "parse_routers",
    "search",
]
