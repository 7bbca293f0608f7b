"""Transport within one process: copies real bytes between arrays, for tests, simulations and first steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blockyard.arguments import require_int, shown
from blockyard.cache_options import MAX_BLOCKS
from blockyard.config import MAX_BLOCK_SIZE
from blockyard.errors import InvalidArgument

from .peer import MAX_HEADS
from .runs import TransferPlan

_MAX_WIDTH = 2**24


class LocalBlocks:
    """Memory of one rank and layer group as a numpy array, zeros at first.

    `data` is (num_blocks * block_size, heads, width). Raises `InvalidArgument` for sizes outside their limits.

    Args:
        num_blocks: number of blocks.
        block_size: tokens per block.
        num_kv_heads: heads of keys and values.
        width: elements of one head of one token, for keys, values and all layers.
        dtype: dtype of the elements.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_kv_heads: int = 1, width: int = 1, dtype: npt.DTypeLike = np.int64
    ) -> None:
        blocks = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
        self.block_size = require_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
        heads = require_int("num_kv_heads", num_kv_heads, 1, MAX_HEADS)
        elements = require_int("width", width, 1, _MAX_WIDTH)
        self.data: npt.NDArray[np.generic] = np.zeros((blocks * self.block_size, heads, elements), dtype)


def fetch(plan: TransferPlan, source: Sequence[Sequence[LocalBlocks]], target: Sequence[Sequence[LocalBlocks]]) -> None:
    """Carry out a plan: copy from the sender's arrays to the receiver's, `[rank][layer group]` each. O(bytes).

    Like a one-sided read it does not ask the sender first; call the sender's `require_held` afterwards to know whether
    the data is valid. Raises `InvalidArgument` if a rank, group or slot of the plan does not exist; nothing is copied
    then.
    """
    copies = []
    for run in plan.heads:
        for group, tokens in enumerate(plan.groups):
            old = _array("source", source, run.from_rank, group)
            new = _array("target", target, run.to_rank, group)
            reads, writes = tokens.from_tokens(), tokens.to_tokens()
            _require_slots("source", old, reads)
            _require_slots("target", new, writes)
            part = slice(run.from_head, run.from_head + run.num_heads)
            if old.dtype != new.dtype or old.shape[2] != new.shape[2] or part.stop > old.shape[1]:
                raise InvalidArgument(
                    f"source has shape {old.shape} and {old.dtype}, target {new.shape} and {new.dtype}; they must match"
                )
            copies.append((old, part, reads, new, slice(run.to_head, run.to_head + run.num_heads), writes))
    for old, part, reads, new, heads, writes in copies:
        new[writes, heads] = old[reads, part]


def _array(name: str, ranks: Sequence[Sequence[LocalBlocks]], rank: int, group: int) -> npt.NDArray[np.generic]:
    if rank >= len(ranks) or group >= len(ranks[rank]):
        raise InvalidArgument(f"{name} has no layer group {group} of rank {rank}; the plan needs it")
    blocks = ranks[rank][group]
    if not isinstance(blocks, LocalBlocks):
        raise InvalidArgument(f"{name} has {shown(blocks)}; each entry must be LocalBlocks")
    return blocks.data


def _require_slots(name: str, array: npt.NDArray[np.generic], slots: npt.NDArray[np.int64]) -> None:
    if len(slots) and not 0 <= slots.min() <= slots.max() < len(array):
        raise InvalidArgument(f"{name} has {len(array)} slots; the plan names {slots.min()} to {slots.max()}")
