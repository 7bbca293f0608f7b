"""The fleet's page in a headless browser shows a router's real state: replicas, claims, and choices with reasons."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("zmq")

import uvicorn
from fastapi import FastAPI

from blockyard.answers import TenantUse
from blockyard_engine import Completion, FinishReason, GenerationResult
from blockyard_serve.fleet.app import fleet_routes
from blockyard_serve.fleet.fleet_metrics import FleetMetrics, fleet_state
from blockyard_serve.fleet.shared import SharedFleet
from blockyard_serve.http.access import KeyGuard
from blockyard_serve.http.app import add_error_handlers
from blockyard_serve.http.listening import open_sockets
from blockyard_serve.http.live_routes import mount_page
from blockyard_serve.live.live_page import fleet_page
from blockyard_testing.browser import CHROMIUM, browser
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")

KEY, NONE = "secret", "\u2013"
ROWS = "[...document.querySelectorAll('#replicas tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))"
USES = [TenantUse(name, "", 5, 30, 2, floor, None, None, None, 1, 40, 0) for name, floor in (("acme", 20), ("*", 0))]
HOSTILE = "<img src=x onerror=alert(1)>\u202e"


def known_fleet() -> tuple[SharedFleet, FleetMetrics]:
    """Two replicas without events, three requests in flight, one that ended, one that went on elsewhere."""
    fleet, figures = SharedFleet("robust", 3.0), FleetMetrics()
    fleet.sync({"first": None, "second": None})
    for number, name in enumerate(["one", "two", HOSTILE]):
        figures.choices.append((name, fleet.choose(name, list(range(300 * number, 300 * number + 200)), ["first"])))
    result = GenerationResult(1, [Completion(0, "", [1], FinishReason.LENGTH)], 200, 160, 0)
    figures.count_claim("first", 176, result)
    figures.count_loss("second")
    figures.count_resume(37)
    return fleet, figures


@pytest.fixture
def address() -> Iterator[str]:
    fleet, figures = known_fleet()
    app = FastAPI()

    async def ask_all(what: str) -> list[dict[str, Any]]:
        assert what == "state"
        return [fleet_state(fleet, figures, "my model", USES)]

    app.include_router(fleet_routes(ask_all, KeyGuard(KEY)))
    mount_page(app, fleet_page())
    add_error_handlers(app)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", loop="asyncio"))
    (listening,) = open_sockets("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/ui"
    server.should_exit = True
    thread.join(PATIENCE_SECONDS)


def test_page_shows_replicas_claims_and_choices(address: str, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(address)
        page.wait("!document.getElementById('key-form').hidden")
        page.wait("document.getElementById('status').textContent === 'API key needed'")
        page.complaints.clear()  # of the refusal without a key
        page.evaluate(f"document.getElementById('key').value = '{KEY}'")
        page.evaluate("document.getElementById('key-form').requestSubmit()")
        page.wait("document.getElementById('status').textContent === 'live'")
        assert page.evaluate("document.getElementById('model').textContent") == "my model"
        rows = page.evaluate(ROWS)
        assert rows[0] == ["first", "none", NONE, "3", "600", "600", "176", "160", "0 %", "1", "0"]
        assert rows[1] == ["second", "none", NONE, "0", "0", "0", "0", "0", NONE, "0", "1"]
        assert "after 37 tokens" in page.evaluate("document.getElementById('totals').textContent")
        tenants = page.evaluate(ROWS.replace("#replicas", "#tenant-lines"))
        assert tenants == [["acme", "5", "30", "2", "20", "40"], ["*", "5", "30", "2", "0", "40"]]
        assert page.evaluate("document.getElementById('tenants').checkVisibility()")
        said = page.evaluate("[...document.querySelectorAll('#choices summary')].map((each) => each.textContent)")
        assert [each.partition(" → ")[2] for each in said] == ["first, 0 cached tokens"] * 3
        assert "<img src=x" in said[0]
        assert "\u202e" not in said[0]
        page.evaluate("document.querySelector('#choices summary').click()")
        page.wait("document.querySelector('#choices tr.taken')?.checkVisibility()")
        assert page.complaints == []
        assert {each.partition("/ui")[0] for each in page.requested if "/ui" in each} == {address.removesuffix("/ui")}
        if "FLEET_PICTURE" in os.environ:
            page.picture(Path(os.environ["FLEET_PICTURE"]))
