"""Peers as tiers: served bytes are exact, and a peer that stops, lies or sends nonsense harms no other."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from blockyard import InvalidArgument
from blockyard.cli.main import main
from blockyard.wire.connection import SocketConnection
from blockyard.wire.message import Message, pack
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.tiers_servers import free_port, peer_place
from blockyard_tiers import BackendError, Cause, FileTier, PeerServer, PeerTier, open_tier

from .support import (
    first_known,
    known,
    load,
    load_transfer,
    name_of,
    require_right,
    size_of,
    store,
    store_transfer,
    wait_for,
)
from .test_files import path_of


@contextmanager
def served(folder: Path, max_bytes: int = 2**30, peer_timeout: float = 5.0, **more: int) -> Iterator[PeerTier]:
    """A tier over a server of this process."""
    files, address = FileTier(folder, max_bytes), f"127.0.0.1:{free_port()}"
    server = PeerServer(files, address, **more)
    tier = PeerTier(f"peer:{address}", peer_timeout)
    try:
        yield tier
        files.check()
        tier.check()
    finally:
        assert tier.close()
        server.close()
        assert files.close()


@contextmanager
def liar(tell: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """A peer that answers each connection by `tell`, given the first request; its address as a tier."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def answer() -> None:
        while True:
            try:
                made, _ = listener.accept()
            except OSError:
                return
            kept.append(made)
            made.settimeout(PATIENCE_SECONDS)
            (size,) = struct.unpack("<Q", made.recv(8, socket.MSG_WAITALL))
            tell(made, made.recv(size, socket.MSG_WAITALL))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"peer:127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(PATIENCE_SECONDS)
        for each in kept:
            each.close()


def framed(data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(data) if length is None else length) + data


#: To the first question on a connection.
ANSWER = pack("answer", {"cause": "", "has_bytes": True, "number": 0})
LIES = {
    "silent": b"",
    "half an answer": framed(ANSWER)[:20],
    "half an object": framed(ANSWER) + framed(bytes(3000), 4096 + size_of(4)),
    "more than was asked for": framed(ANSWER) + framed(b"", 2**31),
    "no message": framed(b"hello"),
    "another message": framed(pack("hello", {})),
    "another version": framed(ANSWER[:4] + b"\x09" + ANSWER[5:]),
    "no cause": framed(pack("answer", {"cause": "nosuch", "number": 0})),
    "a cause that is none": framed(pack("answer", {"cause": [1], "number": 0})),
    "an answer without fields": framed(pack("answer", {})),
    "an answer to another question": framed(pack("answer", {"cause": "", "has_bytes": True, "number": 1})),
    "an answer without fields but its number": framed(pack("answer", {"number": 0})),
    "neither bytes nor a cause": framed(pack("answer", {"cause": "", "has_bytes": False, "number": 0})),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_stops_or_lies_is_a_miss_with_a_bound(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    with liar(lambda made, _: made.sendall(LIES[lie])) as url:
        tier = PeerTier(url, timeout=0.2, clock=lambda: 0.0)  # the circuit stays open, however busy the machine is
        for identity in range(3):
            transfer = load_transfer(identity, [4])
            begun = time.monotonic()
            assert tier.load(transfer) is None
            assert time.monotonic() - begun < PATIENCE_SECONDS
            result = wait_for(tier, identity)
            assert result.causes == {0: Cause.UNREACHABLE}
            require_right(transfer, [4], result)
        assert tier.load(load_transfer(9, [4])) is Cause.CIRCUIT_OPEN
        assert tier.close()
        tier.check()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("fields", [{}, {"sizes": 5}, {"sizes": None}])
def test_a_peer_that_sends_no_sizes_has_nothing(fields: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    with liar(lambda made, _: made.sendall(framed(pack("answer", {"cause": "", "number": 0, **fields})))) as url:
        tier = PeerTier(url, timeout=PATIENCE_SECONDS)
        assert known(tier, [4]) == 0
        assert tier.close()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"position": 0},
        {"position": 0, "sizes": []},
        {"position": 0, "sizes": [-1]},
        {"position": 1, "sizes": [5]},
        {"position": -1, "sizes": [5]},
        {"position": 2, "sizes": []},
        {"position": True, "sizes": []},
        {"position": "0", "sizes": [5]},
        {"position": 0.0, "sizes": [5]},
    ],
    ids=str,
)
def test_invalid_answers_about_the_first_object_are_refused(fields: dict[str, object]) -> None:
    with liar(lambda made, _: made.sendall(framed(pack("answer", {"cause": "", "number": 0, **fields})))) as url:
        tier = PeerTier(url, timeout=PATIENCE_SECONDS)
        with pytest.raises(BackendError, match="the answer has no"):
            tier._first([name_of(4)])
        assert tier.close()


def test_one_message_asks_a_peer_for_the_first_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as tier:
        assert store(tier, [7]).is_done
        reader, requests = PeerTier(tier.name), list[str]()
        ask = reader._ask
        monkeypatch.setattr(reader, "_ask", lambda kind, **fields: requests.append(kind) or ask(kind, **fields))
        assert first_known(reader, [*range(1000, 1200), 7]) == 200
        assert requests == ["first"]
        assert reader.close()


def test_a_peer_that_sends_byte_by_byte_is_a_miss() -> None:
    stop = threading.Event()

    def drip(made: socket.socket, _: bytes) -> None:
        made.sendall(framed(ANSWER) + framed(b"", 4096 + size_of(1)))
        with suppress(OSError):  # whoever asked has left
            while not stop.wait(0.05):
                made.sendall(b"?")

    def tell(made: socket.socket, request: bytes) -> None:
        threading.Thread(target=drip, args=(made, request), daemon=True).start()

    with liar(tell) as url:
        tier = PeerTier(url, timeout=0.5)
        assert load(tier, [1]) == {1: Cause.UNREACHABLE}
        stop.set()
        assert tier.close()


@pytest.mark.parametrize(
    ("data", "cause"),
    [(b"", Cause.TRUNCATED), (bytes(5000), Cause.DAMAGED), (bytes(4096 + size_of(4)), Cause.DAMAGED)],
)
def test_objects_sent_by_a_peer_are_verified(data: bytes, cause: Cause) -> None:
    def tell(made: socket.socket, _: bytes) -> None:
        with suppress(OSError):  # whoever asked leaves at a bad page, and does not wait for the rest
            made.sendall(framed(ANSWER) + framed(data))
            made.shutdown(socket.SHUT_WR)  # it says no more, also not whether it has removed what was bad

    with liar(tell) as url:
        tier = PeerTier(url, timeout=PATIENCE_SECONDS)
        assert load(tier, [4]) == {4: cause}
        assert tier.close()


class Twice:
    """A connection that repeats every answer."""

    def __init__(self, connection: SocketConnection) -> None:
        self.connection = connection
        self.recv_bytes, self.recv_into = connection.recv_bytes, connection.recv_into
        self.answer: list[bytes] = []

    def send_bytes(self, message: bytes) -> None:
        self.answer.append(message)
        if len(self.answer) == 2 or not Message.of(message).fields["has_bytes"]:
            for each in 2 * self.answer:
                self.connection.send_bytes(each)
            self.answer = []

    def close(self) -> None:
        self.connection.close()


class TwiceServer(PeerServer):
    def _serve(self, connection: SocketConnection) -> None:
        super()._serve(Twice(connection))  # type: ignore[arg-type]


def test_a_second_answer_closes_the_connection_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No object is dropped because a connection is out of step: it is closed, and a new one is asked again."""
    files, address = FileTier(tmp_path, 2**30), f"127.0.0.1:{free_port()}"
    numbers = list(range(1, 9))
    assert store(files, numbers).is_done
    server, tier = TwiceServer(files, address), PeerTier(f"peer:{address}", num_threads=1)
    made: list[SocketConnection] = []
    connect = tier._connect
    monkeypatch.setattr(tier, "_connect", lambda: made.append(connect()) or made[-1])
    for number in numbers:
        assert load(tier, [number]) == {}
    num_made = len(made)
    assert num_made <= len(numbers)
    causes = load(tier, numbers)
    assert set(causes.values()) == {Cause.UNREACHABLE}
    assert len(made) <= num_made + 2
    assert store(tier, [9]).is_done
    assert known(tier, numbers) == len(numbers)
    assert tier.close()
    server.close()
    assert sorted(files.names()) == sorted(map(name_of, [*numbers, 9]))
    assert load(files, [*numbers, 9]) == {}
    assert files.close()


def test_bad_objects_cost_a_load_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = list(range(1, 13))
    with served(tmp_path) as tier:
        assert store(tier, numbers).is_done
        kept = path_of(tmp_path, 9).read_bytes()
        for number in numbers[:9]:
            data, path = bytearray(path_of(tmp_path, number).read_bytes()), path_of(tmp_path, number)
            data[(100, 4000, -1)[number % 3]] ^= 1
            path.write_bytes((data, data + b"longer", data[: len(data) // 2], data[:-1])[number % 4])
        path_of(tmp_path, 10).write_bytes(kept)
        made: list[None] = []
        connect = tier._connect
        monkeypatch.setattr(tier, "_connect", lambda: made.append(None) or connect())
        causes = load(tier, numbers)
        assert set(causes) == set(range(1, 11))
        assert causes[10] is Cause.FOREIGN
        assert Cause.UNREACHABLE not in causes.values()
        assert len(made) <= 1  # the other thread's, which has the bad ones removed
        wait_until(lambda: sorted(tier.names()) == sorted(map(name_of, (11, 12))))
        assert load(tier, [11, 12]) == {}


def test_a_load_ends_before_the_peer_deletes_bad_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, remove = threading.Event(), FileTier._remove

    def held(self: FileTier, names: list[bytes]) -> None:
        assert goes_on.wait(PATIENCE_SECONDS)
        remove(self, names)

    monkeypatch.setattr(FileTier, "_remove", held)
    with served(tmp_path, peer_timeout=4 * PATIENCE_SECONDS) as tier:
        assert store(tier, [1, 2]).is_done
        path_of(tmp_path, 1).write_bytes(b"?" * 5000)
        assert load(tier, [1, 2]) == {1: Cause.DAMAGED}
        assert path_of(tmp_path, 1).exists()
        goes_on.set()
        wait_until(lambda: not path_of(tmp_path, 1).exists())


def test_a_stopped_peer_is_a_miss_and_recovers(tmp_path: Path) -> None:
    def brings_both() -> bool:
        transfer = load_transfer(2, [1, 2])
        return tier.load(transfer) is None and wait_for(tier, 2).is_done

    with peer_place(tmp_path) as server:
        patient, tier = PeerTier(server.url, timeout=PATIENCE_SECONDS), PeerTier(server.url, timeout=0.2)
        assert store(patient, [1, 2]).is_done
        wait_until(brings_both)
        server.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.process.pid, os.WSTOPPED)  # until then it may answer
        assert set(load(tier, [1, 2]).values()) == {Cause.UNREACHABLE}
        server.process.send_signal(signal.SIGCONT)
        wait_until(brings_both)
        assert patient.close()
        assert tier.close()


def test_a_restarted_peer_has_its_objects(tmp_path: Path) -> None:
    with peer_place(tmp_path) as server:
        tier = PeerTier(server.url)
        assert store(tier, [1, 2]).is_done
        server.kill()
        server.start()
        assert load(tier, [1, 2]) == {}  # at once: a connection that broke says nothing of the peer
        server.kill()
        assert load(tier, [1]) == {1: Cause.UNREACHABLE}
        with pytest.raises(BackendError, match="does not answer"):
            list(tier.names())
        assert tier.close()


def test_objects_that_a_peer_evicts_are_misses(tmp_path: Path) -> None:
    with served(tmp_path, 200_000) as tier:
        assert store(tier, [4, 9]).is_done
        assert load(tier, [4]) == {}  # so that 9 goes first
        assert store(tier, [14]).is_done
        assert load(tier, [9]) == {9: Cause.GONE}
        assert load(tier, [4, 14]) == {}
        tier.remove([name_of(4)])
        assert store(tier, [19]).is_done
        assert sorted(tier.names()) == sorted(map(name_of, (14, 19)))
    with served(tmp_path / "small", 10_000) as tier:
        assert store(tier, [1, 4]).causes == {0: Cause.FULL, 1: Cause.FULL}
        assert list(tier.names()) == []


def test_the_server_stores_only_whole_objects(tmp_path: Path) -> None:
    with served(tmp_path) as tier:
        assert store(tier, [1, 2]).is_done
        data = tier.get(name_of(1))
        for name, given in ((3, data), (1, data[:-1]), (1, data[:-1] + b"?"), (1, b""), (1, bytes(5000))):
            with pytest.raises(BackendError):
                tier.put(name_of(name), given)
        assert load(tier, [1, 2]) == {}
        assert known(tier, [3]) == 0


NONSENSE = {
    "no message": framed(b"hello"),
    "too long": struct.pack("<Q", 2**40),
    "half a message": framed(pack("get", {"name": "00" * 16, "most": 10}))[:-3],
    "another kind": framed(pack("drop", {"names": []})),
    "no name": framed(pack("get", {"most": 10})),
    "a short name": framed(pack("get", {"name": "00", "most": 10})),
    "a path": framed(pack("get", {"name": "../../etc/passwd", "most": 10})),
    "a number": framed(pack("get", {"name": 7, "most": 10})),
    "nothing wanted": framed(pack("get", {"name": "00" * 16, "most": 0})),
    "names of another kind": framed(pack("remove", {"names": 3})),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_invalid_requests_close_the_connection(tmp_path: Path, what: str) -> None:
    with served(tmp_path, timeout=1) as tier:
        assert store(tier, [1]).is_done
        with socket.create_connection(tier._address) as made:
            made.settimeout(PATIENCE_SECONDS)
            made.sendall(NONSENSE[what])
            assert made.recv(1) == b""
        assert load(tier, [1]) == {}


def test_peers_beyond_the_limit_are_closed_and_others_served(tmp_path: Path) -> None:
    with served(tmp_path, max_peers=2) as tier:
        first = socket.create_connection(tier._address)
        connection = SocketConnection(first, 5.0)
        connection.send_bytes(pack("names"))
        assert Message.of(connection.recv_bytes()).fields["cause"] == ""
        wait_until(lambda: store(tier, [1]).is_done)
        with socket.create_connection(tier._address) as third:
            third.settimeout(PATIENCE_SECONDS)
            assert third.recv(1) == b""
        connection.close()
        wait_until(lambda: store(tier, [1]).is_done)


def test_a_forked_child_does_not_use_its_parents_connections(tmp_path: Path) -> None:
    with peer_place(tmp_path) as server:
        tier = PeerTier(server.url, num_threads=1)
        assert store(tier, [1]).is_done
        child = os.fork()
        if child == 0:
            is_closed = tier.store(store_transfer(1, [3])) is Cause.CLOSED and tier.close()
            os._exit(0 if is_closed else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(tier._idle) == 1
        assert load(tier, [1]) == {}
        assert tier.close()


@pytest.mark.parametrize("url", ["peer:", "peer:host", "peer:host:0", "peer:host:65536", "peer::1", "http://host:1", 7])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="url is"):
        PeerTier(url)


def test_the_command_lists_and_copies_a_peers_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with peer_place(tmp_path / "a") as server:
        tier = open_tier("--tier", server.url)
        assert isinstance(tier, PeerTier)
        assert store(tier, [1, 2, 3]).is_done
        assert tier.close()
        assert main(["tier", "copy", server.url, f"file:{tmp_path / 'b'}"]) == 0
        assert main(["tier", "verify", f"file:{tmp_path / 'b'}"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "3 objects are valid, 0 are bad"
        assert main(["tier", "serve", f"file:{tmp_path / 'b'}", server.address]) == 2
        assert "in use" in capsys.readouterr().err
        assert main(["tier", "serve", f"file:{tmp_path / 'b'}"]) == 2
        assert main(["tier", "serve", f"file:{tmp_path / 'b'}", "nowhere"]) == 2
        assert "host:port" in capsys.readouterr().err
