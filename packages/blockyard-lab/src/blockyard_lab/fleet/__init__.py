"""Simulates a router with replicas, for every router, and compares with bounds.

Read it in this order:

    loads, generated_loads   requests with the blocks of prompts and answers, from a trace or a seed
    replica                  a pool under LRU, and an engine with modelled step times
    simulation               a load through a router to replicas that may join and leave
    bounds                   one unlimited cache, and a search that knows the future
    compare                  every router on every run

`docs/fleet.md` has the command and explains its numbers.
"""

from __future__ import annotations

from .compare import Compared, FleetPlan, bound, compare, parse_routers, search
from .loads import Job, Load, load_of_trace
from .replica import Speed
from .simulation import Change, FleetRun, Outcome

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
