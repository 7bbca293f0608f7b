"""Allowed host names, and requests with two lengths, which could mislead a browser or a proxy."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard.errors import InvalidArgument
from blockyard_serve.http.access import known_hosts
from blockyard_testing.browser import CHROMIUM, browser
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

SECRET = "the prompt of another program"
READ_STATE = "fetch('/ui/state').then((answer) => answer.status)"
READ_PROMPT = f"""fetch('/v1/completions', {{
  method: 'POST', headers: {{'Content-Type': 'application/json'}},
  body: JSON.stringify({{model: '{MODEL}', prompt: '{SECRET}', max_tokens: 1}}),
}}).then((answer) => answer.status)"""


def status_for(server: Running, host: str, path: str = "/health") -> int:
    return server.call("GET", path, headers={"Host": host})[0]


def test_on_loopback_without_a_key_only_its_own_names_are_answered() -> None:
    with running_server(tiny_engine(num_blocks=20)) as server:
        for name in ("127.0.0.1", "localhost", "[::1]", "LocalHost"):
            assert status_for(server, name) == status_for(server, f"{name}:{server.port}") == 200
        for name in (
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "localhost.evil",
            "localhost:evil.example",
            "localhost:80@evil.example",
            "[::1].evil.example",
            "10.0.0.7",
            "[::2]",
            "",
        ):
            for path in ("/health", "/metrics", "/ui/state", "/v1/models", "/nowhere"):
                assert status_for(server, name, path) == 403
        _, headers, body = server.call("GET", "/v1/models", headers={"Host": "evil.example:1"})
        error = json.loads(body)["error"]
        assert error["code"] == "host_not_allowed"
        assert "'evil.example'" in error["message"]
        assert "--allowed-host" in error["message"]
        assert headers["connection"] == "close"
        server.require_idle()


@pytest.mark.parametrize(
    ("options", "answered", "refused"),
    [
        ({"allowed_hosts": ("models.example",)}, ["models.example", "localhost"], ["evil.example"]),
        ({"allowed_hosts": ("*",)}, ["evil.example"], []),
        ({"api_key": "key"}, ["evil.example"], []),
        ({"api_key": "key", "allowed_hosts": ("Models.Example",)}, ["models.example:80"], ["evil.example"]),
    ],
)
def test_only_allowed_host_names_are_answered(options: dict[str, Any], answered: list[str], refused: list[str]) -> None:
    with running_server(tiny_engine(num_blocks=20), **options) as server:
        assert {status_for(server, name) for name in answered} == {200}
        assert {status_for(server, name) for name in refused} <= {403}


@pytest.mark.parametrize("host", ["vm.example", "127.1", "::ffff:127.0.0.1"])
def test_name_that_resolves_to_loopback_is_restricted_too(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a machine's own name the address 127.0.1.1: any name was answered there."""
    own = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *_, **__: own(name.replace("vm.example", "127.0.1.1"), None)
    )
    known = known_hosts(host, (), has_key=False)
    assert known is not None
    assert "evil.example" not in known


@pytest.mark.parametrize("addresses", [("127.0.0.1", "10.0.0.7"), ("10.0.0.7",)])
def test_a_name_that_others_reach_is_answered_under_any(
    addresses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert known_hosts("vm.example", (), has_key=False) is None


def test_known_hosts_are_the_host_loopback_and_allowed_names() -> None:
    own = ["127.0.0.1", "localhost", "[::1]"]
    assert known_hosts("127.0.0.7", (), has_key=False) == [*own, "127.0.0.7"]
    assert known_hosts("::1", (), has_key=False) == known_hosts("LOCALHOST", (), has_key=False) == own
    assert known_hosts("0.0.0.0", (), has_key=False) is None
    assert known_hosts("", (), has_key=False) is None
    assert known_hosts("0.0.0.0", ("a.example",), has_key=False) == [*own, "0.0.0.0", "a.example"]


@pytest.mark.parametrize("host", ["", "a.example:80", "http://a.example", "é.example", "[::1", "a b", "[::1]:8000"])
def test_invalid_host_name_is_refused(host: str) -> None:
    with pytest.raises(InvalidArgument, match="allowed_hosts holds"):
        known_hosts("127.0.0.1", (host,), has_key=False)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_dns_rebinding_page_reads_nothing(tmp_path: Path) -> None:
    """The browser takes it for a page of this server, so it sends no Origin and no preflight request."""
    flag = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    with running_server(tiny_engine(num_blocks=20)) as server, browser(tmp_path, flag) as page:
        server.post("/v1/completions", prompt=SECRET, max_tokens=1)
        page.open(f"http://evil.example:{server.port}/ui/")
        assert page.evaluate(READ_STATE) == 403
        assert page.evaluate(READ_PROMPT) == 403
        page.open(f"http://localhost:{server.port}/ui/")
        assert page.evaluate(READ_STATE) == 200
        assert page.evaluate(READ_PROMPT) == 200
        server.require_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/nowhere", "/health"])
def test_a_request_with_two_lengths_is_the_last_of_its_connection(path: str) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    both = head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running_server(tiny_engine(num_blocks=20)) as server:
        with socket.create_connection((server.host, server.port), PATIENCE_SECONDS) as client:
            client.sendall(both + smuggled)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.lower().count(b"connection: close") >= 1
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b'"version"' not in answer
        server.require_idle()
