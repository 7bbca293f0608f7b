"""The command `blockyard replay`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from functools import partial
from typing import Any

from blockyard.amounts import parse_memory
from blockyard.arguments import require_int
from blockyard.cache_options import MAX_MODEL_LEN
from blockyard.cli import as_csv, as_json
from blockyard.errors import InvalidArgument
from blockyard.progress import WorkBar

from .. import Trace, UnknownContents, read_references
from ..output_file import require_output
from ..policy_names import OPTIMUM, parse_policies, parse_sizes
from ..replay import (
    ReplayOptions,
    ReplayResult,
    Reservation,
    compare_reservations,
    replay,
)
from ..replay.reservation import reservations_as_text
from ..replay.result import results_as_text
from ..replay.tier_result import TierRow, tiers_as_text
from ..replay.timeline_page import write_run_page
from ..survey import TraceSurvey, survey
from ..sweep import run_all
from .closed_loops import chosen_device, flatten, run_loops
from .lab_options import chosen_jobs, open_chosen_trace, report_skips, short_name, skips_as_dict


def model_length(options: argparse.Namespace, found: TraceSurvey) -> int:
    """Return the model's longest request in tokens: as requested, or the trace's own, rounded up to a power of two."""
    if options.max_model_len is not None:
        return require_int("--max-model-len", options.max_model_len, 1, MAX_MODEL_LEN)
    return min(int(1 << (found.longest_sequence - 1).bit_length()), MAX_MODEL_LEN)


def reserve_pools(
    options: argparse.Namespace, trace: Trace, num_blocks: list[int], max_model_len: int
) -> list[Reservation]:
    """Run every reservation scheme with each number of blocks."""
    cells = [(trace, size) for size in num_blocks]
    run = partial(compare_reservations, block_size=options.block_size, max_model_len=max_model_len)
    jobs = chosen_jobs(options, len(cells))
    with WorkBar("reservations", len(cells), not options.quiet) as bar:
        found = run_all(run, cells, jobs=jobs, backend=options.backend, on_done=bar.update)
    return [reservation for schemes in found for reservation in schemes]


def run_replay(options: argparse.Namespace) -> int:
    """Run every policy at every size and print the results."""
    if options.closed or options.admission:
        _require_loop(options)
        run_loops(options)
        return 0
    for name, value in (("block_size", 16), ("watermark", 0.0), ("max_num_seqs", 256)):
        if getattr(options, name) is None:
            setattr(options, name, value)
    _require_output(options)
    policies = parse_policies(options.policies, "--policies")
    if OPTIMUM in policies:
        raise InvalidArgument("--policies has 'optimum', which no pool can run; use `blockyard curve`")
    trace = open_chosen_trace(options)
    found, working_set = _read(options, trace)
    report_skips(trace)
    cells = _cells(options, trace, found, policies, working_set)
    fields = ("num_blocks", "block_size", "policy", "max_model_len")
    tiers = _tiers(options, trace, [{name: getattr(cell, name) for name in fields} for _, cell in cells])
    jobs = chosen_jobs(options, len(cells))
    if len(cells) == 1:
        with WorkBar("requests", found.num_requests, not options.quiet) as bar:
            results = [replay(trace, cells[0][1], on_request=bar.update, clock=time.perf_counter)]
    else:
        with WorkBar("runs", len(cells), not options.quiet) as bar:
            results = run_all(replay_by_the_clock, cells, jobs=jobs, backend=options.backend, on_done=bar.update)
    for path in options.output:
        write_run_page(short_name(trace), results, path)
    pools = sorted({cell[1].num_blocks for cell in cells})
    reservations = [] if options.csv else reserve_pools(options, trace, pools, model_length(options, found))
    _print(options, trace, found, results, reservations, tiers)
    return 0


def _require_loop(options: argparse.Namespace) -> None:
    if options.closed == options.timed:
        raise InvalidArgument("--admission needs either --closed or --timed")
    for name in ("output", "tier", "num_cpu_blocks"):
        if getattr(options, name):
            raise InvalidArgument(
                f"--{name.replace('_', '-')} was given with --closed or --admission; omit one of them"
            )


def _tiers(options: argparse.Namespace, trace: Trace, cells: list[dict[str, Any]]) -> list[TierRow]:
    if not options.tier:
        return []
    from .tier_table import replay_tiers

    if options.kv_bytes is None:
        raise InvalidArgument("--tier was given without --kv-bytes, the bytes of a token's keys and values")
    return replay_tiers(options, trace, cells, parse_memory("--kv-bytes", options.kv_bytes))


def _require_output(options: argparse.Namespace) -> None:
    """Check the output files before hours of work, and before the first of several is written."""
    for path in options.output:
        require_output(path, (".html",))
    if options.output and not options.timed:
        raise InvalidArgument(f"--output is {options.output[0]!r}; only a replay with --timed has a page")


def replay_by_the_clock(trace: Trace, options: ReplayOptions) -> ReplayResult:
    """Replay in the current process, with its clock."""
    return replay(trace, options, clock=time.perf_counter)


def _cells(
    options: argparse.Namespace, trace: Trace, found: TraceSurvey, policies: list[str], working_set: int
) -> list[tuple[Trace, ReplayOptions]]:
    sizes = parse_sizes(options.blocks, working_set)
    service = chosen_device(options) if options.timed else None
    longest = min(found.longest_sequence, model_length(options, found))
    return [
        (
            trace,
            ReplayOptions(
                num_blocks=max(size, 2),
                block_size=options.block_size,
                policy=policy,
                # A request that does not fit is left out; it is no reason to refuse the trace.
                max_model_len=min(longest, max(size, 2) * options.block_size, MAX_MODEL_LEN),
                max_num_seqs=options.max_num_seqs,
                watermark=options.watermark,
                find_causes=not options.no_causes,
                strict=options.strict,
                service=service,
                num_cpu_blocks=options.num_cpu_blocks,
                keep_timeline=bool(options.output),
            ),
        )
        for policy, size in itertools.product(policies, sizes)
    ]


def _read(options: argparse.Namespace, trace: Trace) -> tuple[TraceSurvey, int]:
    """Return the trace's totals, and its working set in blocks of `block_size` if a percentage needs it, else 0."""
    if "%" not in options.blocks:
        return survey(trace), 0
    try:
        references = read_references(trace, block_size=options.block_size)
    except UnknownContents:
        raise InvalidArgument(
            f"--blocks is {options.blocks!r}; percentages are of a trace's distinct blocks, and {short_name(trace)} "
            f"has lengths but no contents: give numbers, like 10k,30k"
        ) from None
    return references.survey, -(-references.working_set * references.tokens_a_block // int(options.block_size))


def _print(
    options: argparse.Namespace,
    trace: Trace,
    found: TraceSurvey,
    results: list[ReplayResult],
    reservations: list[Reservation],
    tiers: list[TierRow],
) -> None:
    if options.json:
        about = {**_trace_as_dict(found), "skips": skips_as_dict(trace)}
        runs = [result.as_dict() for result in results]
        reserved = [dataclasses.asdict(reservation) for reservation in reservations]
        rows = [row.as_dict() for row in tiers]
        print(as_json({"trace": about, "runs": runs, "reservations": reserved, "tiers": rows}))
    elif options.csv:
        print(as_csv([flatten(result.as_dict()) for result in results]))
    else:
        print(_headline(options, trace, found))
        print(results_as_text(results, with_cpu_pool=bool(options.num_cpu_blocks)))
        print(f"\n{reservations_as_text(reservations, options.block_size)}")
        if tiers:
            print(f"\n{tiers_as_text(tiers)}")
        _say_overload(results)
        _say_refused(results)


def _headline(options: argparse.Namespace, trace: Trace, found: TraceSurvey) -> str:
    how = "by timestamps" if options.timed else "one after another"
    contents = "" if found.has_contents else "; it has no contents, so no prompt can hit another's blocks"
    return (
        f"{short_name(trace)}: {found.num_requests:,} requests {how}, {found.num_prompt_tokens:,} prompt and "
        f"{found.num_output_tokens:,} output tokens, blocks of {options.block_size}{contents}\n"
    )


def _say_overload(results: list[ReplayResult]) -> None:
    """Warn if requests arrive faster than they are served: they wait ever longer, whatever the cache."""
    for result in results:
        if result.simulated is not None and result.simulated.duration > 1.2 * result.simulated.arrivals:
            print(
                f"blockyard: {result.policy}, {result.num_blocks:,} blocks: requests that arrive within "
                f"{result.simulated.arrivals:,.0f} s took {result.simulated.duration:,.0f} s: this engine is "
                f"overloaded; see --speedup and --seconds-per-prompt-token",
                file=sys.stderr,
            )
            return


def _say_refused(results: list[ReplayResult]) -> None:
    for result in results:
        if result.num_refused:
            print(
                f"blockyard: {result.num_blocks:,} blocks: {result.num_refused} requests never fit and were left out "
                f"({result.first_refused})",
                file=sys.stderr,
            )


def _trace_as_dict(found: TraceSurvey) -> dict[str, Any]:
    counts = ("num_requests", "num_prompt_tokens", "num_output_tokens", "longest_sequence")
    return {name: getattr(found, name) for name in ("name", *counts, "duration", "has_contents")}
