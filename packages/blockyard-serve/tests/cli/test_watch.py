"""`blockyard watch` finds a server's page, or says in one sentence why not."""

from __future__ import annotations

import contextlib
import socket
import time
import webbrowser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from blockyard.cli.main import main
from blockyard_serve.cli import watch

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from blockyard_testing.servers import running_server, tiny_engine


def test_watch_opens_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    with running_server(tiny_engine(num_blocks=20), api_key="secret") as server:
        for url in (server.address, f"{server.address}/", f"{server.address}/v1"):
            assert main(["watch", url]) == 0
            assert capsys.readouterr().out == f"{server.address}/ui/\n"
        assert opened == [f"{server.address}/ui/"] * 3
        assert main(["watch", server.address, "--no-open"]) == 0
        assert len(opened) == 3


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "http://127.0.0.1:99999",
        "file:///etc/passwd",
        "http://",
        "http://u:p@127.0.0.1/",
        "http://[",
        "http://a/?key=1",
    ],
)
def test_invalid_url_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", url, "--no-open"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("blockyard: url is ")
    assert said.count("\n") == 1


def test_server_without_a_page_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<p>something else")

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        assert main(["watch", f"http://127.0.0.1:{server.server_port}", "--no-open"]) == 2
        assert "there is no page" in capsys.readouterr().err
    finally:
        server.shutdown()
        server.server_close()
    assert main(["watch", f"http://127.0.0.1:{server.server_port}", "--no-open"]) == 2
    error = capsys.readouterr().err
    assert "no server listens there; start one with `blockyard serve`" in error
    assert error.count("\n") == 1


@contextlib.contextmanager
def answering(pieces: list[bytes], pause: float = 0.0) -> Iterator[str]:
    """Yield the address of a server that sends these pieces to one client, whatever the request."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as client:
                client.recv(4096)
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(pause)

        thread = Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_escape_sequences_of_a_server_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with answering([b"\x1b]0;title\x07\x1b[2J" + b"x" * 5000 + b"\r\n\r\n"]) as address:
        assert main(["watch", address, "--no-open"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"blockyard: url is '{address}'; ?]0;title??[2Jxxx")
    assert said.rstrip("\n").isprintable()
    assert len(said) < 400


def test_slow_server_hits_the_total_timeout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then keeps a socket from timing out forever."""
    monkeypatch.setattr(watch, "_TOTAL_SECONDS", 0.5)
    began = time.monotonic()
    with answering([b"HTTP/1.1 200 OK\r\n\r\n", *[b"x"] * 200], 0.05) as address:
        assert main(["watch", address, "--no-open"]) == 2
        assert time.monotonic() - began < 5
    assert "it did not answer within 0.5 seconds" in capsys.readouterr().err


def test_a_command_without_stdout_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell closes it with >&-; Python then has none."""
    page = b"HTTP/1.1 200 OK\r\n\r\n" + watch._MARK
    with answering([page]) as address:
        monkeypatch.setattr("sys.stdout", None)
        assert main(["watch", address, "--no-open"]) == 0
