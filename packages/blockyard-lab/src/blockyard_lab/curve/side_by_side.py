"""Curves of several traces as one, and the names, colours and dashes of their lines.

The colours are safe for colour-blind eyes, and the same for a policy in every picture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from blockyard.errors import InvalidArgument

from ..policy_names import OPTIMUM
from .hit_rates import HitCurves

#: Lines of more traces than this could not be distinguished.
LETTERS = "ABCD"


def label_in(curves: HitCurves, policy: str) -> str:
    """Return what a policy's line is called: "lru", or "lru B" for that of the second of several traces."""
    return f"{policy} {curves.letter}" if curves.letter else policy


def put_together(several: Sequence[HitCurves]) -> HitCurves:
    """Return every line of every trace, as curves that can be drawn and written as a page.

    several: at the same sizes, of blocks of as many tokens; each becomes a part with a letter, A, B and so on. The
    result has the sums of the traces, the lines by `label_in`, and the first trace's knee. One is returned as it is.
    O(points). Raises `InvalidArgument` for traces that cannot stand in one picture, naming them.
    """
    if len(several) == 1:
        return several[0]
    require_one_block_size([(curves.trace, curves.tokens_a_block) for curves in several])
    if any(not np.array_equal(several[0].sizes, curves.sizes) for curves in several):
        raise InvalidArgument(f"{' and '.join(curves.trace for curves in several)} have curves at different sizes")
    several = [dataclasses.replace(curves, letter=letter) for curves, letter in zip(several, LETTERS, strict=False)]
    return dataclasses.replace(
        several[0],
        trace=" and ".join(curves.trace for curves in several),
        num_requests=sum(curves.num_requests for curves in several),
        num_references=sum(curves.num_references for curves in several),
        working_set=max(curves.working_set for curves in several),
        sample_rate=min(curves.sample_rate for curves in several),
        hit_rates={label_in(c, policy): rates for c in several for policy, rates in c.hit_rates.items()},
        num_hits={label_in(c, policy): hits for c in several for policy, hits in c.num_hits.items()},
        error={label_in(c, policy): errors for c in several for policy, errors in c.error.items()},
        infinite=max(curves.infinite for curves in several),
        parts=tuple(several),
    )


def require_one_block_size(traces: Sequence[tuple[str, int]]) -> None:
    """Raise `InvalidArgument` unless traces, by name and tokens a block, can stand in one picture."""
    if not 1 <= len(traces) <= len(LETTERS):
        raise InvalidArgument(f"there are {len(traces)} traces; one picture holds from 1 to {len(LETTERS)}")
    name, size = traces[0]
    for other, its_size in traces[1:]:
        if its_size != size:
            raise InvalidArgument(
                f"{name} has blocks of {size} tokens and {other} of {its_size}; traces in one picture need blocks of "
                f"one size"
            )


#: Okabe and Ito's colours (Color Universal Design, 2008) without black, which is the optimum's, and with Tol's wine in
#: place of yellow, too pale. One for each policy that ships, so that these never need dashes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
#: The first is a whole line; each next one serves when all colours are taken once more. In multiples of its width.
DASHES = ((), (5.0, 1.6), (1.4, 1.4), (6.0, 1.6, 1.4, 1.6))
#: Of the optimum: of one trace, and of those beside it.
OPTIMUM_DASHES = ((4.0, 2.0), (1.5, 2.5), (6.0, 2.0, 1.5, 2.0), (1.5, 5.0))
_OWN = {"lru": 0, "lfu": 1, "s3fifo": 2, "arc": 3, "fifo": 4, "score": 5, "density": 6}


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
