"""What moves whole blocks: lists of (from, to), checked before anything is written."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..errors import InvalidArgument
from .checks import IntArray, int_array, require_range


class BlockMoves(Protocol):
    """What a plan moves before its step writes: (n, 2) each. A `StepPlan` has `copies` besides."""

    @property
    def swap_outs(self) -> object:
        """(block, CPU block)."""

    @property
    def swap_ins(self) -> object:
        """(CPU block, block)."""


def block_pairs(name: str, pairs: object, num_from: int, num_to: int) -> IntArray:
    """`pairs` as (n, 2), each row from a block below `num_from` to another below `num_to`; none is the null block.

    Raises `InvalidArgument` for another shape, an id out of range, or a block that is written twice. O(n log n).
    """
    if len(pairs) == 0:  # type: ignore[arg-type]
        return np.empty((0, 2), np.int64)
    array = int_array(name, pairs, 2)
    if array.shape[1] != 2:
        raise InvalidArgument(f"{name} has shape {array.shape}; it must be (n, 2), rows (old, new)")
    if min(num_from, num_to) == 0:
        return array  # there is no CPU pool, which the caller says in a sentence
    if num_from == num_to:
        require_range(name, array, 1, num_to - 1)
    else:
        require_range(name, array[:, 0], 1, num_from - 1)
        require_range(name, array[:, 1], 1, num_to - 1)
    if len(np.unique(array[:, 1])) != len(array):
        raise InvalidArgument(f"{name} writes a block twice; each new block must occur once")
    return array
