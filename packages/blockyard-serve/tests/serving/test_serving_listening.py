"""Where a server listens: sockets are bound before anything else, and errors if they cannot be."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard.cli.main import main
from blockyard.errors import InvalidArgument
from blockyard_serve import Server, ServerOptions
from blockyard_serve.cli import serve
from blockyard_serve.http.listening import open_sockets
from blockyard_testing.servers import MODEL, running_server, tiny_engine


def close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


def test_port_0_takes_any_free_port() -> None:
    sockets = open_sockets("127.0.0.1", 0)
    assert [one.getsockname()[0] for one in sockets] == ["127.0.0.1"]
    with pytest.raises(ConnectionRefusedError):  # no client connects before the server is ready
        socket.create_connection(sockets[0].getsockname(), timeout=5)
    close(sockets)


def test_all_addresses_of_a_host_have_one_port() -> None:
    sockets = open_sockets("localhost", 0)
    assert len({one.getsockname()[1] for one in sockets}) == 1
    assert len({one.getsockname()[0] for one in sockets}) == len(sockets)
    close(sockets)


def test_small_pieces_are_sent_at_once() -> None:
    """No connection waits for an acknowledgement before it sends the next piece (Nagle's algorithm is off)."""
    with running_server(tiny_engine()) as running, socket.create_connection((running.host, running.port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4).startswith(b"HTTP")  # so that the connection is open there, too
        [connection] = running.server.server_state.connections
        at_server = connection.transport.get_extra_info("socket")
        assert at_server.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", -1, "port is -1; it must be from 0 to 65535"),
        ("127.0.0.1", 65536, "port is 65536"),
        ("127.0.0.1", "80", "port is '80'"),
        (7, 0, "host is 7"),
        ("192.0.2.1", 0, "host is '192.0.2.1' and port is 0; cannot listen there: "),
        ("no such host", 80, "host is 'no such host' and port is 80; cannot listen there: "),
        ("x" * 300, 80, "cannot listen there: "),
    ],
)
def test_address_that_cannot_be_bound_is_refused(host: str, port: int, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        open_sockets(host, port)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"host is '127.0.0.1' and port is {port}; cannot listen there: Address already in use"
        with pytest.raises(InvalidArgument) as caught:
            open_sockets("127.0.0.1", port)
        assert str(caught.value) == words
        server = Server(tiny_engine(), ServerOptions(model_name=MODEL, port=port))
        with pytest.raises(InvalidArgument) as caught:
            server.run()
        assert str(caught.value) == words


def test_second_server_on_an_address_reports_it() -> None:
    """Both are bound while neither listens; the second to be ready finds the port taken, and ends in order."""
    ours = open_sockets("127.0.0.1", 0)
    port = ours[0].getsockname()[1]
    theirs = open_sockets("127.0.0.1", port)
    theirs[0].listen()
    server = Server(tiny_engine(), ServerOptions(model_name=MODEL, port=port))
    with pytest.raises(InvalidArgument, match=f"port is {port}; cannot listen there"):
        server.run(ours)
    assert not server.app.state.engine_thread._thread.is_alive()
    close([*ours, *theirs])


@pytest.mark.parametrize("below", [0, 1])
@pytest.mark.parametrize("host", ["127.0.0.1", "*", "0.0.0.0"])
def test_kv_events_on_the_servers_port_are_refused(capsys: pytest.CaptureFixture[str], host: str, below: int) -> None:
    """Told before a model is loaded: the system says no only when the server begins to listen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    events = f"tcp://{host}:{port - below}"
    assert main(["serve", "--port", str(port), "--kv-events", events, "--model", "no/such/model"]) == 2
    said = capsys.readouterr().err
    assert f"--kv-events is {events}; neither this port nor the next one (for replays) may be the server" in said
    assert f" port {port}\n" in said


@pytest.mark.parametrize(
    "events", ["tcp://127.0.0.2:{port}", "tcp://127.0.0.1:*", "ipc://@blockyard-{port}", "tcp://[::1]:1"]
)
def test_kv_events_at_another_address_are_accepted(capsys: pytest.CaptureFixture[str], events: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = events.format(port=port)
    assert main(["serve", "--port", str(port), "--kv-events", given, "--model", "no/such/model"]) == 2
    assert "must not be" not in capsys.readouterr().err


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP as a program finds it that a terminal started, whether or not this run was started under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_stops_it_in_order(hangup: None) -> None:
    """As SIGTERM does; under nohup it goes on."""
    server = Server(tiny_engine(), ServerOptions(model_name=MODEL, port=0))
    with server.capture_signals():
        signal.raise_signal(signal.SIGHUP)
        assert server.should_exit
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    server.should_exit = False
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with server.capture_signals():
        signal.raise_signal(signal.SIGHUP)
        assert not server.should_exit
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_server_whose_address_nobody_reads_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `blockyard serve | true`, or with a full disk behind stdout."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        serve._say_where("m", "http://127.0.0.1:1", "off")
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells how long the queue of a listener is")
def test_few_connections_wait_to_be_accepted() -> None:
    """Each costs the loop milliseconds while honest clients wait: at most 128 instead of asyncio's 2,048."""
    with running_server(tiny_engine()) as running:
        (listener,) = running.server.servers[0].sockets
        with socket.socket(fileno=os.dup(listener.fileno())) as ours:
            told = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        # Of a listener: how many wait now, and how many may.
        assert struct.unpack("=ii", told[24:32]) == (0, 128)


def test_its_loop_is_asyncios_whatever_else_is_installed() -> None:
    """uvloop's connections lack what bounds how much is read at once."""
    server = Server(tiny_engine(), ServerOptions("tiny", port=0))
    assert server.config.get_loop_factory().__module__.startswith("asyncio")
