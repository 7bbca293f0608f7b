"""The page's paths: who may read them, unknown paths, headers for browsers, and the end of streams."""

from __future__ import annotations

import http.client
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

import blockyard_serve.live
from blockyard.errors import InvalidArgument
from blockyard_serve import ServerLimits, ServerOptions, create_app
from blockyard_serve.live.live_page import MAX_READERS
from blockyard_testing.servers import Running, running_server, tiny_engine

FILES = sorted((Path(blockyard_serve.live.__file__).parent / "files").iterdir())
STATE = ("", "/stream", "/block/1", "/run/1/4", "/branch/0")
KEY = {"Authorization": "Bearer secret"}


def state(server: Running, path: str, **headers: str) -> tuple[int, Any]:
    status, _, body = server.call("GET", f"/ui/state{path}", headers=headers)
    return status, json.loads(body)


class Stream:
    """An open stream, read event by event."""

    def __init__(self, server: Running, **headers: str) -> None:
        self.connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        self.connection.request("GET", "/ui/state/stream", headers=headers)
        self.answer = self.connection.getresponse()

    def event(self) -> tuple[str, Any]:
        """The next event that is no heartbeat; ("", None) at the end, and after a hundred heartbeats."""
        name = ""
        for _ in range(300):
            line = self.answer.readline()
            if not line:
                break
            text = line.decode("ascii").rstrip("\n")
            if text.startswith("event: "):
                name = text[7:]
            elif text.startswith("data: "):
                return name, json.loads(text[6:])
        return "", None

    def close(self) -> None:
        self.connection.close()
        self.answer.close()


# ---------------------------------------------------------------- who may ask


def test_the_state_needs_the_key_and_the_files_do_not() -> None:
    with running_server(tiny_engine(num_blocks=20), api_key="secret") as server:
        for path in STATE:
            status, answer = state(server, path)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), path
            assert state(server, path, Authorization="Bearer wrong")[0] == 401
        assert state(server, "", **KEY)[0] == 200
        assert state(server, "/block/1", **KEY)[1]["id"] == 1
        for file in FILES:
            assert server.call("GET", f"/ui/{file.name}")[0] == 200
        stream = Stream(server, **KEY)
        assert stream.answer.status == 200
        assert stream.event()[0] == "past"
        stream.close()


def test_pages_of_other_origins_are_refused() -> None:
    with running_server(tiny_engine(num_blocks=20), cors_origins=("*",)) as server:
        for path in STATE:
            for site in ("cross-site", "same-site"):
                assert state(server, path, **{"Sec-Fetch-Site": site, "Origin": "http://evil.example"})[0] == 403
        assert state(server, "", **{"Sec-Fetch-Site": "same-origin"})[0] == 200


def test_map_mode_reveals_no_prompt() -> None:
    engine = tiny_engine(num_blocks=60)
    with running_server(engine, ui="map") as server:
        server.post("/v1/completions", prompt="a secret prompt of some length" * 3, max_tokens=2)
        stream = Stream(server)
        events = [stream.event() for _ in range(2)]
        stream.close()
        told = [state(server, f"/block/{number}")[1] for number in range(1, 12)]
        assert all(block["tokens"] is None and block["text"] is None for block in told)
        assert any(block["is_cached"] for block in told)
        assert state(server, "")[1]["shows_text"] is False
        assert "tree" not in {name for name, _ in events}
        assert "secret" not in json.dumps([events, told])
        assert server.server.app.state.live_page.prompts.latest() == []


def test_a_server_can_be_without_the_page() -> None:
    with running_server(tiny_engine(num_blocks=20), ui="off") as server:
        assert server.call("GET", "/ui/")[0] == 404
        assert server.call("GET", "/ui/state")[0] == 404
    with pytest.raises(InvalidArgument, match="ui is 'yes'; it must be one of text, map, off"):
        create_app(tiny_engine(num_blocks=20), ServerOptions("tiny", ui="yes"))


# ---------------------------------------------------------------- paths


def test_ui_redirects_and_the_page_is_read_only() -> None:
    with running_server(tiny_engine(num_blocks=20)) as server:
        status, headers, _ = server.call("GET", "/ui")
        assert (status, headers["location"]) == (307, "ui/")
        for path in ("/ui/", "/ui/state", "/ui/state/block/1"):
            status, headers, body = server.call("HEAD", path)
            assert (status, body) == (200, b"")
            assert int(headers["content-length"]) > 0
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                assert server.call(method, path)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/nothing", "/block", "/block/", "/block/0", "/block/20", "/block/-1", "/block/1e3", "/block/99999999999999",
        "/block/%D9%A1", "/block/1/2", "/run/0/4", "/run/1/0", "/run/1/1025", "/run/20/1", "/branch/99", "/../app.py",
    ],
)  # fmt: skip
def test_unknown_state_path_is_refused(path: str) -> None:
    with running_server(tiny_engine(num_blocks=20)) as server:
        stream = Stream(server)
        while stream.event()[0] != "frame":
            pass
        status, answer = state(server, path)
        stream.close()
        assert status == 404
        assert isinstance(answer["error"], str)


@pytest.mark.parametrize(
    "path", ["page.py", "../page.py", "..%2Fpage.py", "%2e%2e/page.py", "files/page.css", "\\page"]
)
def test_only_the_pages_own_files_are_served(path: str) -> None:
    with running_server(tiny_engine(num_blocks=20)) as server:
        assert server.call("GET", f"/ui/{path}")[0] == 404


# ---------------------------------------------------------------- what a browser is told


class Tags(HTMLParser):
    """The tags of the page, with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


def test_the_content_security_policy_allows_only_the_pages_files() -> None:
    with running_server(tiny_engine(num_blocks=20)) as server:
        for path in ("/ui/", "/ui/main.js", "/ui/state", "/ui/nothing"):
            _, headers, _ = server.call("GET", path)
            rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
            assert rules.pop("default-src") == "'none'"
            own = {rules.pop(f"{kind}-src") for kind in ("script", "style", "img", "connect")}
            assert own == {"'self'"}
            assert rules.pop("require-trusted-types-for") == "'script'"
            assert set(rules.values()) == {"'none'"}, "no frame, no form, no base, no policy that makes markup"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"


def test_the_files_load_nothing_external_and_make_no_markup() -> None:
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"\w+://[^\s\"'<>)]+", text)) <= {"http://www.w3.org/2000/svg"}, file.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|@import|url\(", text
        )
        assert len(text.splitlines()) < 600
    tags = Tags()
    tags.feed((FILES[0].parent / "index.html").read_text(encoding="utf-8"))
    names = {file.name for file in FILES}
    for tag, attributes in tags.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert tag != "style"
        if tag in ("script", "link"):
            assert {attributes.get("src"), attributes.get("href")} & names, attributes


# ---------------------------------------------------------------- streams


def test_number_of_readers_is_bounded() -> None:
    with running_server(tiny_engine(num_blocks=20)) as server:
        streams = [Stream(server) for _ in range(MAX_READERS)]
        for stream in streams:
            stream.event()
        refused = Stream(server)
        assert refused.answer.status == 503
        assert "16 pages are open already" in json.loads(refused.answer.read())["error"]
        streams.pop().close()
        feed = server.server.app.state.live_page.feed
        deadline = time.monotonic() + 60
        while feed.num_readers == MAX_READERS and time.monotonic() < deadline:
            time.sleep(0.02)
        again = Stream(server)
        assert again.answer.status == 200
        for stream in [*streams, again]:
            stream.close()


def test_a_stopping_server_ends_the_streams() -> None:
    limits = ServerLimits(drain_seconds=50.0)
    ended: list[tuple[str, Any]] = []
    started = time.monotonic()
    with running_server(tiny_engine(num_blocks=20), limits) as server:
        stream = Stream(server)
        while stream.event()[0] != "frame":
            pass
        server.server.should_exit = True
        while (event := stream.event())[0]:
            ended.append(event)
        stream.close()
    assert ended[-1] == ("over", None)
    assert time.monotonic() - started < 45, "it did not wait for the drain to be over"


def test_blocks_and_branches_are_those_of_the_cache() -> None:
    """The block's text is the prompt's, and a branch's blocks are those that cache it, in order."""
    prompt = "0123456789abcdef" * 3 + "tail"
    with running_server(tiny_engine(num_blocks=60)) as server:
        for _ in range(2):
            server.post("/v1/completions", prompt=prompt, max_tokens=1)
        stream = Stream(server)
        event = stream.event()
        while event[0] != "tree":
            event = stream.event()
        (branch,) = event[1]["branches"]
        assert (branch["blocks"], branch["requests"], branch["behind"], branch["rest"]) == (3, 2, 0, 0)
        assert (event[1]["cached"], event[1]["rest"], event[1]["num_prompts"]) == (3, 0, 2)
        assert (branch["asked"], branch["hit"], branch["text"]) == (96, 48, "0123456789abcdef" * 3)
        blocks = state(server, "/branch/0")[1]["blocks"]
        for block_id in blocks:
            told = state(server, f"/block/{block_id}")[1]
            assert (told["text"], told["is_cached"], told["num_tokens"]) == ("0123456789abcdef", True, 16)
            assert told["pieces"] == list("0123456789abcdef")
        assert len(set(blocks)) == 3
        stream.close()


def test_block_lists_the_prompts_that_hit_it() -> None:
    with running_server(tiny_engine(num_blocks=60)) as server:
        for number in range(3):
            body = json.dumps(
                {"model": "tiny", "prompt": "the same beginning of every prompt" * 2, "max_tokens": 1}
            ).encode()
            assert server.call("POST", "/v1/completions", body, {"X-Request-ID": f"client-{number}"})[0] == 200
        assert len(server.server.app.state.live_page.prompts.latest()) == 3
        told = [state(server, f"/block/{number}")[1] for number in range(1, 59)]
        hit = [block["hits"] for block in told if block["hits"] and block["hits"]["num"]]
        assert hit[0] == {"num": 2, "of": 3, "ago": 0, "names": ["client-2", "client-1"]}
        assert all(block["hits"] is None for block in told if not block["is_cached"])
    with running_server(tiny_engine(num_blocks=60), ui="map") as server:
        server.post("/v1/completions", prompt="the same beginning" * 3, max_tokens=1)
        assert {state(server, f"/block/{number}")[1]["hits"] for number in range(1, 59)} == {None}
