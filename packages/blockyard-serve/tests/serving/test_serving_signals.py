"""Ctrl-C on a busy server: it says what still runs, and a second Ctrl-C ends that without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

_SERVER = f"""
from blockyard_serve import Server, ServerOptions
from tests.serving.test_serving_failures import Paced, fragile_engine
Server(fragile_engine(Paced()), ServerOptions("{MODEL}", port=0), lambda where: print(where, flush=True)).run()
print("in order", flush=True)
"""


@contextmanager
def own_process() -> Iterator[tuple[subprocess.Popen[str], Running]]:
    """A server whose long answers last for most of a minute, in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _SERVER], text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            running = Running(None, process.stdout.readline().strip())  # type: ignore[arg-type]
            yield process, running
        finally:
            process.kill()


def test_second_ctrl_c_ends_running_requests() -> None:
    with own_process() as (process, running), ThreadPoolExecutor(4) as pool:
        assert process.stderr is not None
        answers = [
            pool.submit(running.post, "/v1/completions", prompt="a" * (1 + number), max_tokens=400)
            for number in range(3)
        ]
        stream = running.client().completions.create(model=MODEL, prompt="b", max_tokens=400, stream=True)
        pieces = iter(stream)
        next(pieces)
        wait_until(lambda: running.figures()["vllm:num_requests_running"] == 4)
        process.send_signal(signal.SIGINT)
        line = process.stderr.readline()
        assert line == "blockyard: stopping: 4 requests may run for 30 s; Ctrl-C ends them now\n"
        process.send_signal(signal.SIGINT)
        for answer in answers:
            status, headers, body = answer.result(PATIENCE_SECONDS)
            assert status == 503
            assert "retry-after" in headers
            assert body["error"]["message"] == "the server is stopping"
        with pytest.raises(Exception, match="the server is stopping"):
            list(pieces)
        out, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert out == "in order\n"
        assert errors == ""
        assert process.returncode == 0


def test_a_ctrl_c_without_requests_says_nothing() -> None:
    with own_process() as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_SECONDS) == ("in order\n", "")
        assert process.returncode == 0


@pytest.mark.parametrize("ui", ["text", "off"])
def test_root_lists_the_paths(ui: str) -> None:
    with running_server(tiny_engine(num_blocks=20), ui=ui, api_key="key") as running:
        status, headers, body = running.call("GET", "/")
        assert status == 200
        assert headers["content-type"].startswith("text/plain")
        assert b"/v1/" in body
        assert b"docs/serving.md" in body
        assert (b"/ui/" in body) == (ui != "off")
        assert MODEL.encode() not in body
        status, _, body = running.call("GET", "/docs")
        assert status == 404
        assert b"docs/serving.md" in body
