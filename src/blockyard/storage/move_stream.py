"""Block moves on a CUDA stream of their own, beside the computing; each layer waits for its part of them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
