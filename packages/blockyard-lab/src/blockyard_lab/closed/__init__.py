"""Closed loops: sessions whose next turn comes after the answer, on a simulated engine over the real manager.

Read it in this order:

    turns                       a trace as sessions of turns, with ids of their blocks
    simulated_engine            admission, steps and preemption under a device's step times
    throughput_bounds           turns per hour that no schedule passes
    loop                        closed loops, and the same engine under a trace's own arrivals
    loop_result                 the result of a run, and its table
"""

from .loop import LoopOptions, run_closed, run_open
from .loop_result import LoopResult, loops_as_text
from .turns import SessionLoad, Turn, read_sessions

__all__ = [
    "LoopOptions",
    "LoopResult",
    "SessionLoad",
    "Turn",
    "loops_as_text",
    "read_sessions",
    "run_closed",
    "run_open",
]
