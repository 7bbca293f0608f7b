"""These are the options of `blockyard curve`, apart from the work."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import POLICY_HELP
from .cache_fields import add_cache_field
from .trace_options import add_output_options, add_running_options, add_trace_options

_DESCRIPTION = """\
Draw the hit rate of a trace against the capacity of the cache, for many policies and for the offline optimum, which no
policy can pass, from a thousandth of the working set to all of it; and mark where more blocks stop paying.

Requests run one after another through a cache of the trace's own blocks (512 tokens in a Mooncake trace), driven by
the manager's own policies. The hit rate is a share of the block references. A trace of more than 8 million references
is sampled, and the error is said.
"""

_EPILOG = """\
examples:
  blockyard curve                                           the small trace
  blockyard curve trace.jsonl -o curve.html -o curve.png    a page with hover, and a picture
  blockyard curve trace.jsonl --model llama-3.1-8b          sizes in GiB too
  blockyard curve mon.jsonl --beside tue.jsonl --policies lru,optimum -o days.html   two traces in one picture
  blockyard curve trace.jsonl --policies lru,mine.py:Mine,optimum --blocks 1k,3k,10k,30k
  blockyard curve trace.jsonl --policies lru,density,optimum --hints over,wait --hint-coverage 0.5 --hint-error 1.0
"""


def add_curve_options(commands: Any) -> None:
    """Add the parser of `curve` to argparse's `commands`."""
    parser = commands.add_parser(
        "curve",
        help="hit rate against capacity, policy by policy, with the offline optimum: table, picture, page",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_options(parser)
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="TRACE",
        help="another trace in the same table and pictures, with blocks of the same size; may be given often",
    )
    _add_cache(parser.add_argument_group("cache"))
    _add_hints(parser.add_argument_group("hints"))
    add_running_options(parser)
    parser.add_argument(
        "-o", "--output", action="append", default=[], metavar="FILE", help=".png, .svg or .html; may be given often"
    )
    add_output_options(parser, "size")


def _add_hints(group: Any) -> None:
    group.add_argument(
        "--hints",
        metavar="LIST",
        help="also run each policy with hints: over (a session's last request was its last), wait (when its next turn "
        "comes), or both",
    )
    group.add_argument(
        "--hint-coverage", type=float, metavar="SHARE", help="of the sessions that give hints, 0 to 1; default: 1"
    )
    group.add_argument(
        "--hint-error",
        type=float,
        metavar="S",
        help="waits are off by a lognormal factor, e to the power of S to either side; default: 0",
    )
    group.add_argument(
        "--hint-wrong", type=float, metavar="SHARE", help="of the hints that say the opposite, 0 to 1; default: 0"
    )
    group.add_argument(
        "--hint-seed", type=int, metavar="N", help="of the choice of sessions and of the errors; default: 0"
    )


def _add_cache(group: Any) -> None:
    group.add_argument(
        "--policies",
        "--policy",
        metavar="LIST",
        help=f"of {POLICY_HELP}; file.py:ClassName is your own, optimum the offline bound; default: all names and "
        "optimum, or with --beside lru,optimum",
    )
    group.add_argument("--blocks", metavar="LIST", help="capacities, like 1k,10k,25%%; default: --sizes of them")
    group.add_argument(
        "--sizes",
        type=int,
        default=40,
        metavar="N",
        help="how many capacities, from a thousandth of the working set to all of it; default: 40",
    )
    add_cache_field(group, "block_size", ", of a trace of tokens", default=16)
    group.add_argument(
        "--max-references", type=int, metavar="N", help="references kept before the trace is sampled; default: 8388608"
    )
    group.add_argument(
        "--model", metavar="MODEL", help="a config.json, its folder, or a known name: sizes in GiB of its cache too"
    )
    group.add_argument("--dtype", metavar="NAME", help="of the model's cache; default: its own")
