"""The command `blockyard fleet`."""

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
from ..fleet.generated_loads import LOADS
from ..fleet.simulation import MAX_BLOCKS, MAX_REPLICAS
from ..printing import short_number
from ..trace import Trace
from .lab_options import chosen_jobs, open_chosen_trace, report_skips, short_name

MAX_RUNS = 1000
MAX_SPEEDUP = 1e6
#: By default all replicas together hold a fifth of a trace's distinct blocks.
SHARE = 5


def run_fleet(options: argparse.Namespace) -> int:
    """Run every router and print the table."""
    routers = parse_routers(options.routing)
    require_int("--runs", options.runs, 1, MAX_RUNS)
    require_int("--search", options.search, 0, MAX_MOVES)
    given = [("added", text) for text in options.add]
    given += [("drained", text) for text in options.drain] + [("killed", text) for text in options.kill]
    changes = tuple(sorted((_change(what, text) for what, text in given), key=lambda change: change.at))
    if len(options.trace) == 1 and options.trace not in LOADS and not Path(options.trace).exists():
        raise InvalidArgument(f"LOAD is {options.trace!r}; it must be one of {', '.join(LOADS)}, or a trace")
    if options.trace in LOADS:
        kind = LOADS[options.trace]
        loads = [kind.make(seed) for seed in range(options.runs)]
        plan = _plan(options, kind.num_replicas, kind.num_blocks, kind.speed, changes)
    else:
        loads, plan = _of_trace(options, changes)
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
    """Cut a trace into `count` equal parts; leftover requests at the end are dropped."""
    num_requests = sum(1 for _ in trace)
    size = num_requests // count
    if not size:
        raise InvalidArgument(
            f"--runs is {count}; it must be at most the {num_requests} requests of {short_name(trace)}"
        )
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


def _change(what: str, text: str) -> Change:
    at, _, count = text.partition(":")
    try:
        seconds, number = float(at), int(count)
    except ValueError:
        seconds, number = -1.0, 0
    if not (0 <= seconds < math.inf and 1 <= number <= MAX_REPLICAS):
        raise InvalidArgument(f"{text!r} is not a time and a number of replicas; write seconds:number, like 60:2")
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
        print(as_text(_drop_zeros([row.as_row(least) for row in rows])))
        print(f"\nOne unlimited cache of all would compute {short_number(least)} tokens; no router computes less.")
        if found is not None:
            print(
                f"For the first run, a search that knows the future found {short_number(found[0])} tokens at a balance "
                f"of {found[1]:.2f}."
            )


def _drop_zeros(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Drop the columns that are 0 for every router."""
    empty = {name for name in ("retried", "too long", "unserved") if all(row[name] == "0" for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in empty} for row in rows]
