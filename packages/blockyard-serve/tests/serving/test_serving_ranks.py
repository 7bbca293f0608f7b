"""A server whose engine has several ranks, when one of them ends: clients, health, and the command's exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard.cli.main import parse
from blockyard_engine import Engine
from blockyard_engine.ranks import watch
from blockyard_serve.cli import serve
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.rank_loop import children
from blockyard_testing.servers import Running, running_server, tiny_engine
from blockyard_testing.thread_ranks import ThreadPeers

WHY = "rank 1 failed: RuntimeError: the device is on fire"


def fail(number: int) -> None:
    if number == 5:
        raise RuntimeError("the device is on fire")


def wait_for(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def unhealthy(running: Running) -> str:
    """What /health says of a server that does not serve; empty while it does."""
    status, _, body = running.call("GET", "/health")
    said: str = json.loads(body)["status"]
    return said if status == 503 else ""


def test_rank_failure_in_a_step_ends_the_server_with_its_error() -> None:
    peers = ThreadPeers(2)
    engine = tiny_engine(tensor_parallel=peers)
    with running_server(engine) as running:
        status, _, answer = running.post("/v1/completions", prompt="hello", max_tokens=3, temperature=0)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        peers.followers[0].before_step = fail
        status, _, answer = running.post("/v1/completions", prompt="good morning", max_tokens=20, temperature=0)
        assert status == 500
        assert "fire" not in json.dumps(answer), "clients are not told what is inside"
        assert wait_for(lambda: unhealthy(running)) == f"the engine has failed: {WHY}"
        status, _, answer = running.post("/v1/completions", prompt="hello", max_tokens=3)
        assert status == 503
    engine.close()
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0
    peers.require_ended()


def test_rank_that_ends_while_idle_is_noticed() -> None:
    peers = ThreadPeers(2)
    engine = tiny_engine(tensor_parallel=peers)
    with running_server(engine) as running:
        assert running.call("GET", "/health")[0] == 200
        peers.followers[0]._connection.close()
        assert wait_for(lambda: unhealthy(running)) == "the engine has failed: rank 1 has ended"
    engine.close()


def all_threads_stand(pid: int) -> bool:
    """A signal stops the threads of a process one after another, and one that still runs may answer."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_health_fails_when_a_rank_does_not_respond(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be 200 until the system had reclaimed a killed rank's memory, and for 300 s after one was stopped."""
    monkeypatch.setattr(watch, "_ANSWER_SECONDS", 1.0)
    others = children(os.getpid())
    engine = tiny_engine(tensor_parallel=2)
    [pid] = [child for child in children(os.getpid()) if child not in others]
    with running_server(engine) as running:
        assert running.call("GET", "/health")[0] == 200
        os.kill(pid, end)
        if end == signal.SIGSTOP:
            wait_for(lambda: all_threads_stand(pid))
        said = unhealthy(running)
        assert said.startswith(f"the engine has failed: rank 1 (process {pid}) ")
        if end == signal.SIGSTOP:
            assert said.endswith("does not answer: it is stopped or cut off")
            os.kill(pid, signal.SIGCONT)
            wait_for(lambda: not unhealthy(running))
    engine.close()


def test_command_ends_with_the_ranks_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    peers = ThreadPeers(2)
    engines: list[Engine] = []

    def load_engine(*_: Any, **__: Any) -> tuple[Engine, str]:
        engines.append(tiny_engine(tensor_parallel=peers))
        return engines[0], "tiny"

    monkeypatch.setattr(serve, "load_engine", load_engine)
    statuses: list[int] = []
    command = threading.Thread(target=lambda: statuses.append(serve.run_serve(parse(["serve", "--port", "0"]))))
    command.start()
    said = ""

    def listens() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return bool(re.search(r"http://127\.0\.0\.1:\d+", said))

    wait_for(listens)
    peers.followers[0]._connection.close()
    command.join(PATIENCE_SECONDS)
    assert statuses == [1]
    assert "blockyard: the server has stopped: rank 1 has ended" in capsys.readouterr().err
