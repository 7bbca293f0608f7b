"""`python -m benchmarks.serving.prefix`: the same shared-prefix load with the prefix cache on and off, as ratios.

The two take turns, so that a machine that becomes slower does so for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from .__main__ import add_options, chats, measure, server_options
from .client import Work
from .process import server_process


def one_round(arguments: argparse.Namespace, number: int, *more: str) -> dict[str, Any]:
    """One server, one load. No client vanishes: both serve the same requests."""
    with server_process(server_options(arguments, "--max-waiting", str(4 * arguments.clients), *more)) as server:
        work = Work(server.model, chats(), (16, 32), leaving=0.0, seed=arguments.seed + number)
        return measure(server, work, arguments.clients, arguments.seconds)


def middle(rounds: list[dict[str, Any]], name: str) -> float:
    """The median over the rounds of a figure, or of its median."""
    return statistics.median(each[name]["p50"] if isinstance(each[name], dict) else each[name] for each in rounds)


def main() -> int:
    """Measure and print; exit status 1 if a round was not sound."""
    parser = argparse.ArgumentParser(prog="benchmarks.serving.prefix", description=__doc__)
    add_options(parser, seconds=30, clients=16)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    on, off = [], []
    for number in range(arguments.rounds):
        on.append(one_round(arguments, number))
        off.append(one_round(arguments, number, "--no-prefix-cache"))
    summary = {
        name: {"cache_on": middle(on, name), "cache_off": middle(off, name)}
        for name in ("first_token_ms", "next_token_ms", "whole_answer_ms", "tokens_per_second", "hit_rate")
    }
    summary["ratios"] = {
        "first_token": round(summary["first_token_ms"]["cache_off"] / summary["first_token_ms"]["cache_on"], 2),
        "tokens_per_second": round(
            summary["tokens_per_second"]["cache_on"] / summary["tokens_per_second"]["cache_off"], 2
        ),
    }
    print(json.dumps(summary, indent=1))
    return 0 if all(each["is_sound"] for each in on + off) else 1


if __name__ == "__main__":
    sys.exit(main())
