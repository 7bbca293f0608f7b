"""The command `blockyard curve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from blockyard.amounts import parse_memory
from blockyard.arguments import require_int
from blockyard.cli import as_csv, as_json
from blockyard.errors import InvalidArgument
from blockyard.policies import POLICIES
from blockyard.progress import WorkBar
from blockyard.sizing import KVCacheSpec, model_config

from .. import References, Trace, read_references
from ..curve import HitCurves, combine_curves, hit_curves
from ..curve.curve_page import write_page
from ..curve.drawing import draw_curves
from ..curve.side_by_side import require_one_block_size
from ..oracle import HintOracle
from ..output_file import require_output
from ..policy_names import MAX_SIZES, OPTIMUM, parse_policies, parse_sizes, spread_sizes
from ..references import MAX_REFERENCES
from ..replay.tier_result import tiers_as_text
from .closed_loops import run_loops
from .lab_options import chosen_jobs, open_chosen_trace, report_skips, require_tier, short_name, skips_as_dict

#: Curves begin at a thousandth of the working set; in smaller caches hardly anything hits.
SMALLEST_SHARE, NUM_SIZES = 1000, 40
_WRITERS = {".png": draw_curves, ".svg": draw_curves, ".html": write_page}


def run_curve(options: argparse.Namespace) -> int:
    """Run every policy at every size, print the table and write the files."""
    if options.closed:
        return _run_loops(options)
    if options.admission:
        raise InvalidArgument(f"--admission is {options.admission!r}; in a curve it needs --closed")
    for path in options.output:
        if Path(path).suffix not in _WRITERS:
            raise InvalidArgument(f"output is {path!r}; it must end in {', '.join(_WRITERS)}")
        require_output(path, tuple(_WRITERS))  # before hours of work, and before the first of several is written
    options.block_size = 16 if options.block_size is None else options.block_size
    default = ["lru", OPTIMUM] if options.beside else [*POLICIES, OPTIMUM]
    policies = parse_policies(options.policies, "--policies") if options.policies else default
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
    curves = combine_curves(several)
    bytes_per_block = _bytes_per_token(options) * curves.tokens_a_block
    for path in options.output:
        _WRITERS[Path(path).suffix](curves, path, bytes_per_block=bytes_per_block, model=options.model or "")
    _print(options, traces, curves, bytes_per_block)
    return 0


def _run_loops(options: argparse.Namespace) -> int:
    """Run the trace in a closed loop with every number of sessions, print the table and write the pictures."""
    from ..closed.loop_picture import draw_loops

    for path in options.output:
        require_output(path, (".png", ".svg"))
    for name in ("beside", "hints", "sizes", "tier"):
        if getattr(options, name):
            raise InvalidArgument(f"--{name} was given with --closed; omit one of them")
    if options.blocks is None or "," in options.blocks:
        raise InvalidArgument(f"--blocks is {options.blocks!r}; with --closed it must be one size")
    results = run_loops(options)
    for path in options.output:
        draw_loops(results, path)
    return 0


def _run_tiers(options: argparse.Namespace) -> int:
    """Replay the trace with tiers at every size, print the table and write the files."""
    from .tier_curve import refuse_beside_tiers, tier_curves

    refuse_beside_tiers(options)
    bytes_per_token = _bytes_per_token(options)
    trace = open_chosen_trace(options)
    curves, rows = tier_curves(options, trace, bytes_per_token)
    bytes_per_block = bytes_per_token * curves.tokens_a_block
    for path in options.output:
        _WRITERS[Path(path).suffix](curves, path, bytes_per_block=bytes_per_block, model=options.model or "")
    if options.json:
        tiers = [row.as_dict() for row in rows]
        print(as_json({**curves.as_dict(bytes_per_block), "skips": skips_as_dict(trace), "tiers": tiers}))
    elif options.csv:
        print(as_csv(curves.rows(bytes_per_block)))
    else:
        print("\n\n".join((curves.headline(), tiers_as_text(rows), curves.conclusion(bytes_per_block))))
    return 0


def _chosen_hints(options: argparse.Namespace) -> HintOracle | None:
    values = {name: getattr(options, f"hint_{name}") for name in ("coverage", "wrong", "seed")}
    given = {name: value for name, value in values.items() if value is not None}
    if options.hints:
        return HintOracle(**given)
    if given:
        raise InvalidArgument(f"--hint-{next(iter(given))} was given without --hints")
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
    """Return the sizes for all traces. Percentages are of the largest working set."""
    if options.blocks is not None:
        return parse_sizes(options.blocks, working_set)
    count = NUM_SIZES if options.sizes is None else require_int("sizes", options.sizes, 2, MAX_SIZES)
    return spread_sizes(count, working_set, max(working_set // SMALLEST_SHARE, 1))


def _bytes_per_token(options: argparse.Namespace) -> int:
    """Return the bytes that the chosen model keeps per token; 0 if unknown."""
    if options.kv_bytes is not None:
        return parse_memory("--kv-bytes", options.kv_bytes)
    if options.model:
        return KVCacheSpec.from_config(model_config(options.model), dtype=options.dtype).bytes_per_token
    return 0


def _print(options: argparse.Namespace, traces: list[Trace], curves: HitCurves, bytes_per_block: int) -> None:
    if options.json:
        found = [
            {**part.as_dict(bytes_per_block), "skips": skips_as_dict(trace)}
            for part, trace in zip(curves.per_trace, traces, strict=True)
        ]
        print(as_json({"traces": found} if curves.parts else found[0]))
    elif options.csv:
        print(as_csv(curves.rows(bytes_per_block)))
    else:
        # Sizes that round to the same number of blocks are run once.
        print(curves.as_text(bytes_per_block, (options.sizes or NUM_SIZES) if options.blocks is None else None))
