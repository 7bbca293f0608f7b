"""Replays by timestamps as a page: blocks held, requests that run and wait, hits and causes, preemptions, over time."""

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

#: Columns of a run's table: heading, and the count that it shows.
_COLUMNS = {
    "arrived": "arrived", "started": "started", "preempted": "preempted", "finished": "finished",
    "prompt tokens": "prompt_tokens", "hit": "hit_tokens", "evicted": "evicted_tokens",
    "never seen": "never_seen_tokens", "tail": "tail_tokens", "moved blocks": "moved_blocks",
}  # fmt: skip


def write_run_page(trace: str, results: Sequence[ReplayResult], path: str | os.PathLike[str]) -> None:
    """Write replays of one trace into an .html file, one shown at a time.

    results: of replays with `keep_timeline`. The file appears whole or not at all, loads nothing, and is a table of all
    numbers without JavaScript. O(spans). Raises `InvalidArgument` for a result without a timeline, another suffix or a
    path that cannot be written.
    """
    found = require_output(path, (".html",))
    require_str("trace", trace)
    runs = [_data_of(result, *_times_of(result)) for result in results]
    if not runs:
        raise InvalidArgument("results is empty; a page needs one replay at least")
    texts = {"title": f"Replay of {printable(trace) or 'a trace'} by timestamps", "subtitle": _subtitle(results[0])}
    parts = {"tables": "\n".join(_table(run) for run in runs)}
    write_whole(found, fill_page("run", texts, parts, {"runs": runs}).encode())


def _times_of(result: ReplayResult) -> tuple[SimulatedTime, Timeline]:
    if result.simulated is None or result.timeline is None:
        raise InvalidArgument("results has a replay without a timeline; replay with service and keep_timeline=True")
    return result.simulated, result.timeline


def _subtitle(result: ReplayResult) -> str:
    refused = f", {result.num_refused:,} left out" if result.num_refused else ""
    return f"{count_of(result.num_requests, 'request')}{refused}; blocks of {count_of(result.block_size, 'token')}"


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
    """Say it in a few sentences."""
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
