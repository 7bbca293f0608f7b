"""Texts about hit-rate curves for pictures and pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..policy_names import OPTIMUM
from ..printing import count_of, keep_end, percent, printable, sentence, truncate
from .curves import GIB, HitCurves


def title_of(curves: HitCurves) -> str:
    """Return the title."""
    what = "Token hit rate by tier" if curves.tiers else "Block hit rate"
    if curves.parts:
        return f"{what} of {len(curves.parts)} traces"
    return f"{what} of {printable(curves.trace) or 'a trace'}"


def subtitle_of(curves: HitCurves) -> str:
    """Return the size of each trace."""
    if curves.parts:
        return "; ".join(
            f"{part.letter}: {truncate(printable(part.trace), 32)}, {count_of(part.num_requests, 'request')}, "
            f"{count_of(part.working_set, 'block')}"
            for part in curves.parts
        )
    tokens = f" of {count_of(curves.tokens_a_block, 'token')}" if curves.tokens_a_block else ""
    return (
        f"{count_of(curves.num_requests, 'request')}, {count_of(curves.num_references, 'block reference')}; "
        f"the working set is {count_of(curves.working_set, 'block')}{tokens}"
    )


def knee_of(curves: HitCurves) -> str:
    """Return "knee of lru: 38,667 blocks, 35.0 %"."""
    knee = curves.knee
    return f"knee of {curves.label(knee.policy)}: {count_of(knee.blocks, 'block')}, {percent(knee.hit_rate)}"


def knee_is_drawn(curves: HitCurves) -> bool:
    """Return whether the knee lies within the drawn sizes and its policy is drawn."""
    is_between = int(curves.sizes[0]) <= curves.knee.blocks <= int(curves.sizes[-1])
    return curves.knee.policy in curves.hit_rates and is_between


def unmarked_knee_of(curves: HitCurves) -> str:
    """Return sentences about the knees that are not drawn."""
    hidden = [part for part in curves.per_trace if not knee_is_drawn(part)]
    return " ".join(sentence(knee_of(part)) for part in hidden)


def infinite_of(curves: HitCurves) -> str:
    """Return the hit rate of an unlimited cache."""
    return f"{curves.label('infinite cache')}: {percent(curves.infinite)}"


def gap_of(curves: HitCurves) -> str:
    """Return the meaning of the shaded area; "" if there is none."""
    best = best_rates(curves)
    if best is None or OPTIMUM not in curves.hit_rates:
        return ""
    best_is = "the sum of all tiers" if curves.tiers else "the best policy"
    gaps = np.maximum(curves.hit_rates[OPTIMUM] - best, 0)
    widest = int(np.argmax(gaps))
    if gaps[widest] < 0.0005:
        return f"{best_is[0].upper()}{best_is[1:]} reaches the optimum, an upper bound, at every capacity shown."
    where = f"at most {100 * gaps[widest]:.1f} points, at {count_of(int(curves.sizes[widest]), 'block')}"
    return f"Shaded: from {best_is} shown up to the optimum, an upper bound; {where}."


def foot_of(curves: HitCurves) -> str:
    """Return how the numbers were computed."""
    text = "One request after another, in the order of the trace."
    if curves.sample_rate < 1:
        text += f" Sampled: 1 block in {1 / curves.sample_rate:,.0f}."
    if curves.tiers:
        text += f" {curves.tiers}."
    if curves.hints:
        text += f" Hints: {curves.hints}."
    if curves.error:
        text += f" The band of {', '.join(map(printable, curves.error))} is two standard errors to each side."
    return text


def best_rates(curves: HitCurves) -> NDArray[np.float64] | None:
    """Return (S,) the highest hit rate of any policy except the optimum, or None without one."""
    rates = [rates for policy, rates in curves.hit_rates.items() if policy != OPTIMUM]
    return np.max(rates, axis=0) if rates else None


def capacity_axis(bytes_per_block: int, model: str) -> str:
    """Return the label of the second capacity axis."""
    if not bytes_per_block:
        return "capacity (tokens)"
    return f"capacity (GiB of {keep_end(printable(model), 48)})" if model else "capacity (GiB)"


def capacity_factor(curves: HitCurves, bytes_per_block: int) -> float:
    """Return one block in units of the second capacity axis: GiB, or tokens if no model is known."""
    return bytes_per_block / GIB if bytes_per_block else float(max(curves.tokens_a_block, 1))
