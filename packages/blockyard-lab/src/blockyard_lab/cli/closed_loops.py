"""Closed loops, and orders of admission under a trace's own arrivals, for `blockyard replay` and `blockyard curve`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

from blockyard.arguments import require_int
from blockyard.cli import as_csv, as_json
from blockyard.errors import InvalidArgument
from blockyard.progress import WorkBar

from ..closed import LoopOptions, LoopResult, SessionLoad, loops_as_text, read_sessions, run_closed, run_open
from ..closed.loop import MAX_SESSIONS
from ..closed.simulated_engine import parse_admission
from ..policy_names import OPTIMUM, parse_policies, parse_sizes
from ..replay.timed import DEVICES, ServiceModel
from ..sweep import run_all
from .lab_options import chosen_jobs, open_chosen_trace, report_skips, short_name, skips_as_dict

MAX_RUNS = 1000
BLOCK_SIZE = 512


def chosen_device(options: argparse.Namespace) -> ServiceModel:
    """Return the named device, with the constants that were given as options."""
    names = [field.name for field in dataclasses.fields(ServiceModel)]
    given = {name: getattr(options, name, None) for name in names}
    return dataclasses.replace(
        DEVICES[options.device], **{name: value for name, value in given.items() if value is not None}
    )


def run_loops(options: argparse.Namespace) -> list[LoopResult]:
    """Run every pool, number of sessions, order of admission and seed, and print the results.

    Returns:
        The results, in this order.
    """
    orders = [name.strip() for name in (options.admission or "arrival").split(",")]
    for name in orders:
        parse_admission(name)
    (policy, *others) = parse_policies(options.policies or "lru", "--policies")
    if others or policy == OPTIMUM:
        raise InvalidArgument(f"--policies is {options.policies!r}; with --closed or --admission it must be one policy")
    counts = _counts(options.sessions) if options.closed else [0]
    seeds = range(options.seed, options.seed + require_int("--runs", options.runs, 1, MAX_RUNS))
    trace = open_chosen_trace(options)
    load = read_sessions(trace, options.block_size or BLOCK_SIZE, max_pause=options.max_pause)
    report_skips(trace)
    beside = [_beside(options, text) for text in getattr(options, "beside", [])]
    common = LoopOptions(
        num_blocks=4,
        device=chosen_device(options),
        policy=policy,
        hours=options.hours,
        warm_up=options.warm_up,
        **{
            name: getattr(options, name)
            for name in ("watermark", "max_num_seqs")
            if getattr(options, name, None) is not None
        },
    )
    sizes = parse_sizes(options.blocks, load.num_shared + sum(load.num_ids))
    cells: list[tuple[Any, ...]] = [
        (
            [(load, count), *beside] if count else load,
            dataclasses.replace(common, num_blocks=max(size, 4), admission=order, seed=seed),
        )
        for size, count, order, seed in itertools.product(sizes, counts, orders, seeds if options.closed else [0])
    ]
    with WorkBar("runs", len(cells), not options.quiet) as bar:
        results = run_all(
            run_closed if options.closed else run_open,
            cells,
            jobs=chosen_jobs(options, len(cells)),
            backend=options.backend,
            on_done=bar.update,
        )
    if options.json:
        print(as_json({"skips": skips_as_dict(trace), "runs": [result.as_dict() for result in results]}))
    elif options.csv:
        print(as_csv([flatten(result.as_dict()) for result in results]))
    else:
        num_turns = sum(map(len, load.sessions))
        kind = "a closed loop" if options.closed else "by timestamps"
        print(
            f"{short_name(trace)}: {num_turns:,} requests of {len(load.sessions):,} sessions in {kind}, blocks of "
            f"{load.block_size}\n{loops_as_text(results)}"
        )
    return results


def _counts(text: str) -> list[int]:
    return [_count("--sessions", part) for part in text.split(",")]


def _count(name: str, text: str) -> int:
    if not text.strip().isdigit():
        raise InvalidArgument(f"{name} has {text!r}; it must be a number of sessions, like 16")
    return require_int(name, int(text), 1, MAX_SESSIONS)


def _beside(options: argparse.Namespace, text: str) -> tuple[SessionLoad, int]:
    number, _, name = text.partition(":")
    count = _count("--beside", number)
    if not name or not options.closed:
        raise InvalidArgument(f"--beside is {text!r}; it must be N:TRACE, with --closed")
    trace = open_chosen_trace(options, name)
    load = read_sessions(trace, options.block_size or BLOCK_SIZE, max_pause=options.max_pause)
    report_skips(trace)
    return load, count


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under one level of names: misses_evicted, simulated_first_token_p99. Lists are left out."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}_")
        elif not isinstance(value, list):
            flat[f"{prefix}{name}"] = value
    return flat
