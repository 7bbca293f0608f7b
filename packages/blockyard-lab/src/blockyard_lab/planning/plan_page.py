"""Writes a capacity plan as one HTML page."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence

from ..output_file import fill_page, require_output, write_whole
from ..printing import count_of, percent, printable
from ..replay.tier_result import TierRow
from .gpu_memory import GIB
from .plan import CapacityPlan

#: Of a bar or of a part of one: its name, its share of the longest, what stands beside it, its colour.
_Bar = tuple[str, float, str, str]


def write_plan_page(
    plan: CapacityPlan,
    model: str,
    trace: str,
    path: str | os.PathLike[str],
    tiers: Sequence[TierRow] = (),
) -> None:
    """Write a plan to an .html file with bars and the plan's text. It loads nothing and has no script.

    The file appears whole or not at all.

    Args:
        plan: the plan.
        model: name of the model.
        trace: name of the trace; "" for none.
        path: the file.
        tiers: replays with tiers.

    Raises:
        InvalidArgument: for another suffix, or a path that cannot be written.
    """
    found = require_output(path, (".html",))
    ranks = plan.spec.tensor_parallel_size
    texts = {
        "title": f"Plan of {printable(model)} on {count_of(plan.num_gpus, 'GPU')}",
        "subtitle": f"{count_of(plan.num_replicas, 'replica')} of {count_of(ranks, 'GPU')}; on each replica "
        f"{count_of(plan.num_blocks, 'block')} of {count_of(plan.spec.block_size, 'token')}",
        "text": plan.as_text(printable(model), printable(trace), tiers),
    }
    parts = {"memory": _stack(_memory_bars(plan)), "requests": _bars(_request_bars(plan)), "hits": _hits_section(plan)}
    write_whole(found, fill_page("plan", texts, parts, None).encode())


def _memory_bars(plan: CapacityPlan) -> list[_Bar]:
    """Return the parts of one GPU's memory. If it is too small, the missing part is listed without a bar."""
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


def _request_bars(plan: CapacityPlan) -> list[_Bar]:
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
    rows = [("expected", hits.expected), ("one more GiB per GPU", hits.one_more_gib)]
    rows += [("a tenth more blocks", hits.tenth_more), ("the whole pool", hits.whole_pool)]
    if hits.with_cpu is not None:
        rows.append(("with the CPU tier, at most", hits.with_cpu))
    bars = [
        (name, at.hit_rate, f"{percent(at.hit_rate)} in {count_of(at.num_blocks, 'block')}", "var(--c2)")
        for name, at in rows
    ]
    return _bars([*bars, ("with no limit", hits.unlimited, percent(hits.unlimited), "var(--faint-2)")])


def _bars(bars: Sequence[_Bar]) -> str:
    """Return horizontal bars as HTML, each between its name and its amount."""
    rows = [
        f'<tr><th scope="row">{html.escape(name)}</th>'
        f'<td><div class="bar" style="width:{100 * share:.2f}%;background:{color}"></div></td>'
        f"<td>{html.escape(amount)}</td></tr>"
        for name, share, amount, color in bars
    ]
    return '<table class="bars"><tbody>' + "\n".join(rows) + "</tbody></table>"


def _stack(bars: Sequence[_Bar]) -> str:
    """Return one bar of all parts as HTML, with a legend below."""
    pieces = "".join(
        f'<span style="flex:{100 * share:.3f};background:{color}"></span>' for _, share, _, color in bars if share
    )
    items = "".join(
        f'<li><span style="background:{color}"></span>{html.escape(name)} <strong>{html.escape(amount)}</strong></li>'
        for name, _, amount, color in bars
    )
    return f'<div class="stack" aria-hidden="true">{pieces}</div>\n<ul class="legend">{items}</ul>'
