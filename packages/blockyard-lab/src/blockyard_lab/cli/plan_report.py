"""This module writes a capacity plan as text and as a page for people, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import html
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from blockyard.cli import as_json as json_text
from blockyard.sizing import CacheBudgetAdvice

from ..output_file import fill_page, require_output, write_whole
from ..planning import CapacityPlan, RequestsAt
from ..planning.hits import HitForecast, HitsAt
from ..planning.memory import GIB
from ..printing import count_of, fine_percent, percent, printable

_WIDTH = 100
_LABEL = 26


def as_text(plan: CapacityPlan, model: str, trace: str, tiers: Sequence[dict[str, Any]] = ()) -> str:
    """Returns the plan in sections, the assumptions last. tiers: rows of `replay_tiers`."""
    sections = [[_headline(plan, model)], _memory(plan)]
    sections += [_requests(plan), _cache(plan), _hits(plan, trace), _block_size(plan)] if plan.fits else [_misfit(plan)]
    sections += [_tiers(tiers)] if tiers else []
    sections.append(_bullets("This assumes:", plan.assumptions))
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _tiers(tiers: Sequence[dict[str, Any]]) -> list[str]:
    from .tier_table import tier_text

    return [tier_text(list(tiers))]


def as_json(plan: CapacityPlan, model: str, trace: str, tiers: Sequence[dict[str, Any]] = ()) -> str:
    """Returns one JSON object: memory in bytes, lengths in tokens, rates from 0 to 1; null for what is not known."""
    spec, gpu = plan.spec, plan.gpu
    content: dict[str, Any] = {
        "model": model,
        "trace": trace or None,
        "fits": plan.fits,
        "smallest_tensor_parallel": plan.smallest_tensor_parallel or None,
        "num_gpus": plan.num_gpus,
        "tensor_parallel": spec.tensor_parallel_size,
        "num_replicas": plan.num_replicas,
        "memory": {**dataclasses.asdict(gpu), "usable_bytes": gpu.usable_bytes, "cache_bytes": gpu.cache_bytes},
        "cache": _cache_as_dict(plan),
        "requests": [dataclasses.asdict(row) for row in plan.requests],
        "running": plan.running,
        "cache_budget": None if plan.cache_budget is None else dataclasses.asdict(plan.cache_budget),
        "hits": None if plan.hits is None else dataclasses.asdict(plan.hits),
        "tiers": list(tiers),
        "block_size_advice": dataclasses.asdict(plan.block_size),
        "assumptions": list(plan.assumptions),
    }
    return json_text(content)


def _cache_as_dict(plan: CapacityPlan) -> dict[str, Any]:
    spec = plan.spec
    return {
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "bytes_per_block": spec.bytes_per_block,
        "padding_bytes_per_block": [spec.bytes_per_block - page.used_bytes for page in spec.page_groups],
        "bytes_per_token": spec.bytes_per_token,
        "state_bytes_per_sequence": spec.state_bytes_per_sequence,
        "num_layers_by_kind": spec.num_layers_by_kind,
        "groups": [dataclasses.asdict(group) for group in spec.groups],
        "num_blocks": plan.num_blocks,
        "num_tokens": plan.num_tokens,
        "num_cpu_blocks": plan.num_cpu_blocks,
    }


def _headline(plan: CapacityPlan, model: str) -> str:
    ranks = plan.spec.tensor_parallel_size
    engines = f"{plan.num_replicas} replica{'s' * (plan.num_replicas > 1)} of {ranks} GPU{'s' * (ranks > 1)}"
    return f"{model} on {plan.num_gpus} GPU{'s' * (plan.num_gpus > 1)}: {engines}"


def _memory(plan: CapacityPlan) -> list[str]:
    gpu = plan.gpu
    lines = [
        "Memory of one GPU",
        _line(f"{100 * gpu.utilization:g} % of {gpu.total_bytes / GIB:g} GiB", _gib(gpu.usable_bytes)),
        _line("weights", _gib(gpu.weight_bytes)),
        _line("activations", _gib(gpu.activation_bytes)),
        *([_line("states", _gib(gpu.state_bytes))] if gpu.state_bytes else []),
    ]
    if gpu.cache_bytes < 0:
        return [*lines, _line("missing", _gib(-gpu.cache_bytes))]
    return [*lines, _line("left for blocks", _gib(gpu.cache_bytes))]


def _misfit(plan: CapacityPlan) -> list[str]:
    shortest = min(plan.requests, key=lambda row: row.num_tokens)
    ranks, smallest = plan.spec.tensor_parallel_size, plan.smallest_tensor_parallel
    way_out = (
        f"{smallest} GPUs would do, with --tensor-parallel {smallest}." if smallest else "Nor does it on up to 1024."
    )
    text = (
        f"It does not fit with --tensor-parallel {ranks}: a request of {shortest.num_tokens:,} tokens needs "
        f"{shortest.num_blocks:,} blocks and the null block, and there is room for {plan.num_blocks:,}. {way_out}"
    )
    return textwrap.wrap(text, _WIDTH)


def _requests(plan: CapacityPlan) -> list[str]:
    return [
        f"{'Requests of':<{_LABEL}}{'tokens':>12}{'blocks each':>14}{'MiB each':>12}{'at once':>10}"
        f"{_in_all(plan, 'in all')}",
        *(_request_line(plan, row) for row in plan.requests),
    ]


def _request_line(plan: CapacityPlan, row: RequestsAt) -> str:
    line = f"  {row.label or 'a length asked for':<{_LABEL - 2}}{row.num_tokens:>12,}{row.num_blocks:>14,}"
    line += f"{row.num_bytes / 2**20:>12,.1f}"
    line += f"{row.concurrent:>10,}{_in_all(plan, f'{row.concurrent_in_all:,}')}"
    return line if row.concurrent else f"{line}  does not fit"


def _in_all(plan: CapacityPlan, text: str) -> str:
    return f"{text:>10}" if plan.num_replicas > 1 else ""


def _cache(plan: CapacityPlan) -> list[str]:
    lines = [
        "Cache of one replica",
        _line("blocks", f"{plan.num_blocks:,}", f"of {plan.spec.block_size} tokens, {_mib(plan)} on each GPU"),
        _line("tokens", f"{plan.num_tokens:,}", _of_tokens(plan)),
        *_unfilled(plan),
    ]
    if plan.num_cpu_blocks:
        lines.append(_line("CPU blocks", f"{plan.num_cpu_blocks:,}"))
    budget = plan.cache_budget
    if budget is not None:
        lines.append(
            _line(
                "held by running requests",
                f"{budget.reserved_blocks:,}",
                f"{plan.running:,} at work, and a fifth more to grow",
            )
        )
        if budget.missing_blocks:
            lines.append(_line("missing for them", f"{budget.missing_blocks:,}", _enough_gpus(plan, budget)))
        lines.append(_line("left for cached prefixes", f"{budget.num_blocks:,}"))
    return lines


def _enough_gpus(plan: CapacityPlan, budget: CacheBudgetAdvice) -> str:
    """Says how many GPUs hold this load: replicas share the requests at work equally."""
    replicas = -(-budget.reserved_blocks * plan.num_replicas // (plan.num_blocks - 1))
    gpus = replicas * plan.spec.tensor_parallel_size
    return f"the pool is too small for this load; {gpus:,} GPUs would do, {replicas:,} replicas"


def _unfilled(plan: CapacityPlan) -> list[str]:
    """Says what blocks lose where layer groups' tokens take different bytes, of the request that loses most."""
    most = max(plan.requests, key=lambda row: row.padding_bytes / row.num_bytes)
    if not most.padding_bytes:
        return []
    share = percent(most.padding_bytes / most.num_bytes)
    return [_line("never filled", share, f"of a request of {most.num_tokens:,} tokens: groups' tokens differ in bytes")]


def _hits(plan: CapacityPlan, trace: str) -> list[str]:
    if plan.hits is None:
        return [f"Hit rate: not known, {_why_unknown(plan, trace)}."]
    hits = plan.hits
    rows = [("expected", hits.expected), ("whole pool", hits.whole_pool), ("one more GiB a GPU", hits.one_more_gib)]
    rows.append(("a tenth more blocks", hits.tenth_more))
    if hits.with_cpu is not None:
        rows.append(("with the CPU tier", hits.with_cpu))
    lines = [f"Hit rate over {trace}", *(_hit_line(label, at, hits) for label, at in rows)]
    return [*lines, _line("with no limit", fine_percent(hits.unlimited))]


def _why_unknown(plan: CapacityPlan, trace: str) -> str:
    if not trace:
        return "for want of a --trace"
    if plan.cache_budget is None:
        return "because all requests arrive at once and --running is not given"
    return "because the trace does not say what its prompts contain"


def _hit_line(label: str, at: HitsAt, hits: HitForecast) -> str:
    gained = (
        "" if label in ("expected", "whole pool") else f", {100 * (at.hit_rate - hits.expected.hit_rate):+.2f} points"
    )
    error = f" ± {100 * at.error:.2f}" if at.error else ""
    bound = ", at most" if label == "with the CPU tier" else ""
    return _line(label, fine_percent(at.hit_rate), f"{error}in {at.num_blocks:,} blocks{gained}{bound}".strip())


def _block_size(plan: CapacityPlan) -> list[str]:
    return _bullets(f"Block size: {plan.block_size.block_size} tokens", plan.block_size.reasons)


def _bullets(title: str, sentences: tuple[str, ...]) -> list[str]:
    lines = [title]
    for sentence in sentences:
        lines += textwrap.wrap(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _line(label: str, value: str, more: str = "") -> str:
    return f"  {label:<{_LABEL - 2}}{value:>12}  {more}".rstrip()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


def _has_windows(plan: CapacityPlan) -> bool:
    return any(group.sliding_window for group in plan.spec.groups)


def _of_tokens(plan: CapacityPlan) -> str:
    """Says what a token takes, which is the --kv-bytes of other commands, and what the number of tokens supposes."""
    supposed = " if every layer keeps all of them" if _has_windows(plan) else ""
    return f"{plan.spec.bytes_per_token / 2**10:g} KiB each on each GPU{supposed}"


def _mib(plan: CapacityPlan) -> str:
    return f"{plan.spec.bytes_per_block / 2**20:.3f} MiB"


#: Of a bar or of a part of one: its name, its share of the longest, what stands beside it, its colour.
_Bar = tuple[str, float, str, str]


def write_plan_page(
    plan: CapacityPlan,
    model: str,
    trace: str,
    path: str | os.PathLike[str],
    tiers: Sequence[dict[str, Any]] = (),
) -> None:
    """Write a plan into an .html file, which loads nothing and has no script: bars, and below them the plan's text.

    model, trace: their names, "" for no trace. The file appears whole or not at all. Raises `InvalidArgument` for
    another suffix or a path that cannot be written.
    """
    found = require_output(path, (".html",))
    ranks = plan.spec.tensor_parallel_size
    texts = {
        "title": f"Plan of {printable(model)} on {count_of(plan.num_gpus, 'GPU')}",
        "subtitle": f"{count_of(plan.num_replicas, 'replica')} of {count_of(ranks, 'GPU')}; on each replica "
        f"{count_of(plan.num_blocks, 'block')} of {count_of(plan.spec.block_size, 'token')}",
        "text": as_text(plan, printable(model), printable(trace), tiers),
    }
    parts = {"memory": _stack(_memory_bars(plan)), "requests": _bars(_request_bars(plan)), "hits": _hits_section(plan)}
    write_whole(found, fill_page("plan", texts, parts, None).encode())


def _memory_bars(plan: CapacityPlan) -> list[_Bar]:
    """Returns one GPU's memory in parts. Where it is too small, what is missing is named, and no part."""
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
    rows = [("expected", hits.expected), ("one more GiB a GPU", hits.one_more_gib)]
    rows += [("a tenth more blocks", hits.tenth_more), ("the whole pool", hits.whole_pool)]
    if hits.with_cpu is not None:
        rows.append(("with the CPU tier, at most", hits.with_cpu))
    bars = [
        (name, at.hit_rate, f"{percent(at.hit_rate)} in {count_of(at.num_blocks, 'block')}", "var(--c2)")
        for name, at in rows
    ]
    return _bars([*bars, ("with no limit", hits.unlimited, percent(hits.unlimited), "var(--faint-2)")])


def _bars(bars: Sequence[_Bar]) -> str:
    """Draws the bars one below the other, each with its name before it and its amount behind."""
    rows = [
        f'<tr><th scope="row">{html.escape(name)}</th>'
        f'<td><div class="bar" style="width:{100 * share:.2f}%;background:{color}"></div></td>'
        f"<td>{html.escape(amount)}</td></tr>"
        for name, share, amount, color in bars
    ]
    return '<table class="bars"><tbody>' + "\n".join(rows) + "</tbody></table>"


def _stack(bars: Sequence[_Bar]) -> str:
    """Draws the parts side by side in one bar, with a legend below."""
    pieces = "".join(
        f'<span style="flex:{100 * share:.3f};background:{color}"></span>' for _, share, _, color in bars if share
    )
    items = "".join(
        f'<li><span style="background:{color}"></span>{html.escape(name)} <strong>{html.escape(amount)}</strong></li>'
        for name, _, amount, color in bars
    )
    return f'<div class="stack" aria-hidden="true">{pieces}</div>\n<ul class="legend">{items}</ul>'
