"""Copies of whole blocks: lists of (from, to), checked before anything is written.

On CUDA they run on a separate stream during computation, and each layer waits only for its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import InvalidArgument
from .addresses import IntArray, int_array, require_range


class BlockMoves(Protocol):
    """Moves of a plan before its step, (n, 2) each. A `StepPlan` also has `copies`."""

    @property
    def swap_outs(self) -> object:
        """Return pairs (block, CPU block)."""

    @property
    def swap_ins(self) -> object:
        """Return pairs (CPU block, block)."""


@dataclass(frozen=True, slots=True)
class MoveLists:
    """Lists of moves for `KVCache.move_blocks`: (from, to), (n, 2) each."""

    swap_outs: object = ()
    swap_ins: object = ()
    copies: object = ()


class MoveList:
    """A checked list of moves.

    Args:
        pairs: (n, 2) as (from, to), ids of blocks in `source` and `target`.
        source: tensor (positions, blocks, ...); None if there is nothing to move.
        target: tensor of the same dtype; the same tensor for copies.
    """

    def __init__(self, pairs: IntArray, source: torch.Tensor | None = None, target: torch.Tensor | None = None) -> None:
        self._pairs = pairs
        self._source = source
        self._target = target
        self._ids: list[torch.Tensor] = []

    def carry_out(self, places: slice) -> None:
        """Copy the blocks at the positions of some layers. O(n). A copy to or from pinned memory returns at once."""
        if self._source is None or self._target is None:
            return
        source, target = self._source[places], self._target[places]
        if source.device != target.device:
            copy_runs(source, target, self._pairs)
            return
        if not self._ids:
            # Created here, for all positions: CUDA memory belongs to the stream that is current when it is allocated.
            self._ids = [_on_device(ids, source.device) for ids in self._pairs.T]
        old, new = self._ids
        target[:, new] = source[:, old]


def _on_device(ids: IntArray, device: torch.device) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(ids))
    if device.type != "cuda":
        return made.to(device)
    # From pageable memory, the host would wait for all earlier work of the stream.
    return made.pin_memory().to(device, non_blocking=True)


def copy_runs(source: torch.Tensor, target: torch.Tensor, pairs: IntArray) -> None:
    """Copy blocks in runs of neighbours, with one transfer of contiguous memory per run. O(runs * positions).

    Indexing blocks, as is done within a device, would first collect them in a buffer and wait for it.
    """
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(pairs)]
    for place in range(len(source)):
        for start, end in zip(starts, ends, strict=True):
            old, new = pairs[start].tolist()
            count = end - start
            target[place, new : new + count].copy_(source[place, old : old + count], non_blocking=True)


def move_list(
    name: str, pairs: object, source: torch.Tensor | None, num_from: int, target: torch.Tensor | None, num_to: int
) -> MoveList:
    """Check `pairs`, (n, 2), rows (from, to) of blocks other than the null block. O(n log n).

    Args:
        name: name of the list, for errors.
        pairs: the pairs.
        source: blocks to read; None without a pool.
        num_from: blocks of `source`.
        target: blocks to write; None without a pool.
        num_to: blocks of `target`.

    Raises:
        InvalidArgument: the shape is wrong, an id is out of range, a block is written twice, or there is no such pool.
    """
    if len(pairs) == 0:  # type: ignore[arg-type]
        return MoveList(np.empty((0, 2), np.int64))
    array = int_array(name, pairs, 2)
    if array.shape[1] != 2:
        raise InvalidArgument(f"{name} has shape {array.shape}; it must be (n, 2), rows (old, new)")
    if source is None or target is None:
        raise InvalidArgument(
            f"{name} has {len(array)} blocks to move; it must be empty without a CPU pool (num_cpu_blocks is 0)"
        )
    if source is target:
        require_range(name, array, 1, num_to - 1)
    else:
        require_range(name, array[:, 0], 1, num_from - 1)
        require_range(name, array[:, 1], 1, num_to - 1)
    if len(np.unique(array[:, 1])) != len(array):
        raise InvalidArgument(f"{name} writes a block twice; each target must occur once")
    return MoveList(array, source, target)


class MoveStream:
    """A CUDA stream for moves, with an event per position of layers in a block. All calls return at once.

    The computing stream is whichever is current at each call.

    Args:
        device: the device.
        num_places: positions of layers in a block.
        streams: module with the device's streams and events, like torch.cuda.
    """

    def __init__(self, device: torch.device, num_places: int, streams: Any = torch.cuda) -> None:
        self._streams = streams
        self._device = device
        self._stream = streams.Stream(device=device)
        self._moved = [streams.Event() for _ in range(num_places)]
        #: Positions whose moves the computing stream does not wait for yet.
        self._is_pending = [False] * num_places

    def hold(self, blocks: Any) -> None:
        """Keep `blocks`, a tensor made on the computing stream, allocated until the last move is done.

        Otherwise its memory could be reused while moves that no layer waited for (the step failed) are still running.
        """
        blocks.record_stream(self._stream)

    def start(self, move: Callable[[int], None]) -> None:
        """Call `move` for each position, to move its blocks after all work submitted to the computing stream so far.

        That work includes earlier steps, which may still write the sources and read the targets.
        """
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            for place, moved in enumerate(self._moved):
                # Pending even if it raises: copies submitted so far must still be waited for.
                self._is_pending[place] = True
                try:
                    move(place)
                finally:
                    moved.record(self._stream)

    def wait(self, place: int) -> None:
        """Make the computing stream wait for the moves of a position, unless it waits for them already."""
        if self._is_pending[place]:
            self._is_pending[place] = False
            self._streams.current_stream(self._device).wait_event(self._moved[place])
