"""`python -m benchmarks.serving [--seconds 120] [--clients 64]`: latencies under load, and whether anything leaked."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from blockyard_engine.cli.demo_report import HANDBOOK, QUESTIONS

from .client import Seen, Work, run_clients
from .process import ServerProcess, server_process


def chats() -> list[list[dict[str, str]]]:
    """Chats that begin with the same handbook and end with a question of their own."""
    return [[{"role": "system", "content": HANDBOOK}, {"role": "user", "content": each}] for each in QUESTIONS]


def percentiles(samples: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    if len(samples) < 2:
        return {}
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return {f"p{cut}": round(cuts[cut - 1] * 1e3, 1) for cut in (50, 90, 99)}


def measure(server: ServerProcess, work: Work, num_clients: int, seconds: float) -> dict[str, Any]:
    """Load the server and report; `is_sound` says that nothing leaked and no error came that no client caused."""
    before, started = server.figures(), time.perf_counter()
    seen = asyncio.run(run_clients(server.address, work, num_clients, seconds))
    elapsed = time.perf_counter() - started  # answers that had begun are read to their ends
    end = server.wait_until_idle(60)
    after = server.figures()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    return {**_report(seen, grown, elapsed), "check": end, "is_sound": _is_sound(seen, end)}


def _report(seen: Seen, grown: dict[str, float], seconds: float) -> dict[str, Any]:
    queries = grown["vllm:prefix_cache_queries_total"]
    return {
        "seconds": round(seconds, 1),
        "num_answers": seen.num_answers,
        "num_disconnects": seen.num_disconnects,
        "num_errors": len(seen.errors),
        "errors": seen.errors[:5],
        "tokens_per_second": round(grown["vllm:generation_tokens_total"] / seconds, 1),
        "first_token_ms": percentiles(seen.first_token),
        "next_token_ms": percentiles(seen.next_token),
        "whole_answer_ms": percentiles(seen.whole),
        "hit_rate": round(grown["vllm:prefix_cache_hits_total"] / queries, 3) if queries else 0.0,
        "num_preemptions": int(grown["vllm:num_preemptions_total"]),
    }


def _is_sound(seen: Seen, end: dict[str, Any]) -> bool:
    return not seen.errors and end["ok"] and not end["has_unfinished"] and end["num_used_blocks"] == 0


def server_options(arguments: argparse.Namespace, *more: str) -> list[str]:
    """What the server is started with."""
    model = ["--model", arguments.model] if arguments.model else []
    return [*model, "--num-blocks", str(arguments.num_blocks), "--max-num-seqs", str(arguments.max_num_seqs), *more]


def add_options(parser: argparse.ArgumentParser, seconds: float, clients: int) -> None:
    """The options that both benchmarks of serving have."""
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of load; default: {seconds:g}")
    parser.add_argument("--clients", type=int, default=clients, help=f"at once; default: {clients}")
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--num-blocks", type=int, default=600)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)


def main() -> int:
    """Measure and print one JSON object; exit status 1 if the run was not sound."""
    parser = argparse.ArgumentParser(prog="benchmarks.serving", description=__doc__)
    add_options(parser, seconds=120, clients=64)
    parser.add_argument("--leaving", type=float, default=0.15, help="share of the requests whose client vanishes")
    arguments = parser.parse_args()
    with server_process(server_options(arguments, "--max-waiting", str(4 * arguments.clients))) as server:
        work = Work(server.model, chats(), leaving=arguments.leaving, seed=arguments.seed)
        report = measure(server, work, arguments.clients, arguments.seconds)
    print(json.dumps(report, indent=1))
    return 0 if report["is_sound"] else 1


if __name__ == "__main__":
    sys.exit(main())
