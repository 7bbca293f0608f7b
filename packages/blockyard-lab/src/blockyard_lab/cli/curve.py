"""`blockyard curve` shows hit rate against capacity, as a table, a picture or a page."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from blockyard.amounts import parse_memory
from blockyard.arguments import require_int
from blockyard.cli import as_csv, as_json, as_narrow_text, as_text
from blockyard.errors import InvalidArgument
from blockyard.policies import POLICIES
from blockyard.progress import WorkBar
from blockyard.sizing import KVCacheSpec, model_config

from .. import References, Trace, read_references
from ..curve import HitCurves, hit_curves, put_together
from ..curve.drawing import draw_curves
from ..curve.page import write_page
from ..curve.side_by_side import label_in, require_one_block_size
from ..curve.words import ENOUGH_SIZES, FIFTH, GAP_POINTS, Claim, claims_of, parts_of
from ..oracle import HintOracle
from ..output_file import require_output
from ..policy_names import MAX_SIZES, OPTIMUM, parse_policies, parse_sizes, spread_sizes
from ..printing import fine_percent, short_number
from ..references import MAX_REFERENCES
from .lab_options import chosen_jobs, open_chosen_trace, report_skips, require_tier, short_name, skips_as_dict

_GIB = 2**30
#: Curves begin at a thousandth of the working set: in smaller caches hardly anything hits, whatever the policy.
SMALLEST_SHARE, NUM_SIZES = 1000, 40
_WRITERS = {".png": draw_curves, ".svg": draw_curves, ".html": write_page}


def run_curve(options: argparse.Namespace) -> int:
    """Run every policy at every size, print the table and write the files."""
    for path in options.output:
        if Path(path).suffix not in _WRITERS:
            raise InvalidArgument(f"output is {path!r}; it must end in {', '.join(_WRITERS)}")
        require_output(path, tuple(_WRITERS))  # before hours of work, and before the first of several is written
    policies = parse_policies(options.policies, "--policies") if options.policies else _default_policies(options)
    hints = _chosen_hints(options)
    require_tier(options)
    if options.tier:
        return _run_tiers(options)
    traces = [open_chosen_trace(options, name) for name in [options.trace, *options.beside]]
    references = [_read(options, trace) for trace in traces]
    for trace in traces:
        report_skips(trace)
    require_one_block_size(
        [(short_name(trace), found.tokens_a_block) for trace, found in zip(traces, references, strict=True)]
    )
    sizes = _sizes(options, max(found.working_set for found in references))
    several = [
        _run(options, trace, found, policies, sizes, hints) for trace, found in zip(traces, references, strict=True)
    ]
    curves = put_together(several)
    bytes_per_block = _bytes_per_token(options) * curves.tokens_a_block
    for path in options.output:
        _WRITERS[Path(path).suffix](curves, path, bytes_per_block=bytes_per_block, model=options.model or "")
    _print(options, traces, curves, bytes_per_block)
    return 0


def _run_tiers(options: argparse.Namespace) -> int:
    """Replay the trace with tiers at every size, print the table and write the files."""
    from .tier_curve import refuse_beside_tiers, tier_curves
    from .tier_table import tier_text

    refuse_beside_tiers(options)
    bytes_per_token = _bytes_per_token(options)
    trace = open_chosen_trace(options)
    curves, rows = tier_curves(options, trace, bytes_per_token)
    bytes_per_block = bytes_per_token * curves.tokens_a_block
    for path in options.output:
        _WRITERS[Path(path).suffix](curves, path, bytes_per_block=bytes_per_block, model=options.model or "")
    if options.json:
        print(as_json({**_as_dict(curves, bytes_per_block), "skips": skips_as_dict(trace), "tiers": rows}))
    elif options.csv:
        print(as_csv(_rows(curves, bytes_per_block)))
    else:
        print(f"{_headline(curves)}\n\n{tier_text(rows)}\n\n{_conclusion(curves, bytes_per_block)}")
    return 0


def _default_policies(options: argparse.Namespace) -> list[str]:
    """Returns all of them, or for several traces only the default and the upper bound."""
    return ["lru", OPTIMUM] if options.beside else [*POLICIES, OPTIMUM]


def _chosen_hints(options: argparse.Namespace) -> HintOracle | None:
    """Returns the oracle that gives hints, or None for runs without any."""
    figures = {name: getattr(options, f"hint_{name}") for name in ("coverage", "wrong", "seed")}
    given = {name: figure for name, figure in figures.items() if figure is not None}
    if options.hints:
        return HintOracle(**given)
    if given:
        raise InvalidArgument(f"hint_{next(iter(given))} is given without hints; it needs --hints")
    return None


def _run(
    options: argparse.Namespace,
    trace: Trace,
    references: References,
    policies: list[str],
    sizes: list[int],
    hints: HintOracle | None,
) -> HitCurves:
    num_hinted = len([policy for policy in policies if policy != OPTIMUM]) if hints else 0
    num_runs = len(sizes) * (len([policy for policy in policies if policy != "lru"]) + num_hinted)
    with WorkBar("runs", num_runs, not options.quiet) as bar:
        return hit_curves(
            references,
            policies,
            sizes,
            hints=hints,
            name=short_name(trace),
            jobs=chosen_jobs(options, max(num_runs, 1)),
            backend=options.backend,
            on_done=bar.update,
        )


def _read(options: argparse.Namespace, trace: Trace) -> References:
    with WorkBar("requests", 0, not options.quiet) as bar:
        return read_references(
            trace,
            block_size=options.block_size,
            max_references=MAX_REFERENCES if options.max_references is None else options.max_references,
            with_sessions=options.hints,
            on_request=bar.update,
        )


def _sizes(options: argparse.Namespace, working_set: int) -> list[int]:
    """Returns the same sizes for all traces; shares are of the largest working set."""
    if options.blocks is not None:
        return parse_sizes(options.blocks, working_set)
    count = NUM_SIZES if options.sizes is None else require_int("sizes", options.sizes, 2, MAX_SIZES)
    return spread_sizes(count, working_set, max(working_set // SMALLEST_SHARE, 1))


def _bytes_per_token(options: argparse.Namespace) -> int:
    """Return the bytes that the named model keeps for a token; 0 if they are not known."""
    if options.kv_bytes is not None:
        return parse_memory("--kv-bytes", options.kv_bytes)
    if options.model:
        return KVCacheSpec.from_config(model_config(options.model), dtype=options.dtype).bytes_per_token
    return 0


def _print(options: argparse.Namespace, traces: list[Trace], curves: HitCurves, bytes_per_block: int) -> None:
    if options.json:
        found = [
            {**_as_dict(part, bytes_per_block), "skips": skips_as_dict(trace)}
            for part, trace in zip(parts_of(curves), traces, strict=True)
        ]
        print(as_json({"traces": found} if curves.parts else found[0]))
    elif options.csv:
        print(as_csv(_rows(curves, bytes_per_block)))
    else:
        print("\n".join(_headline(part) for part in parts_of(curves)) + "\n")
        rows = [_as_text_row(row) for row in _rows(curves, bytes_per_block)]
        print(as_narrow_text(rows, num_keys=3 if bytes_per_block else 2))
        for part in parts_of(curves):
            # Of sizes that come to the same number of blocks one is run.
            asked = options.sizes or NUM_SIZES if options.blocks is None else len(part.sizes)
            for text in _claims(part, asked):
                print(f"\n{text}")
        print("\n" + "\n".join(_conclusion(part, bytes_per_block) for part in parts_of(curves)))
        print("knee: up to it a block adds more hits than the average block of the working set; beyond it, fewer")


def _claims(curves: HitCurves, num_asked: int) -> list[str]:
    """Returns what can be claimed for each policy over these sizes, and what is missing; none where all is LRU."""
    if not set(curves.hit_rates) - {"lru", OPTIMUM}:
        return []
    if num_asked < ENOUGH_SIZES and not curves.hints:
        return [f"What may be claimed for a policy takes {ENOUGH_SIZES} sizes or more: --sizes 300"]
    if "lru" not in curves.hit_rates:
        return ["What may be claimed for a policy is its distance from lru: add lru to the policies"]
    of = f" ({curves.letter})" if curves.letter else ""
    table = as_text(_claim_rows(curves), num_names=1)
    said = [
        f"above lru over {len(curves.sizes)} sizes, in points{of}:\n{table}",
        "sizes below: the share of the sizes at which the policy is below lru",
    ]
    if OPTIMUM not in curves.hit_rates:
        return [*said, "How much of the gap between lru and the optimum is closed: add optimum to the policies"]
    what = f"where optimum is more than {GAP_POINTS:g} points above lru"
    said[-1] += (
        f"\ngap closed: how far from lru to optimum, mean of the sizes {what};\n"
        f"a fifth or more: the share of these sizes where it is {fine_percent(FIFTH)} or more"
    )
    return said


def _claim_rows(curves: HitCurves) -> list[dict[str, str]]:
    """Returns a row for each policy that says what can be claimed for it."""
    rows = []
    for policy, claim in claims_of(curves).items():
        row = {"policy": policy, "sizes below": fine_percent(claim.below)}
        row |= {name: f"{getattr(claim, name):+.2f}" for name in ("worst", "median", "mean", "best")}
        has_gap = claim.gap_sizes > 0
        row["gap closed"] = fine_percent(claim.gap_closed) if has_gap else "-"
        row["a fifth or more"] = fine_percent(claim.fifth) if has_gap else "-"
        rows.append(row)
    return rows


def _rows(curves: HitCurves, bytes_per_block: int) -> list[dict[str, Any]]:
    """Returns a row for each size with hit rates as shares of 0 to 1."""
    rows = []
    for place, size in enumerate(curves.sizes.tolist()):
        row: dict[str, Any] = {"blocks": size, "tokens": size * curves.tokens_a_block}
        if bytes_per_block:
            row["GiB"] = size * bytes_per_block / _GIB
        row |= {policy: float(rates[place]) for policy, rates in curves.hit_rates.items()}
        row |= {f"{policy} error": float(errors[place]) for policy, errors in curves.error.items()}
        row |= {name: float(values[place]) for name, values in curves.beside.items()}
        rows.append(row)
    return rows


def _as_text_row(row: dict[str, Any]) -> dict[str, str]:
    shown = {"blocks": f"{row['blocks']:,}", "tokens": short_number(row["tokens"])}
    if "GiB" in row:
        shown["GiB"] = f"{row['GiB']:,.2f}"
    return shown | {name: fine_percent(value) for name, value in row.items() if name not in {"blocks", "tokens", "GiB"}}


def _headline(curves: HitCurves) -> str:
    sampled = ""
    if curves.sample_rate < 1:
        sampled = f"; a sample of one content in {round(1 / curves.sample_rate)}"
    letter = f"{curves.letter}: " if curves.letter else ""
    return (
        f"{letter}{curves.trace}: {curves.num_requests:,} requests, {curves.num_references:,} references to "
        f"{curves.working_set:,} blocks of {curves.tokens_a_block} tokens{sampled}"
        f"{f'; hints: {curves.hints}' if curves.hints else ''}"
    )


def _conclusion(part: HitCurves, bytes_per_block: int) -> str:
    knee = part.knee
    memory = f" ({knee.blocks * bytes_per_block / _GIB:,.1f} GiB)" if bytes_per_block else ""
    return (
        f"knee of {label_in(part, knee.policy)}: {knee.blocks:,} blocks{memory} hit {fine_percent(knee.hit_rate)}; "
        f"with no limit {fine_percent(part.infinite)}"
    )


def _as_numbers(claim: Claim) -> dict[str, float | None]:
    """JSON has no nan."""
    return {name: None if value != value else value for name, value in dataclasses.asdict(claim).items()}


def _as_dict(curves: HitCurves, bytes_per_block: int) -> dict[str, Any]:
    return {
        "trace": curves.trace,
        "num_requests": curves.num_requests,
        "num_references": curves.num_references,
        "working_set": curves.working_set,
        "tokens_a_block": curves.tokens_a_block,
        "bytes_per_block": bytes_per_block,
        "sample_rate": curves.sample_rate,
        "infinite": curves.infinite,
        "hints": curves.hints,
        "knee": dataclasses.asdict(curves.knee),
        "num_hits": {policy: hits.tolist() for policy, hits in curves.num_hits.items()},
        "sizes": _rows(curves, bytes_per_block),
        "claims": {policy: _as_numbers(claim) for policy, claim in claims_of(curves).items()},
    }
