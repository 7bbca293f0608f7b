"""`blockyard watch`: the page of a server found, or one sentence that says why not."""

from __future__ import annotations

import webbrowser
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from blockyard.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from ..support.servers import running_server, tiny_engine


def test_it_prints_the_page_and_opens_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
    ["", "127.0.0.1:8000", "file:///etc/passwd", "http://", "http://u:p@127.0.0.1/", "http://[", "http://a/?key=1"],
)
def test_what_is_no_address_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", url, "--no-open"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("blockyard: url is ")
    assert said.count("\n") == 1


def test_a_server_without_the_page_is_told(capsys: pytest.CaptureFixture[str]) -> None:
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
        assert "it has no page" in capsys.readouterr().err
    finally:
        server.shutdown()
        server.server_close()
    assert main(["watch", f"http://127.0.0.1:{server.server_port}", "--no-open"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
