"""The id of a request, and the line that the log has for it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from blockyard_engine import Engine, SamplingParams
from blockyard_serve import ServerLimits, ServerOptions, create_app
from blockyard_serve.errors import failed
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

from .test_serving_failures import Paced, fragile_engine

LINE = re.compile(
    r'127\.0\.0\.1:\d+ "(?P<asked>[^"]*)" (?P<status>\d+)(?: then (?P<late>\d+))?(?P<cut> cut)? \d+\.\d{3} s'
    r"(?: prompt=(?P<prompt>\d+) cached=(?P<cached>\d+) new=(?P<new>\d+))? (?P<id>\S+)"
)


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._came = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._came:
            self.records.append(record)
            self._came.notify_all()

    def wait_for(self, request_id: str) -> tuple[logging.LogRecord, re.Match[str]]:
        """The one line of a request; it comes just behind the answer."""
        with self._came:
            assert self._came.wait_for(lambda: self._of(request_id), 60)
            [record] = self._of(request_id)
        found = LINE.fullmatch(record.getMessage())
        assert found is not None, record.getMessage()
        return record, found

    def _of(self, request_id: str) -> list[logging.LogRecord]:
        return [record for record in self.records if record.getMessage().endswith(f" {request_id}")]


@contextmanager
def logged(
    access_log: bool, limits: ServerLimits | None = None, engine: Engine | None = None
) -> Iterator[tuple[Running, Lines]]:
    """A server, and its log."""
    lines, logger = Lines(), logging.getLogger("blockyard_serve")
    with running_server(engine or tiny_engine(), limits, access_log=access_log) as running:
        logger.addHandler(lines)
        try:
            yield running, lines
        finally:
            logger.removeHandler(lines)


def ask(running: Running, **fields: object) -> tuple[int, str]:
    """Status and id of a completion."""
    body = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, **fields}).encode()
    status, headers, _ = running.call("POST", "/v1/completions", body)
    return status, headers["x-request-id"]


def test_log_line_has_the_request_id() -> None:
    with logged(access_log=True) as (running, lines):
        for fields, wanted, new in (
            ({}, 200, "5"),
            ({"stream": True}, 200, "5"),
            ({"n": 2, "prompt": [[1, 2], [3]]}, 200, "20"),
            ({"n": 0}, 400, None),
        ):
            status, request_id = ask(running, **fields)
            record, found = lines.wait_for(request_id)
            assert status == wanted == int(found["status"])
            assert (found["asked"], found["new"], found["cut"]) == ("POST /v1/completions", new, None)
            assert found["prompt"] == (None if new is None else "3")
            assert record.levelname == "INFO"
        _, headers, _ = running.call("GET", "/nowhere?secret=1")
        assert lines.wait_for(headers["x-request-id"])[1]["asked"] == "GET /nowhere"


def test_openais_client_reads_the_id() -> None:
    with logged(access_log=True) as (running, lines):
        answer = running.client().completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2)
        assert answer._request_id is not None
        assert lines.wait_for(answer._request_id)[1]["status"] == "200"


@pytest.mark.parametrize("sent", ["abc-1.2_3:4", "x" * 128])
def test_valid_id_of_a_client_is_used(sent: str) -> None:
    with running_server(tiny_engine()) as running:
        assert running.call("GET", "/health", headers={"X-Request-ID": sent})[1]["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, 'a"b', "\xe9"])
def test_id_that_could_forge_a_line_is_replaced(sent: str) -> None:
    with running_server(tiny_engine()) as running:
        found = running.call("GET", "/health", headers={"X-Request-ID": sent})[1]["x-request-id"]
        assert re.fullmatch(r"req-[0-9a-f]{24}", found)


def test_a_path_cannot_forge_a_line() -> None:
    with logged(access_log=True) as (running, lines):
        _, headers, _ = running.call("GET", "/a%0Ab%22" + "c" * 5000)
        assert lines.wait_for(headers["x-request-id"])[1]["asked"] == "GET /a%0Ab%22" + "c" * 191


def test_without_an_access_log_only_failures_are_lines() -> None:
    with logged(access_log=False, limits=ServerLimits(request_seconds=0.05)) as (running, lines):
        assert ask(running, n=0)[0] == 400
        assert running.call("GET", "/health")[0] == 200
        status, request_id = ask(running, max_tokens=500)
        assert status == 504
        assert lines.wait_for(request_id)[0].levelname == "WARNING"
        assert len(lines.records) == 1
        running.require_idle()


def test_log_of_a_failure_has_id_and_cause() -> None:
    with logged(access_log=False, engine=fragile_engine(lambda tokens: bool((tokens == 9).any()))) as (running, lines):
        status, request_id = ask(running, prompt=[9])
        assert status == 500
        assert lines.wait_for(request_id)[0].levelname == "WARNING"
        said = [record.getMessage() for record in lines.records]
        assert any(f"request {request_id} failed alone: the device is on fire" in each for each in said)
        running.require_idle()


def test_a_stream_that_ends_with_an_error_is_a_failure() -> None:
    with logged(access_log=False, engine=fragile_engine(Paced())) as (running, lines):
        stream = running.client().completions.create(
            model=MODEL, prompt=[1, 2], max_tokens=500, stream=True, extra_headers={"X-Request-ID": "late"}
        )
        next(iter(stream))
        running.server.app.state.engine_thread.end_all(failed())
        with pytest.raises(openai.APIError, match="server failed"):
            for _ in stream:
                pass
        record, found = lines.wait_for("late")
        assert (record.levelname, found["status"], found["late"], found["cut"]) == ("WARNING", "200", "500", None)
        running.require_idle()


def test_a_client_that_left_is_a_line() -> None:
    with logged(access_log=True, engine=fragile_engine(Paced())) as (running, lines):
        stream = running.client().completions.create(
            model=MODEL, prompt=[1, 2], max_tokens=500, stream=True, extra_headers={"X-Request-ID": "gone"}
        )
        next(iter(stream))
        stream.close()
        _, found = lines.wait_for("gone")
        assert (found["status"], found["cut"]) == ("200", " cut")
        running.require_idle()


def test_health_answers_to_head() -> None:
    with running_server(tiny_engine()) as running:
        status, headers, body = running.call("HEAD", "/health")
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 0


def test_bare_application_works_without_a_request_log() -> None:
    """`create_app` under a server of one's own: nothing has been put into the scope."""
    engine = tiny_engine()
    own = tiny_engine().generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    body = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True})
    status, answer = asyncio.run(asked_directly(create_app(engine, ServerOptions(MODEL)), body.encode()))
    assert (status, json.loads(answer)["choices"][0]["text"]) == (200, own.text)
    assert engine.cache.num_used_blocks == 0


async def asked_directly(app: Any, body: bytes) -> tuple[int, bytes]:
    """What ASGI says to one completion."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    sent: list[dict[str, Any]] = []
    to_come = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not to_come:
            await asyncio.Event().wait()  # the client stays
        return to_come.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])
