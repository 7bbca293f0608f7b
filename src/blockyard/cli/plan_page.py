"""A capacity plan as a page: where the memory goes, how many requests run at once, what hits."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence

from ..lab.output_file import require_output, write_whole
from ..lab.planning import CapacityPlan
from ..lab.planning.limits import GIB
from ..lab.printing import counted, percent, printable
from ..lab.web_page import filled_page
from .plan_report import as_text

#: Of a bar or of a part of one: its name, its share of the longest, what stands beside it, its colour.
_Bar = tuple[str, float, str, str]


def write_plan_page(plan: CapacityPlan, model: str, trace: str, path: str | os.PathLike[str]) -> None:
    """Write a plan into an .html file, which loads nothing and has no script: bars, and below them the plan's text.

    model, trace: their names, "" for no trace. The file appears whole or not at all. Raises `InvalidArgument` for
    another suffix or a path that cannot be written.
    """
    found = require_output(path, (".html",))
    ranks = plan.spec.tensor_parallel_size
    texts = {
        "title": f"Plan of {printable(model)} on {counted(plan.num_gpus, 'GPU')}",
        "subtitle": f"{counted(plan.num_replicas, 'replica')} of {counted(ranks, 'GPU')}; on each replica "
        f"{counted(plan.num_blocks, 'block')} of {counted(plan.spec.block_size, 'token')}",
        "text": as_text(plan, printable(model), printable(trace)),
    }
    parts = {"memory": _stack(_memory(plan)), "requests": _bars(_requests(plan)), "hits": _hits_section(plan)}
    write_whole(found, filled_page("plan", texts, parts, None).encode())


def _memory(plan: CapacityPlan) -> list[_Bar]:
    """One GPU's memory in parts. Where more is needed than there is, what is missing is named and no part."""
    gpu = plan.gpu
    amounts = [
        ("weights", gpu.weight_bytes, "var(--c0)"),
        ("activations", gpu.activation_bytes, "var(--c4)"),
        ("states", gpu.state_bytes, "var(--c3)"),
        ("blocks", max(gpu.cache_bytes, 0), "var(--c2)"),
        ("missing", max(-gpu.cache_bytes, 0), "var(--c1)"),
        ("not used", gpu.total_bytes - gpu.usable_bytes, "var(--faint-2)"),
    ]
    whole = sum(amount for name, amount, _ in amounts if name != "missing")
    return [
        (name, amount / whole * (name != "missing"), f"{amount / GIB:,.1f} GiB", color)
        for name, amount, color in amounts
        if amount
    ]


def _requests(plan: CapacityPlan) -> list[_Bar]:
    most = max([row.concurrent for row in plan.requests] + [1])
    return [
        (
            f"{row.num_tokens:,} tokens{f' ({row.label})' if row.label else ''}",
            row.concurrent / most,
            f"{row.concurrent:,} at once" if row.concurrent else "does not fit",
            "var(--c0)",
        )
        for row in plan.requests
    ]


def _hits_section(plan: CapacityPlan) -> str:
    hits = plan.hits
    if hits is None:
        return "<p>Not known: see the text.</p>"
    rows = [("expected", hits.expected), ("one more GiB a GPU", hits.one_more_gib)]
    rows += [("a tenth more blocks", hits.tenth_more), ("the whole pool", hits.whole_pool)]
    if hits.with_cpu is not None:
        rows.append(("with the CPU tier, at most", hits.with_cpu))
    bars = [
        (name, at.hit_rate, f"{percent(at.hit_rate)} in {counted(at.num_blocks, 'block')}", "var(--c2)")
        for name, at in rows
    ]
    return _bars([*bars, ("with no limit", hits.unlimited, percent(hits.unlimited), "var(--faint-2)")])


def _bars(bars: Sequence[_Bar]) -> str:
    """One below the other, each with its name before it and its amount behind."""
    rows = [
        f'<tr><th scope="row">{html.escape(name)}</th>'
        f'<td><div class="bar" style="width:{100 * share:.2f}%;background:{color}"></div></td>'
        f"<td>{html.escape(amount)}</td></tr>"
        for name, share, amount, color in bars
    ]
    return '<table class="bars"><tbody>' + "\n".join(rows) + "</tbody></table>"


def _stack(bars: Sequence[_Bar]) -> str:
    """Side by side in one bar, with a legend below."""
    pieces = "".join(
        f'<span style="flex:{100 * share:.3f};background:{color}"></span>' for _, share, _, color in bars if share
    )
    items = "".join(
        f'<li><span style="background:{color}"></span>{html.escape(name)} <strong>{html.escape(amount)}</strong></li>'
        for name, _, amount, color in bars
    )
    return f'<div class="stack" aria-hidden="true">{pieces}</div>\n<ul class="legend">{items}</ul>'
