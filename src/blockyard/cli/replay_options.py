"""These are the options of `blockyard replay`, apart from the work."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import POLICY_HELP
from .cache_fields import add_cache_field
from .trace_options import add_output_options, add_running_options, add_trace_options

_DESCRIPTION = """\
Send a trace through the real block manager, for every policy and pool size, and say what hit, why the rest did not,
what was evicted, and how full the pool was. A second table says what the same memory would hold if every request's
were reserved in one piece: how much of it is never filled, and how many requests run at once.

Requests run one after another, each to its end, as fast as they go; with --timed they arrive by their timestamps,
run together, hold their blocks, wait for admission and are preempted where blocks are short.
"""

_EPILOG = """\
examples:
  blockyard replay                                              the small trace, four sizes, LRU
  blockyard replay trace.jsonl --blocks 10k,100k,25%            sizes as numbers, or shares of the working set
  blockyard replay trace.jsonl --policies lru,arc,mine.py:Mine  your own policy against the others
  blockyard replay trace.jsonl --timed --blocks 30k             by the trace's timestamps
  blockyard replay trace.jsonl --max-model-len 32768            paging against 32,768 tokens reserved a request
  blockyard replay trace.jsonl --timed -o run.html --blocks 30k what happened when, as a page
  blockyard replay trace.jsonl --blocks 30k --num-cpu-blocks 90k  evicted blocks kept in the CPU's memory
  blockyard replay trace.jsonl --csv > runs.csv                 for a spreadsheet
"""


def add_replay_options(commands: Any) -> None:
    """Add the parser of `replay` to argparse's `commands`."""
    parser = commands.add_parser(
        "replay",
        help="send a trace through the block manager: hit rates, causes of misses, evictions, preemptions",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    _add_cache(parser.add_argument_group("cache"))
    _add_time(parser.add_argument_group("time"))
    add_running_options(parser)
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE.html",
        help="with --timed: a page of what happened when; may be given often",
    )
    add_output_options(parser, "run")


def _add_cache(group: Any) -> None:
    group.add_argument(
        "--policies",
        "--policy",
        default="lru",
        metavar="LIST",
        help=f"of {POLICY_HELP}; file.py:ClassName is your own; default: lru",
    )
    group.add_argument(
        "--blocks",
        default="10%,25%,50%,100%",
        metavar="LIST",
        help="pool sizes, like 10k,100k,25%%; a share is of the blocks of all different prompts; "
        "default: 10%%,25%%,50%%,100%%",
    )
    add_cache_field(group, "block_size", default=16)
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of the longest request that the model serves, reserved for every request by an engine that does "
        "not page; default: the trace's longest request, rounded up to a power of two",
    )
    add_cache_field(group, "num_cpu_blocks", " that keeps what the pool evicts, for later hits", default=0)
    add_cache_field(group, "watermark", default=0.0)
    group.add_argument("--no-causes", action="store_true", help="do not look for the causes of misses; a little faster")


def _add_time(group: Any) -> None:
    group.add_argument("--timed", action="store_true", help="replay by timestamps, under a model of an engine's steps")
    add_cache_field(group, "max_num_seqs", default=256)
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, metavar="N", help="tokens of a step; default: 8192"
    )
    group.add_argument(
        "--speedup", type=float, default=1.0, metavar="X", help="arrivals come X times faster; default: 1"
    )
    for name, default, what in (
        ("step", 0.006, "every step"),
        ("prompt-token", 5e-5, "a prompt token computed"),
        ("decode", 2e-5, "a sequence that decodes"),
        ("context-token", 2e-8, "a token that a decode attends to"),
        ("moved-block", 8e-5, "a block moved between the pool and the CPU pool"),
    ):
        group.add_argument(
            f"--seconds-per-{name}", type=float, default=default, metavar="S", help=f"{what}; default: {default:g}"
        )
