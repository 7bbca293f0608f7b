"""Writes timed replays as a page: held blocks, running and waiting requests, hits, misses and preemptions over time."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import Any

from blockyard.arguments import require_str
from blockyard.errors import InvalidArgument

from ..output_file import fill_page, require_output, write_whole
from ..printing import count_of, percent, printable
from .result import ReplayResult, SimulatedTime
from .timeline import Timeline

#: Columns of a run's table: heading to count.
_COLUMNS = {
    "arrived": "arrived", "started": "started", "preempted": "preempted", "finished": "finished",
    "prompt tokens": "prompt_tokens", "hit": "hit_tokens", "evicted": "evicted_tokens",
    "never seen": "never_seen_tokens", "tail": "tail_tokens", "moved blocks": "moved_blocks",
}  # fmt: skip


def write_run_page(trace: str, results: Sequence[ReplayResult], path: str | os.PathLike[str]) -> None:
    """Write replays of one trace to an .html file that shows one at a time.

    The file appears whole or not at all and loads nothing. Without JavaScript it shows a table of all numbers.
    O(spans).

    Args:
        trace: name of the trace.
        results: replays with `keep_timeline`.
        path: the file.

    Raises:
        InvalidArgument: for a result without a timeline, another suffix, or a path that cannot be written.
    """
    found = require_output(path, (".html",))
    require_str("trace", trace)
    runs = []
    for result in results:
        if result.simulated is None or result.timeline is None:
            raise InvalidArgument("results has a replay without timeline; replay with service and keep_timeline=True")
        runs.append(_data_of(result, result.simulated, result.timeline))
    if not runs:
        raise InvalidArgument("results is empty; a page needs at least one replay")
    first = results[0]
    refused = f", {first.num_refused:,} left out" if first.num_refused else ""
    blocks = f"blocks of {count_of(first.block_size, 'token')}"
    texts = {
        "title": f"Replay of {printable(trace) or 'a trace'} by timestamps",
        "subtitle": f"{count_of(first.num_requests, 'request')}{refused}; {blocks}",
    }
    parts = {"tables": "\n".join(_table(run) for run in runs)}
    write_whole(found, fill_page("run", texts, parts, {"runs": runs}).encode())


def _data_of(result: ReplayResult, times: SimulatedTime, timeline: Timeline) -> dict[str, Any]:
    return {
        "name": f"{printable(result.policy)}, {count_of(result.num_blocks, 'block')}",
        "span": timeline.span,
        "num_blocks": result.num_blocks - 1,
        "summary": _summary(result, times),
        "held": timeline.held_blocks.tolist(),
        "running": timeline.running.tolist(),
        "waiting": timeline.waiting.tolist(),
        "has_causes": result.misses is not None and result.misses.share_known == 1,
        "counts": {name: counts.tolist() for name, counts in timeline.counts.items()},
    }


def _summary(result: ReplayResult, times: SimulatedTime) -> str:
    moved = result.num_saved_blocks + result.num_fetched_blocks
    between = f" {count_of(moved, 'block')} moved between the pool and the CPU pool." if moved else ""
    median, _, slowest = times.first_token
    return (
        f"{percent(result.hit_rate)} of the prompt tokens hit. At most {count_of(result.peak_running, 'request')} ran "
        f"at once, and {count_of(result.peak_used_blocks, 'block')} of {result.num_blocks - 1:,} were held; "
        f"{count_of(result.num_preemptions, 'preemption')}.{between} By the model of the steps, the first token "
        f"came after {median:.2f} s (median) and {slowest:.2f} s (99th percentile), and the last one "
        f"{times.duration:,.0f} s after the first request; the last request arrived after {times.arrivals:,.0f} s."
    )


def _table(run: dict[str, Any]) -> str:
    columns = {head: name for head, name in _COLUMNS.items() if any(run["counts"][name])}
    heads = "".join(f'<th scope="col">{head}</th>' for head in ["from", "held", "running", "waiting", *columns])
    rows = "\n".join(_row(run, number, list(columns.values())) for number in range(len(run["held"])))
    return (
        f'<section class="run"><h2>{html.escape(run["name"])}</h2>\n'
        f'<p class="words">{html.escape(run["summary"])}</p>\n'
        f'<div class="scroll" role="region" aria-label="Numbers" tabindex="0">\n<table class="numbers">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div></section>"
    )


def _row(run: dict[str, Any], number: int, names: list[str]) -> str:
    values = [run["held"], run["running"], run["waiting"], *(run["counts"][name] for name in names)]
    cells = "".join(f"<td>{column[number]:,}</td>" for column in values)
    return f'<tr><th scope="row">{round(number * run["span"], 3):,.12g} s</th>{cells}</tr>'
