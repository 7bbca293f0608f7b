"""What moves whole blocks: lists of (from, to), checked before anything is written.

On CUDA the moves run on a stream of their own, beside the computing; each layer waits for its part of them alone.
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
    """What a plan moves before its step writes: (n, 2) each. A `StepPlan` has `copies` besides."""

    @property
    def swap_outs(self) -> object:
        """Return pairs (block, CPU block)."""

    @property
    def swap_ins(self) -> object:
        """Return pairs (CPU block, block)."""


@dataclass(frozen=True, slots=True)
class MoveLists:
    """What `KVCache.move_blocks` takes of a plan: lists of (from, to), (n, 2) each, kept or made by oneself."""

    swap_outs: object = ()
    swap_ins: object = ()
    copies: object = ()


class MoveList:
    """One list, checked. pairs: (n, 2) as (from, to), ids of blocks in `source` and `target`.

    source, target: (places, blocks, ...), of one dtype; the same tensor for copies. They are None when there is
    nothing to move.
    """

    def __init__(self, pairs: IntArray, source: torch.Tensor | None = None, target: torch.Tensor | None = None) -> None:
        self._pairs = pairs
        self._source = source
        self._target = target
        self._ids: list[torch.Tensor] = []

    def carry_out(self, places: slice) -> None:
        """Copy the blocks of some layers' places. Between devices without waiting, if the memory is pinned. O(n)."""
        if self._source is None or self._target is None:
            return
        source, target = self._source[places], self._target[places]
        if source.device != target.device:
            copy_runs(source, target, self._pairs)
            return
        if not self._ids:
            # Made here, for all places: on CUDA memory belongs to the stream that is current when it is taken.
            self._ids = [_on_device(ids, source.device) for ids in self._pairs.T]
        old, new = self._ids
        target[:, new] = source[:, old]


def _on_device(ids: IntArray, device: torch.device) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(ids))
    if device.type != "cuda":
        return made.to(device)
    # From memory that is not pinned, the host would wait for all that the stream has to move before.
    return made.pin_memory().to(device, non_blocking=True)


def copy_runs(source: torch.Tensor, target: torch.Tensor, pairs: IntArray) -> None:
    """Copy blocks run by run of neighbours: one transfer of contiguous memory each, which a device can do by itself.

    An index over blocks, as within a device, would first collect them in a buffer and wait for it. O(runs * places).
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
    """Check `pairs`, (n, 2): each row from a block below `num_from` to another below `num_to`, none the null block.

    Raises `InvalidArgument` for another shape, an id out of range, a block that is written twice, or a pool that there
    is not. O(n log n).
    """
    if len(pairs) == 0:  # type: ignore[arg-type]
        return MoveList(np.empty((0, 2), np.int64))
    array = int_array(name, pairs, 2)
    if array.shape[1] != 2:
        raise InvalidArgument(f"{name} has shape {array.shape}; it must be (n, 2), rows (old, new)")
    if source is None or target is None:
        raise InvalidArgument(f"{name} has blocks to move, and num_cpu_blocks is 0; a CPU pool is needed")
    if source is target:
        require_range(name, array, 1, num_to - 1)
    else:
        require_range(name, array[:, 0], 1, num_from - 1)
        require_range(name, array[:, 1], 1, num_to - 1)
    if len(np.unique(array[:, 1])) != len(array):
        raise InvalidArgument(f"{name} writes a block twice; each new block must occur once")
    return MoveList(array, source, target)


class MoveStream:
    """A stream for moves, and an event for each place that layers keep their blocks in.

    streams: the module with the device's streams and events, torch.cuda's form. The stream that computes is whichever
    is current at each call. All calls return at once.
    """

    def __init__(self, device: torch.device, num_places: int, streams: Any = torch.cuda) -> None:
        self._streams = streams
        self._device = device
        self._stream = streams.Stream(device=device)
        self._moved = [streams.Event() for _ in range(num_places)]
        #: Places whose moves the computing stream has not been told to wait for.
        self._is_pending = [False] * num_places

    def hold(self, blocks: Any) -> None:
        """Say that moves read and write `blocks`, a tensor of the device that was made on the computing stream.

        When it is freed its memory goes to the next allocation, and that must not be before the last move is done: a
        cache may go while moves that no layer waited for (its step broke) are still under way.
        """
        blocks.record_stream(self._stream)

    def start(self, move: Callable[[int], None]) -> None:
        """Call `move` for each place, to move its blocks behind all that was asked of the computing stream so far.

        Behind it, because earlier steps may still write what is to be moved, and read what is to be overwritten.
        """
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            for place, moved in enumerate(self._moved):
                # Pending even if it raises half-way: what was asked for is still to be waited for.
                self._is_pending[place] = True
                try:
                    move(place)
                finally:
                    moved.record(self._stream)

    def wait(self, place: int) -> None:
        """Have the computing stream wait until a place's blocks are moved, if it does not already."""
        if self._is_pending[place]:
            self._is_pending[place] = False
            self._streams.current_stream(self._device).wait_event(self._moved[place])
