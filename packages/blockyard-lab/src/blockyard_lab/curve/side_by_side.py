"""Combines curves of several traces, and assigns names, colours and dashes to lines.

Colours are safe for colour-blind eyes. A policy has the same colour in every picture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from blockyard.errors import InvalidArgument

from ..policy_names import OPTIMUM
from .curves import HitCurves

#: One letter per trace; lines of more traces could not be told apart.
LETTERS = "ABCD"


def combine_curves(several: Sequence[HitCurves]) -> HitCurves:
    """Return the lines of all traces as one `HitCurves`, for a picture or page.

    The parts get the letters A, B and so on. Totals are sums over the traces; the knee is the first trace's. A single
    one is returned unchanged. O(points).

    Args:
        several: curves with equal sizes and equal tokens per block.

    Raises:
        InvalidArgument: for traces that do not fit into one picture.
    """
    if len(several) == 1:
        return several[0]
    require_one_block_size([(curves.trace, curves.tokens_a_block) for curves in several])
    if any(not np.array_equal(several[0].sizes, curves.sizes) for curves in several):
        names = " and ".join(curves.trace for curves in several)
        raise InvalidArgument(f"{names} have curves at different sizes; curves in one picture need equal sizes")
    several = [dataclasses.replace(curves, letter=letter) for curves, letter in zip(several, LETTERS, strict=False)]
    return dataclasses.replace(
        several[0],
        trace=" and ".join(curves.trace for curves in several),
        num_requests=sum(curves.num_requests for curves in several),
        num_references=sum(curves.num_references for curves in several),
        working_set=max(curves.working_set for curves in several),
        sample_rate=min(curves.sample_rate for curves in several),
        hit_rates={c.label(policy): rates for c in several for policy, rates in c.hit_rates.items()},
        num_hits={c.label(policy): hits for c in several for policy, hits in c.num_hits.items()},
        error={c.label(policy): errors for c in several for policy, errors in c.error.items()},
        infinite=max(curves.infinite for curves in several),
        parts=tuple(several),
    )


def require_one_block_size(traces: Sequence[tuple[str, int]]) -> None:
    """Raise `InvalidArgument` unless these traces, (name, tokens per block), fit into one picture."""
    if not 1 <= len(traces) <= len(LETTERS):
        raise InvalidArgument(f"there are {len(traces)} traces; a picture shows 1 to {len(LETTERS)}")
    name, size = traces[0]
    for other, its_size in traces[1:]:
        if its_size != size:
            raise InvalidArgument(
                f"{name} has blocks of {size} tokens and {other} of {its_size}; traces in one picture need equal blocks"
            )


#: Okabe and Ito's colours (Color Universal Design, 2008) without black, which is the optimum's, and with Tol's wine in
#: place of yellow, too pale. One for each policy that ships, so that these never need dashes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
#: In multiples of the line's width. The next one is used each time all colours are taken.
DASHES = ((), (5.0, 1.6), (1.4, 1.4), (6.0, 1.6, 1.4, 1.6))
#: Dashes of the optimum: of the first trace, and of the others.
OPTIMUM_DASHES = ((4.0, 2.0), (1.5, 2.5), (6.0, 2.0, 1.5, 2.0), (1.5, 5.0))
_OWN = {"lru": 0, "lfu": 1, "s3fifo": 2, "arc": 3, "fifo": 4, "score": 5, "density": 6}


def line_styles_of(curves: HitCurves) -> dict[str, int]:
    """Return the style of each line. With several traces, a policy has one colour and each trace its own dashes."""
    if not curves.parts:
        return line_styles(list(curves.hit_rates))
    styles = line_styles(list(dict.fromkeys(policy for part in curves.parts for policy in part.hit_rates)))
    return {
        part.label(policy): styles[policy] - number if policy == OPTIMUM else styles[policy] + number * len(COLORS)
        for number, part in enumerate(curves.parts)
        for policy in part.hit_rates
    }


def line_styles(policies: Sequence[str]) -> dict[str, int]:
    """Return a style number for each policy: modulo `len(COLORS)` it is the colour, divided by it the dashes.

    The optimum has -1. Shipped policies have fixed numbers, others get the free ones in order. O(policies).
    """
    taken = {_OWN[policy] for policy in policies if policy in _OWN}
    free = iter([number for number in range(len(policies) + len(_OWN)) if number not in taken])
    return {policy: -1 if policy == OPTIMUM else _OWN[policy] if policy in _OWN else next(free) for policy in policies}
