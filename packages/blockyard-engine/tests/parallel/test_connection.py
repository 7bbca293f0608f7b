"""Connections whose other side announces more than it sends, or whose own side is cut within a message."""

from __future__ import annotations

import itertools
import random
import signal
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from blockyard.wire.connection import ConnectionLost, SocketConnection

LENGTH = struct.Struct("<Q")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, SocketConnection]]:
    theirs, ours = socket.socketpair()
    connection = SocketConnection(ours, limit=0.2)
    with theirs:
        yield theirs, connection
    connection.close()


@contextmanager
def cut_soon() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_length_that_is_announced_takes_no_memory_before_its_bytes_come(
    pair: tuple[socket.socket, SocketConnection],
) -> None:
    """Eight bytes used to allocate four gigabytes."""
    theirs, connection = pair
    theirs.sendall(LENGTH.pack(2**32))
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionLost, match="stopped for"):
            connection.recv_bytes()
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**20 + 3])
def test_messages_of_all_lengths_come_whole(pair: tuple[socket.socket, SocketConnection], size: int) -> None:
    theirs, connection = pair
    message = (bytes(range(251)) * (size // 251 + 1))[:size]
    sender = threading.Thread(target=theirs.sendall, args=(LENGTH.pack(size) + message,))
    sender.start()
    received = connection.recv_bytes()
    sender.join()
    assert received == message


@pytest.mark.parametrize("size", [0, 1, 4096, 2**14 + 1, 3 * 2**20 + 5])
def test_pieces_are_received_whole_into_their_buffers(pair: tuple[socket.socket, SocketConnection], size: int) -> None:
    """They are one message, received as a head and several buffers."""
    theirs, connection = SocketConnection(pair[0]), pair[1]
    message = random.Random(size).randbytes(size)
    places = sorted([0, size // 3, size // 3, size])
    pieces = [message[first:stop] for first, stop in itertools.pairwise(places)]
    sender = threading.Thread(target=theirs.send_pieces, args=(pieces,))
    sender.start()
    found: list[bytearray] = []

    def place(first: bytearray, num_left: int) -> list[memoryview]:
        found[:] = [first, bytearray(num_left // 2), bytearray(num_left - num_left // 2)]
        return [memoryview(each) for each in found[1:]]

    connection.recv_into(100, place)
    sender.join()
    assert b"".join(found) == message
    theirs.send_bytes(b"next")
    assert connection.recv_bytes() == b"next"


def test_after_an_incomplete_received_message_the_connection_is_unusable(
    pair: tuple[socket.socket, SocketConnection],
) -> None:
    theirs, connection = pair
    connection = SocketConnection(connection._socket, limit=10)
    theirs.sendall(LENGTH.pack(100) + bytes(50))
    with cut_soon():
        connection.recv_bytes()
    theirs.sendall(bytes(50) + LENGTH.pack(5) + b"hello")
    with pytest.raises(ConnectionLost, match="cut short while it was received"):
        connection.recv_bytes()


def test_a_wait_for_a_message_may_be_interrupted(pair: tuple[socket.socket, SocketConnection]) -> None:
    theirs, connection = pair
    with cut_soon():
        connection.recv_bytes()
    theirs.sendall(LENGTH.pack(5) + b"hello")
    assert connection.recv_bytes() == b"hello"


@pytest.mark.parametrize("cut", ["interrupt", "limit"])
def test_after_an_incomplete_sent_message_the_connection_is_unusable(
    pair: tuple[socket.socket, SocketConnection], cut: str
) -> None:
    theirs, connection = pair
    large = bytes(2**24)
    if cut == "interrupt":
        connection = SocketConnection(connection._socket, limit=10)
        with cut_soon():
            connection.send_bytes(large)
    else:
        with pytest.raises(ConnectionLost, match="read nothing"):
            connection.send_bytes(large)
    theirs.setblocking(False)
    while _takes(theirs.recv):
        pass
    with pytest.raises(ConnectionLost, match="cut short while it was sent"):
        connection.send_bytes(b"hello")
    assert not _takes(theirs.recv)


def _takes(receive: Callable[[int], bytes]) -> bool:
    try:
        return bool(receive(2**20))
    except BlockingIOError:
        return False
