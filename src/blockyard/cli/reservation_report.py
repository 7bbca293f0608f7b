"""The second table of `blockyard replay`: the same memory reserved in one piece, and paged."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..arguments import require_int
from ..config import MAX_MODEL_LEN
from ..lab import Trace
from ..lab.replay import Reservation, compare_reservations
from ..lab.survey import TraceSurvey
from ..lab.sweep import run_all
from ..progress import WorkBar
from .tables import as_text, percent, short_number
from .trace_options import chosen_jobs


def model_length(options: argparse.Namespace, found: TraceSurvey) -> int:
    """Tokens of the longest request that the model serves: as asked for, or the trace's own longest request rounded up
    to a power of two."""
    if options.max_model_len is not None:
        return require_int("--max-model-len", options.max_model_len, 1, MAX_MODEL_LEN)
    return min(int(1 << (found.longest_sequence - 1).bit_length()), MAX_MODEL_LEN)


def reserve_pools(
    options: argparse.Namespace, trace: Trace, num_blocks: list[int], max_model_len: int
) -> list[Reservation]:
    """Every scheme in memory of each of these numbers of blocks."""
    cells = [(trace, size, options.block_size, max_model_len) for size in num_blocks]
    jobs = chosen_jobs(options, len(cells))
    with WorkBar("reservations", len(cells), not options.quiet) as bar:
        found = run_all(_compare, cells, jobs=jobs, backend=options.backend, on_done=bar.update)
    return [reservation for schemes in found for reservation in schemes]


def _compare(trace: Trace, num_blocks: int, block_size: int, max_model_len: int) -> list[Reservation]:
    return compare_reservations(trace, num_blocks, block_size=block_size, max_model_len=max_model_len)


def reservation_text(found: list[Reservation], block_size: int) -> str:
    """A heading and a table. at once: requests; times: as many as in the first line of the same size."""
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
        "waste": percent(found.wasted_share) if found.num_requests else "-",
        "at once": f"{found.mean_running:,.1f}",
        "times": f"{found.mean_running / baseline:.1f}" if baseline else "-",
    }


def reservation_as_dict(found: Reservation) -> dict[str, Any]:
    """The same for a program."""
    return dataclasses.asdict(found)
