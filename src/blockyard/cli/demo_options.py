"""These are the options of `blockyard demo`, apart from the work, so that --help needs no torch."""

from __future__ import annotations

import argparse
from typing import Any

from .cache_fields import add_cache_field
from .model_options import add_model_choice, add_step_budget

_DESCRIPTION = """\
Answer chat requests with a real language model whose attention keys and values live in Blockyard's blocks, and
report what paging and prefix sharing saved.

Every request begins with the same long instructions (a railway's handbook) and ends with a question of its own. More
of them are sent than the batch holds at once, so they wait, run and finish at different times.
"""

_EPILOG = """\
examples:
  blockyard demo                                SmolLM2-135M-Instruct, 32 requests, on the CPU
  blockyard demo --verify                       and the same tokens without the prefix cache
  blockyard demo --num-blocks 60                a pool so small that requests are preempted
  blockyard demo --model ./my-llama --json      your own model, and figures for a program to read
"""


def add_demo_options(commands: Any) -> None:
    """Add the parser of `demo` to argparse's `commands`."""
    parser = commands.add_parser(
        "demo",
        help="answer chat requests with a real model, and report what the blocks saved",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_choice(parser.add_argument_group("model"))
    _add_work(parser.add_argument_group("requests"))
    _add_cache(parser.add_argument_group("cache"))
    _add_output(parser.add_argument_group("output"))


def _add_work(group: Any) -> None:
    group.add_argument("--requests", type=int, default=32, metavar="N", help="chat requests to send; default: 32")
    group.add_argument(
        "--max-new-tokens", type=int, default=48, metavar="N", help="tokens of an answer at most; default: 48"
    )
    add_cache_field(group, "max_num_seqs", default=12)
    add_step_budget(group)
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token; default: 0"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draws at a temperature above 0; default: 0"
    )


def _add_cache(group: Any) -> None:
    add_cache_field(group, "num_blocks", default=256)
    add_cache_field(group, "block_size", default=16)
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")
    group.add_argument(
        "--verify",
        action="store_true",
        help="run a second time with the prefix cache switched the other way, and compare every token",
    )


def _add_output(group: Any) -> None:
    group.add_argument("--answers", type=int, default=4, metavar="N", help="answers to print; default: 4")
    group.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
