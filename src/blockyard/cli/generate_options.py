"""These are the options of `blockyard generate`, apart from the work, so that --help needs no torch."""

from __future__ import annotations

import argparse
from typing import Any

from .model_options import add_cache_options, add_model_options, add_rank_options

_DESCRIPTION = """\
Continue prompts, or answer them as a chat. One completion is printed as it comes; several are computed in one batch
and printed in order at the end. Without a prompt, each line of standard input is one.
"""

_EPILOG = """\
examples:
  blockyard generate "The capital of France is" --max-tokens 8
  blockyard generate --chat "Why is the sky blue?"
  blockyard generate --chat --system "Answer in rhymes." "Good morning!" --temperature 0.8 --n 3
  blockyard generate --json < prompts.txt
  torchrun --nproc-per-node 2 -m blockyard generate "The capital of France is"
"""


def add_generate_options(commands: Any) -> None:
    """Add the parser of `generate` to argparse's `commands`."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts in the shell",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: the lines of standard input")
    parser.add_argument("--chat", action="store_true", help="send each prompt through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system's message")
    parser.add_argument("--json", action="store_true", help="print one JSON object a completion")
    _add_sampling(parser.add_argument_group("sampling"))
    model = parser.add_argument_group("model")
    add_model_options(model)
    add_rank_options(model)
    add_cache_options(parser.add_argument_group("cache"), max_num_seqs=16)


def _add_sampling(group: Any) -> None:
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    share: dict[str, Any] = {"type": float, "metavar": "X"}
    group.add_argument("--max-tokens", default=128, help="new tokens at most; default: 128", **number)
    group.add_argument("--temperature", default=0.0, help="0 takes the likeliest token; default: 0", **share)
    group.add_argument("--top-k", default=0, help="draw among the N likeliest tokens; default: all", **number)
    group.add_argument("--top-p", default=1.0, help="draw among the likeliest that make this share", **share)
    group.add_argument("--min-p", default=0.0, help="leave out tokens less likely than this share of the best", **share)
    group.add_argument("--repetition-penalty", default=1.0, help="above 1: avoid what was said", **share)
    group.add_argument("--seed", default=0, help="of the draws; default: 0", **number)
    group.add_argument("--n", default=1, help="completions of each prompt; default: 1", **number)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the end, to --max-tokens")
