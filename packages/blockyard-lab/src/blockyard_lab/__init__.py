"""The lab: replays traces through the manager, for hit-rate curves and capacity plans.

Read it in this order:

    trace, traces               requests in order of arrival; readers and generators of traces
    survey, references          totals of a trace; its block references, numbered and sampled
    policy_names                parses policies and pool sizes from the command line
    (blockyard.extending)       compiled loops over whole traces
    sweep                       independent runs on several processes or a cluster
    curve                       hit rate against capacity, as a table, a picture and a page
    replay                      a trace through the real manager; replay.tiers: through the real offload too
    closed                      sessions whose next turn comes after the answer, on a simulated engine
    fleet                       replicas and a router, simulated
    planning                    blocks, requests and hit rates from a model, GPUs and a trace

`docs/lab.md` has the commands and explains their numbers.
"""

from blockyard.errors import TraceError
from blockyard.extending import StateRun

from .references import References, UnknownContents, read_references
from .trace import Skips, Trace, TraceRequest

__all__ = [
    "References",
    "Skips",
    "StateRun",
    "Trace",
    "TraceError",
    "TraceRequest",
    "UnknownContents",
    "read_references",
]
