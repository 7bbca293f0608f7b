"""If a client leaves during a stream, every generator of its answer ends at once, not when collected later.

What is left is closed later by a task of the event loop, while the loop ends, or another part of it runs.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from blockyard_engine import SamplingParams
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.seeds import draws
from blockyard_testing.servers import MODEL, running_server, tiny_engine


class Left:
    """Names of async generators that were not closed by who began them, and what event loops complained of."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.complaints: list[str] = []


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    found = Left()
    hook = asyncio.BaseEventLoop._asyncgen_finalizer_hook  # type: ignore[attr-defined]

    def noted(loop: Any, generator: Any) -> None:
        found.names.append(generator.__qualname__)
        hook(loop, generator)

    def complain(loop: Any, context: dict[str, Any]) -> None:
        found.complaints.append(f"{context['message']}: {context.get('exception')!r}")

    monkeypatch.setattr(asyncio.BaseEventLoop, "_asyncgen_finalizer_hook", noted)
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_exception_handler", complain)
    yield found
    assert found.complaints == []


def test_a_server_ends_every_stream(left: Left, caplog: pytest.LogCaptureFixture) -> None:
    """Clients leave after their first bytes; one is cut while it does not read."""
    body = {"model": MODEL, "prompt": "a" * 30, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with running_server(tiny_engine()) as running, caplog.at_level(logging.WARNING):
        for number in range(draws(60, 20)):
            connection = http.client.HTTPConnection(running.host, running.port, timeout=PATIENCE_SECONDS)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read(1 + 100 * (number % 9))
            answer.close()
            connection.close()
        running.require_idle()
    assert left.names == []
    assert not [record for record in caplog.records if "generator" in record.getMessage()]


def test_a_dispatcher_ends_every_stream(left: Left) -> None:
    pytest.importorskip("openai")
    pytest.importorskip("zmq")
    from ..fleet.test_dispatcher import World, job_of, left_idle

    world = World()

    async def play() -> None:
        dispatcher = world.dispatcher(capacity=200)
        world.link.faults = dict.fromkeys(range(0, 180, 7), (1, "cut"))  # these go on elsewhere, or are left
        wanted = SamplingParams(max_tokens=400, ignore_eos=True)
        for number in range(draws(60, 20)):
            jobs = [job_of(wanted, [number] * 20) for _ in range(3)]
            dispatcher.submit(jobs)
            for _ in range(number % 4):
                await jobs[0].mailbox.take()
            dispatcher.cancel(jobs)
        dispatcher.submit([job_of(wanted, [7] * 20)])  # one that the end of the loop cuts
        await asyncio.sleep(0.1)
        dispatcher.stop(0)

    with left_idle(world):
        asyncio.run(play())
    world.close()
    assert [name for name in left.names if not name.startswith("Stream.")] == []
