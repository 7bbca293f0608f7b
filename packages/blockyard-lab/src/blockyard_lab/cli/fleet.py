"""`blockyard fleet` says which router computes the fewest tokens, and how evenly, on simulated replicas."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from blockyard.arguments import require_int, require_number
from blockyard.cli import as_csv, as_json, as_text
from blockyard.errors import InvalidArgument
from blockyard.progress import WorkBar

from ..fleet import (
    Change,
    Compared,
    FleetPlan,
    Load,
    Speed,
    bound,
    compare,
    load_of_trace,
    parse_routers,
    search,
)
from ..fleet.bounds import MAX_MOVES
from ..fleet.made import LOADS
from ..fleet.run import MAX_BLOCKS, MAX_REPLICAS
from ..printing import fine_percent, short_number
from ..trace import Trace
from .lab_options import chosen_jobs, open_chosen_trace, report_skips, short_name

MAX_RUNS = 1000
MAX_SPEEDUP = 1e6
#: Of a trace's different blocks, what all replicas hold together unless it is said otherwise.
SHARE = 5


def run_fleet(options: argparse.Namespace) -> int:
    """Run every router and print the table."""
    routers = parse_routers(options.routing)
    require_int("--runs", options.runs, 1, MAX_RUNS)
    require_int("--search", options.search, 0, MAX_MOVES)
    changes = _changes(options)
    if len(options.trace) == 1 and options.trace not in LOADS and not Path(options.trace).exists():
        raise InvalidArgument(f"load is {options.trace!r}; it must be one of {', '.join(LOADS)}, or a trace")
    loads, plan = _made(options, changes) if options.trace in LOADS else _of_trace(options, changes)
    num_runs = len(routers) * len(loads)
    with WorkBar("runs", num_runs, not options.quiet) as bar:
        rows, outcomes = compare(
            loads,
            routers,
            plan,
            jobs=chosen_jobs(options, num_runs),
            backend=options.backend,
            on_done=bar.update,
        )
    least = bound(loads)
    found = search(loads[0], [runs[0] for runs in outcomes], plan, options.search, 0) if options.search else None
    _print(options, loads, plan, rows, least, found)
    return 0


def _made(options: argparse.Namespace, changes: tuple[Change, ...]) -> tuple[list[Load], FleetPlan]:
    made = LOADS[options.trace]
    loads = [made.make(seed) for seed in range(options.runs)]
    return loads, _plan(options, made.num_replicas, made.num_blocks, made.speed, changes)


def _of_trace(options: argparse.Namespace, changes: tuple[Change, ...]) -> tuple[list[Load], FleetPlan]:
    speedup = require_number("--speedup", options.speedup)
    if not 1 / MAX_SPEEDUP <= speedup <= MAX_SPEEDUP:
        raise InvalidArgument(f"--speedup is {speedup}; it must be from {1 / MAX_SPEEDUP:g} to {MAX_SPEEDUP:g}")
    trace = open_chosen_trace(options)
    loads = _parts(trace, options.runs, speedup)
    report_skips(trace)
    num_replicas = options.replicas or 8
    num_different = len({name for load in loads for job in load.jobs for name in job.ids})
    num_blocks = max(math.ceil(num_different / SHARE / num_replicas), 1)
    return loads, _plan(options, num_replicas, num_blocks, Speed(), changes)


def _parts(trace: Trace, count: int, speedup: float) -> list[Load]:
    """Cut a trace into parts of as many requests, the last ones left out where they do not divide."""
    num_requests = sum(1 for _ in trace)
    size = num_requests // count
    if not size:
        raise InvalidArgument(f"--runs is {count}; {short_name(trace)} has {num_requests} requests")
    return [load_of_trace(trace, part * size, size, speedup) for part in range(count)]


def _plan(
    options: argparse.Namespace, num_replicas: int, num_blocks: int, speed: Speed, changes: tuple[Change, ...]
) -> FleetPlan:
    return FleetPlan(
        num_replicas if options.replicas is None else require_int("--replicas", options.replicas, 1, MAX_REPLICAS),
        num_blocks if options.blocks is None else require_int("--blocks", options.blocks, 1, MAX_BLOCKS),
        speed,
        changes,
    )


def _changes(options: argparse.Namespace) -> tuple[Change, ...]:
    given = [("added", text) for text in options.add]
    given += [("drained", text) for text in options.drain] + [("killed", text) for text in options.kill]
    return tuple(sorted((_change(what, text) for what, text in given), key=lambda change: change.at))


def _change(what: str, text: str) -> Change:
    at, _, count = text.partition(":")
    try:
        seconds, number = float(at), int(count)
    except ValueError:
        seconds, number = -1.0, 0
    if not (0 <= seconds < math.inf and 1 <= number <= MAX_REPLICAS):
        raise InvalidArgument(f"{text!r} is no time and number of replicas; write seconds:number, like 60:2")
    return Change(seconds, **{what: number})


def _print(
    options: argparse.Namespace,
    loads: list[Load],
    plan: FleetPlan,
    rows: list[Compared],
    least: float,
    found: tuple[int, float] | None,
) -> None:
    about: dict[str, Any] = {
        "load": loads[0].name,
        "runs": len(loads),
        "requests": sum(len(load.jobs) for load in loads),
        "replicas": plan.num_replicas,
        "blocks": plan.num_blocks,
        "tokens_a_block": loads[0].block_size,
        "bound": least,
        "search": None if found is None else {"computed": found[0], "balance": found[1]},
    }
    if options.json:
        print(as_json({**about, "routers": [dataclasses.asdict(row) for row in rows]}))
    elif options.csv:
        print(as_csv([dataclasses.asdict(row) for row in rows]))
    else:
        print(
            f"{about['load']}: {about['requests']:,} requests in {about['runs']} runs, {plan.num_replicas} replicas of "
            f"{plan.num_blocks:,} blocks of {about['tokens_a_block']} tokens\n"
        )
        print(as_text(_same_columns([_row(row, least) for row in rows])))
        print(
            f"\nOne endless cache of all replicas would compute {short_number(least)} tokens: no router computes less."
        )
        if found is not None:
            print(
                f"A search that knows the future found, for the first run, {short_number(found[0])} tokens at a balance"
                f" of {found[1]:.2f}."
            )


def _row(row: Compared, least: float) -> dict[str, str]:
    return {
        "router": row.router,
        "computed": short_number(row.computed),
        "of the bound": f"{row.computed / least:.2f}",
        "hits": fine_percent(row.hit_rate),
        "balance": f"{row.balance:.2f}",
        "worst": f"{row.most_balance:.2f}",
        "first token p50": f"{1000 * row.first_token_p50:,.0f} ms",
        "p99": f"{1000 * row.first_token_p99:,.0f} ms",
        "retried": f"{row.num_retried:,}",
        "too long": f"{row.num_refused:,}",
        "unserved": f"{row.num_unserved:,}",
    }


def _same_columns(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Leave out what no router has."""
    empty = {name for name in ("retried", "too long", "unserved") if all(row[name] == "0" for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]
