"""Draws closed loops over the number of sessions at once: turns per hour, and how long turns waited."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from statistics import mean

import matplotlib.style
from matplotlib.figure import Figure

from ..output_file import require_output, write_whole
from .loop_result import LoopResult


def draw_loops(results: Sequence[LoopResult], path: str | os.PathLike[str]) -> None:
    """Draw runs of one load and pool to a .png or .svg file: a line per order of admission.

    Turns per hour and the 95th percentile of waiting are means over the seeds, the longest wait is that of all. Equal
    results give equal bytes with the same matplotlib.

    Args:
        results: results of `run_closed`.
        path: the file.

    Raises:
        InvalidArgument: for another suffix, or a path that cannot be written.
    """
    found = require_output(path, (".png", ".svg"))
    first, buffer = results[0], io.BytesIO()
    counts = sorted({result.all.num_sessions for result in results})
    with matplotlib.style.context(["default", {"svg.hashsalt": "blockyard", "svg.fonttype": "none"}]):
        figure = Figure(figsize=(7.2, 6.4), layout="constrained")
        upper, lower = figure.subplots(2, sharex=True)
        for order in dict.fromkeys(result.admission for result in results):
            runs = [[run for run in results if (run.admission, run.all.num_sessions) == (order, n)] for n in counts]
            upper.plot(counts, [mean(run.all.turns_per_hour for run in each) for each in runs], "o-", label=order)
            waits = [mean(run.all.waiting["p95"] for run in each) for each in runs]
            (line,) = lower.plot(counts, waits, "o-", label=f"{order}, 95th percentile")
            longest = [max(run.all.waiting["max"] for run in each) for each in runs]
            lower.plot(counts, longest, ":", color=line.get_color(), label=f"{order}, longest")
        for name, style in (("bound_known", "--"), ("bound_aged", ":")):
            bounds = [mean(getattr(run, name) for run in results if run.all.num_sessions == n) for n in counts]
            upper.plot(counts, bounds, style, color="gray", label=name.replace("_", ", "))
        upper.set(ylabel="turns per hour", title=f"{os.path.basename(first.all.load)}, {first.num_blocks:,} blocks")
        lower.set(ylabel="wait, s", xlabel="sessions at once")
        for axes in (upper, lower):
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=8)
        metadata = {"Date": None} if found.suffix == ".svg" else {}
        figure.savefig(buffer, format=found.suffix[1:], metadata=metadata)
    write_whole(found, buffer.getvalue())
