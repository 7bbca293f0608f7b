"""`blockyard replay` sends a trace through the block manager, and says what the same memory holds without paging."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from typing import Any

from blockyard.amounts import parse_memory
from blockyard.arguments import require_int
from blockyard.cache_options import MAX_MODEL_LEN
from blockyard.cli import as_csv, as_json, as_text
from blockyard.errors import InvalidArgument
from blockyard.progress import WorkBar

from .. import Trace, UnknownContents, read_references
from ..output_file import require_output
from ..policy_names import OPTIMUM, parse_policies, parse_sizes
from ..printing import fine_percent, short_number
from ..replay import (
    ReplayOptions,
    ReplayResult,
    Reservation,
    ServiceModel,
    compare_reservations,
    replay,
)
from ..replay.page import write_run_page
from ..survey import TraceSurvey, survey
from ..sweep import run_all
from .lab_options import chosen_jobs, open_chosen_trace, report_skips, short_name, skips_as_dict


def model_length(options: argparse.Namespace, found: TraceSurvey) -> int:
    """Returns the tokens of the longest request that the model serves: as asked for, or the trace's own, rounded up to
    a power of two."""
    if options.max_model_len is not None:
        return require_int("--max-model-len", options.max_model_len, 1, MAX_MODEL_LEN)
    return min(int(1 << (found.longest_sequence - 1).bit_length()), MAX_MODEL_LEN)


def reserve_pools(
    options: argparse.Namespace, trace: Trace, num_blocks: list[int], max_model_len: int
) -> list[Reservation]:
    """Runs every scheme in memory of each of these numbers of blocks."""
    cells = [(trace, size, options.block_size, max_model_len) for size in num_blocks]
    jobs = chosen_jobs(options, len(cells))
    with WorkBar("reservations", len(cells), not options.quiet) as bar:
        found = run_all(_compare, cells, jobs=jobs, backend=options.backend, on_done=bar.update)
    return [reservation for schemes in found for reservation in schemes]


def _compare(trace: Trace, num_blocks: int, block_size: int, max_model_len: int) -> list[Reservation]:
    return compare_reservations(trace, num_blocks, block_size=block_size, max_model_len=max_model_len)


def reservation_text(found: list[Reservation], block_size: int) -> str:
    """Returns a heading and a table. at once: requests; times: as many as in the first line of the same size."""
    rows = []
    baseline = 0.0
    for reservation in found:
        baseline = reservation.mean_running if reservation.scheme == "longest" else baseline
        rows.append(_row(reservation, block_size, baseline))
    if not any(reservation.num_refused for reservation in found):
        rows = [{name: cell for name, cell in row.items() if name != "left out"} for row in rows]
    return f"\nContiguous memory against paging: requests always wait, and share no prefixes\n\n{as_text(rows)}"


def _row(found: Reservation, block_size: int, baseline: float) -> dict[str, str]:
    ways = {
        "longest": f"the model's {found.max_model_len:,} tokens",
        "power of two": "its length's next power of two",
        "paged": f"blocks of {block_size}, as it grows",
    }
    return {
        "a request holds": ways[found.scheme],
        "blocks": f"{found.num_slots // block_size:,}",
        "tokens": short_number(found.num_slots),
        "left out": f"{found.num_refused:,}",
        "waste": fine_percent(found.wasted_share) if found.num_requests else "-",
        "at once": f"{found.mean_running:,.1f}",
        "times": f"{found.mean_running / baseline:.1f}" if baseline else "-",
    }


def reservation_as_dict(found: Reservation) -> dict[str, Any]:
    """Returns the same for a program."""
    return dataclasses.asdict(found)


def run_replay(options: argparse.Namespace) -> int:
    """Run every policy at every size and print what came of it."""
    _require_output(options)
    policies = parse_policies(options.policies, "--policies")
    if OPTIMUM in policies:
        raise InvalidArgument("policies has 'optimum', which knows the future; `blockyard curve` has it")
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


def _tiers(options: argparse.Namespace, trace: Trace, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs the tiers where they are asked for; they need an extra."""
    if not options.tier:
        return []
    from .tier_table import replay_tiers

    if options.kv_bytes is None:
        raise InvalidArgument("--tier was given without --kv-bytes, the bytes of a token's keys and values")
    return replay_tiers(options, trace, cells, parse_memory("--kv-bytes", options.kv_bytes))


def _require_output(options: argparse.Namespace) -> None:
    """Before hours of work, and before the first of several is written."""
    for path in options.output:
        require_output(path, (".html",))
    if options.output and not options.timed:
        raise InvalidArgument(
            f"output is {options.output[0]!r} without --timed; only a replay by timestamps has a page"
        )


def replay_by_the_clock(trace: Trace, options: ReplayOptions) -> ReplayResult:
    """Does one run, in whatever process; its seconds are that process's."""
    return replay(trace, options, clock=time.perf_counter)


def _cells(
    options: argparse.Namespace, trace: Trace, found: TraceSurvey, policies: list[str], working_set: int
) -> list[tuple[Trace, ReplayOptions]]:
    sizes = parse_sizes(options.blocks, working_set)
    service = _service(options) if options.timed else None
    longest = min(found.longest_sequence, model_length(options, found))
    return [
        (
            trace,
            ReplayOptions(
                num_blocks=max(size, 2),
                block_size=options.block_size,
                policy=policy,
                # What no pool of this size could hold is a request left out, not a reason to refuse the trace.
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
    """Returns the trace's totals, and the blocks of `block_size` that would hold all prompts: what a share is of, and 0
    where none is asked for."""
    if "%" not in options.blocks:
        return survey(trace), 0
    try:
        references = read_references(trace, block_size=options.block_size)
    except UnknownContents:
        raise InvalidArgument(
            f"--blocks is {options.blocks!r}; a share is of the different blocks of a trace, and {short_name(trace)} "
            f"says nothing of contents: give numbers, like 10k,30k"
        ) from None
    return references.survey, -(-references.working_set * references.tokens_a_block // int(options.block_size))


def _service(options: argparse.Namespace) -> ServiceModel:
    """Returns the model of an engine's steps: each of its fields is an option."""
    return ServiceModel(**{field.name: getattr(options, field.name) for field in dataclasses.fields(ServiceModel)})


def _print(
    options: argparse.Namespace,
    trace: Trace,
    found: TraceSurvey,
    results: list[ReplayResult],
    reservations: list[Reservation],
    tiers: list[dict[str, Any]],
) -> None:
    if options.json:
        about = {**_trace_as_dict(found), "skips": skips_as_dict(trace)}
        runs = [_as_dict(result) for result in results]
        reserved = [reservation_as_dict(reservation) for reservation in reservations]
        print(as_json({"trace": about, "runs": runs, "reservations": reserved, "tiers": tiers}))
    elif options.csv:
        print(as_csv([_flat(_as_dict(result)) for result in results]))
    else:
        print(_headline(options, trace, found))
        print(as_text(_same_columns([_as_row(options, result) for result in results])))
        print(reservation_text(reservations, options.block_size))
        if tiers:
            from .tier_table import tier_text

            print(f"\n{tier_text(tiers)}")
        _say_overload(results)
        _say_refused(results)


def _headline(options: argparse.Namespace, trace: Trace, found: TraceSurvey) -> str:
    how = "by timestamps" if options.timed else "one after another"
    contents = "" if found.has_contents else "; it says nothing of contents, so no prompt can hit another's blocks"
    return (
        f"{short_name(trace)}: {found.num_requests:,} requests {how}, {found.num_prompt_tokens:,} prompt and "
        f"{found.num_output_tokens:,} output tokens, blocks of {options.block_size}{contents}\n"
    )


def _as_row(options: argparse.Namespace, result: ReplayResult) -> dict[str, str]:
    """Returns what a person wants to see; shares are of prompt tokens."""
    misses, tokens = result.misses, max(result.num_prompt_tokens, 1)
    row = {
        "policy": result.policy,
        "blocks": f"{result.num_blocks:,}",
        "tokens": short_number(result.num_blocks * result.block_size),
    }
    if result.num_refused:
        row["left out"] = f"{result.num_refused:,}"
    row["hit"] = fine_percent(result.hit_rate)
    if misses is not None:
        about = "" if misses.share_known == 1 else "~"
        row |= {
            "never seen": about + fine_percent(misses.never_seen / tokens),
            "evicted": about + fine_percent(misses.evicted / tokens),
            "tail": fine_percent(misses.tail / tokens),
        }
    row |= {
        "evictions": f"{result.num_evicted_blocks:,}",
        "peak blocks": f"{result.peak_used_blocks:,}",
        "waste": fine_percent(result.wasted_share),
    }
    if options.num_cpu_blocks:
        row |= {"saved": f"{result.num_saved_blocks:,}", "fetched": f"{result.num_fetched_blocks:,}"}
    if result.simulated is not None:
        median, _, slowest = result.simulated.first_token
        row |= {
            "preempted": f"{result.num_preemptions:,}",
            "at once": str(result.peak_running),
            "TTFT p50": f"{median:.2f} s",
            "p99": f"{slowest:.2f} s",
            "took": f"{result.simulated.duration:,.0f} s",
        }
    row["blocks/s"] = short_number(result.blocks_per_second)
    return row


def _same_columns(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Columns that some rows have, in the order of the longest row; empty where a row does not have them."""
    columns = max(rows, key=len)
    return [{column: row.get(column, "") for column in columns} for row in rows]


def _say_overload(results: list[ReplayResult]) -> None:
    """Requests that come faster than they are served wait longer and longer, whatever the cache."""
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


def _as_dict(result: ReplayResult) -> dict[str, Any]:
    content = dataclasses.asdict(dataclasses.replace(result, timeline=None))
    del content["timeline"]  # the page has it
    if content["simulated"] is not None:
        for name in ("first_token", "queueing"):
            content["simulated"][name] = dict(zip(("p50", "p90", "p99"), content["simulated"][name], strict=True))
    return {**content, "hit_rate": result.hit_rate, "blocks_per_second": result.blocks_per_second}


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values under one level of names: misses_evicted, simulated_first_token_p99."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        flat |= _flat(value, f"{prefix}{name}_") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
