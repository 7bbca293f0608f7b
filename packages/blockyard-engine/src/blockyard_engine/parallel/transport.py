"""Transport of tensors between ranks, with several messages in flight; torch.distributed is the one included."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from blockyard.arguments import require_number
from blockyard.errors import HandoffError, InvalidArgument

from .runs import Lane
from .tensors import KVPort, Piece, checksum_of

#: Messages in flight at a time, each with its own buffer if its memory is not contiguous.
_DEPTH = 4


class Work(Protocol):
    """A message in flight."""

    def wait(self) -> None:
        """Wait until the message is done. Raises `HandoffError` if it fails."""


class Transport(Protocol):
    """Sends and receives messages. Those between two ranks arrive in the order of sending."""

    def send(self, message: torch.Tensor, rank: int) -> Work:
        """Start to send a flat, contiguous tensor, which must not change until the work is done."""

    def receive(self, message: torch.Tensor, rank: int) -> Work:
        """Start to fill a flat, contiguous tensor with the next message of a rank."""


class DistributedTransport:
    """Transport by torch.distributed: gloo for tensors in CPU memory, NCCL with the same calls for CUDA.

    A peer that has died or is silent for longer than `timeout` raises `HandoffError`. Tested with gloo; NCCL was never
    run.

    Args:
        group: process group, initialized by the caller; None for the default one.
        timeout: seconds that a message may take.
    """

    def __init__(self, group: Any = None, timeout: float = 30.0) -> None:
        seconds = require_number("timeout", timeout)
        if seconds <= 0:
            raise InvalidArgument(f"timeout is {timeout}; it must be above 0")
        self._group = group
        self._timeout = timedelta(seconds=seconds)

    def send(self, message: torch.Tensor, rank: int) -> Work:
        """Start an `isend`; the tensor must not change until the work is done. Raises `HandoffError`."""
        return self._begin(torch.distributed.isend, message, rank)

    def receive(self, message: torch.Tensor, rank: int) -> Work:
        """Start an `irecv` into the tensor. Raises `HandoffError`."""
        return self._begin(torch.distributed.irecv, message, rank)

    def _begin(self, call: Any, message: torch.Tensor, rank: int) -> Work:
        try:
            return _DistributedWork(call(message, rank, group=self._group), self._timeout, rank)
        except RuntimeError as error:
            raise _broken(rank, error) from error


class _DistributedWork:
    def __init__(self, work: Any, timeout: timedelta, rank: int) -> None:
        self._work = work
        self._timeout = timeout
        self._rank = rank

    def wait(self) -> None:
        try:
            done = self._work.wait(self._timeout)
        except RuntimeError as error:
            raise _broken(self._rank, error) from error
        if done is False:
            raise HandoffError(f"rank {self._rank} did not answer for {self._timeout.total_seconds():g} s")


def _broken(rank: int, error: RuntimeError) -> HandoffError:
    return HandoffError(f"rank {rank} cannot be reached: {str(error).strip().splitlines()[0][:200]}")


def send_lanes(
    transport: Transport, port: KVPort, lanes: Iterable[Lane], ranks: list[int], checked: bool = False
) -> None:
    """Send this rank's lanes to the ranks of the other side, and wait until all are sent. O(bytes).

    Raises `HandoffError` if a rank cannot be reached.

    Args:
        transport: the transport.
        port: this rank's tensors.
        lanes: the lanes.
        ranks: the other side's ranks, as the transport numbers them.
        checked: send a checksum after each lane; both sides must agree.
    """
    for lane in lanes:
        _send(transport, port, port.pieces(lane), ranks[lane.other_rank], checked)


def send_state(transport: Transport, port: KVPort, state: torch.Tensor, rank: int, checked: bool = False) -> None:
    """Send the bytes of a state, uint8 (n,), as `send_lanes` does a lane. O(bytes)."""
    _send(transport, port, port.pieces_of_state(state), rank, checked)


def _send(transport: Transport, port: KVPort, pieces: Iterable[Piece], rank: int, checked: bool) -> None:
    buffers, checksum = _Buffers(port), 0
    under_way: deque[Work] = deque()
    for piece in pieces:
        if len(under_way) == _DEPTH:
            under_way.popleft().wait()
        message = piece.view()
        if message is None:
            message = buffers.next(piece)
            piece.read(message)
        checksum = checksum_of(message, checksum) if checked else 0
        under_way.append(transport.send(message, rank))
    if checked:
        under_way.append(transport.send(torch.tensor([checksum], device=port.kv_cache.device), rank))
    for work in under_way:
        work.wait()


def receive_lanes(
    transport: Transport, port: KVPort, lanes: Iterable[Lane], ranks: list[int], checked: bool = False
) -> None:
    """Receive the lanes of the other side's ranks into this rank's blocks, and wait for all. O(bytes).

    Blocks are written until it returns or raises, so abort the transfer only afterwards. Raises `HandoffError` if a
    rank cannot be reached or a checksum is wrong.

    Args:
        transport: the transport.
        port: this rank's tensors.
        lanes: the lanes.
        ranks: the other side's ranks, as the transport numbers them.
        checked: expect a checksum after each lane; both sides must agree.
    """
    for lane in lanes:
        _receive(transport, port, port.pieces(lane), ranks[lane.other_rank], checked)


def receive_state(transport: Transport, port: KVPort, state: torch.Tensor, rank: int, checked: bool = False) -> None:
    """Receive the bytes of a state, uint8 (n,), as `receive_lanes` does a lane. O(bytes)."""
    _receive(transport, port, port.pieces_of_state(state), rank, checked)


def _receive(transport: Transport, port: KVPort, pieces: Iterable[Piece], rank: int, checked: bool) -> None:
    buffers = _Buffers(port)
    under_way: deque[_Arriving] = deque()
    checksum = 0
    for piece in pieces:
        if len(under_way) == _DEPTH:
            checksum = under_way.popleft().finish(checksum, checked)
        under_way.append(_Arriving(transport, piece, buffers, rank))
    while under_way:
        checksum = under_way.popleft().finish(checksum, checked)
    if checked:
        _require_checksum(transport, port, rank, checksum)


def _require_checksum(transport: Transport, port: KVPort, rank: int, checksum: int) -> None:
    sent = torch.zeros(1, dtype=torch.int64, device=port.kv_cache.device)
    transport.receive(sent, rank).wait()
    if int(sent[0]) != checksum:
        raise HandoffError(f"rank {rank} sent bytes with checksum {int(sent[0]):08x}; {checksum:08x} arrived")


class _Arriving:
    """A piece that is being received."""

    def __init__(self, transport: Transport, piece: Piece, buffers: _Buffers, rank: int) -> None:
        self._piece = piece
        self._view = piece.view()
        self._message = buffers.next(piece) if self._view is None else self._view
        self._work = transport.receive(self._message, rank)

    def finish(self, checksum: int, checked: bool) -> int:
        """Wait for the piece and write it to its destination; return the checksum so far, or 0."""
        self._work.wait()
        if self._view is None:
            self._piece.write(self._message)
        return checksum_of(self._message, checksum) if checked else 0


class _Buffers:
    """Reusable buffers for the messages in flight; a message is done before its buffer is used again."""

    def __init__(self, port: KVPort) -> None:
        self._data = port.kv_cache.data
        self._made: deque[torch.Tensor] = deque()

    def next(self, piece: Piece) -> torch.Tensor:
        buffer = self._made.popleft() if len(self._made) > _DEPTH else None
        if buffer is None or len(buffer) < piece.num_elements:
            buffer = torch.empty(piece.num_elements, dtype=self._data.dtype, device=self._data.device)
        self._made.append(buffer)
        return buffer[: piece.num_elements]
