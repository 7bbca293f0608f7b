"""Colours and dashes of policies: safe for colour-blind eyes, and the same for a policy in every picture."""

from __future__ import annotations

from collections.abc import Sequence

from ..policy_names import OPTIMUM
from .hit_rates import HitCurves
from .side_by_side import label_in

#: Okabe and Ito's colours (Color Universal Design, 2008) without black, which is the optimum's, and with Tol's wine in
#: place of yellow, too pale, and his olive. One for each policy that ships, so that these never need dashes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
#: The first is a whole line; each next one serves when all colours are taken once more. In multiples of its width.
DASHES = ((), (5.0, 1.6), (1.4, 1.4), (6.0, 1.6, 1.4, 1.6))
#: Of the optimum: of one trace, and of those beside it.
OPTIMUM_DASHES = ((4.0, 2.0), (1.5, 2.5), (6.0, 2.0, 1.5, 2.0), (1.5, 5.0))
_OWN = {"lru": 0, "lfu": 1, "s3fifo": 2, "arc": 3, "fifo": 4, "score": 5, "density": 6, "auto": 7}


def styles_of(curves: HitCurves) -> dict[str, int]:
    """The styles of all lines: where several traces are drawn, a policy has one colour, and each trace its dashes."""
    if not curves.parts:
        return line_styles(list(curves.hit_rates))
    styles = line_styles(list(dict.fromkeys(policy for part in curves.parts for policy in part.hit_rates)))
    return {
        label_in(part, policy): styles[policy] - number if policy == OPTIMUM else styles[policy] + number * len(COLORS)
        for number, part in enumerate(curves.parts)
        for policy in part.hit_rates
    }


def line_styles(policies: Sequence[str]) -> dict[str, int]:
    """Policy to a number: its colour is this modulo the colours, its dashes the quotient. The optimum has -1, and less
    beside other traces.

    Known policies keep their own numbers, the others take what is left, in order. O(policies).
    """
    taken = {_OWN[policy] for policy in policies if policy in _OWN}
    free = iter([number for number in range(len(policies) + len(_OWN)) if number not in taken])
    return {policy: -1 if policy == OPTIMUM else _OWN[policy] if policy in _OWN else next(free) for policy in policies}
