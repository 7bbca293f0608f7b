"""The lab: traces of production and of generators, replayed through the manager.

Read it in this order:

    trace, traces               what a trace is; readers and generators
    survey, references          totals of a trace; its references, numbered and sampled
    sizes, policy_names         sizes and policies as people write them
    (blockyard.extending)       loops over whole traces, compiled with the core
    sweep                       many runs over processes, or a cluster
    curve                       hit rate against capacity, as a table, a picture and a page
    replay                      a trace through the real manager; replay.tiers through the real offload too
    planning                    blocks, requests and hit rates from a model, GPUs and a trace

`docs/lab.md` has the commands, and what their numbers mean.
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
