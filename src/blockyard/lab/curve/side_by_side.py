"""Curves of several traces as one, to be shown in one picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...errors import InvalidArgument
from .hit_rates import HitCurves

#: Lines of more traces than this could not be distinguished.
LETTERS = "ABCD"


def label_in(curves: HitCurves, policy: str) -> str:
    """What a policy's line is called: "lru", or "lru B" for that of the second of several traces."""
    return f"{policy} {curves.letter}" if curves.letter else policy


def put_together(several: Sequence[HitCurves]) -> HitCurves:
    """Every line of every trace, as curves that can be drawn and written as a page.

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
