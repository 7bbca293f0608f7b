"""The shipped dashboard and alerts use only series that the server exports, and a real Prometheus accepts them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")
pytest.importorskip("zmq")

import uvicorn
from fastapi import FastAPI, Response

from blockyard import CacheConfig, KVCacheManager, ObserveConfig
from blockyard.events import KVEventPublisher
from blockyard.metrics import alert_rules_path, dashboard_path
from blockyard.tenants import Tenant
from blockyard_engine import Completion, FinishReason, GenerationResult, PromptLookup
from blockyard_serve.fleet.fleet_metrics import FleetCollector, FleetMetrics, FleetPage
from blockyard_serve.fleet.shared import SharedFleet
from blockyard_serve.http.listening import open_sockets
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.places import ROOT
from blockyard_testing.prometheus import Prometheus, check_rules, is_installed, scraping
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine
from blockyard_tiers import FileTier

DASHBOARD, ALERT_RULES = dashboard_path(), alert_rules_path()
NAME = re.compile(r"\b(?:vllm|blockyard):\w+")
NEEDS_PROMETHEUS = pytest.mark.skipif(not is_installed(), reason="needs Debian's package prometheus")
#: Targets that stay empty while nothing of the kind happens.
QUIET = {"refused: {{reason}}"}
#: Rows whose panels want a flag say which.
FLAGGED_ROW = re.compile(r": .*--[a-z-]+")


def expressions() -> list[tuple[str, str]]:
    """(panel and legend, expression) of the dashboard."""
    board = json.loads(DASHBOARD.read_text())
    return [
        (f"{panel['title']} | {target['legendFormat']}", target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that answers: hits in the pool, the CPU pool and a tier, evictions, completions, guesses, KV events."""
    engine = tiny_engine(
        40,
        max_num_seqs=4,
        cache_options={
            "track_misses": True,
            "residency_sample": 1,
            "retention_blocks": 4,
            "tenants": (Tenant("acme"),),
        },
        kv_events={"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"},
        speculation=PromptLookup(),
        num_cpu_blocks=60,
        tiers=[FileTier(tmp_path_factory.mktemp("tier"), 2**30)],
    )
    with running_server(engine, tenant_metrics=2) as running:
        work(running)
        yield running


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    """Where a fleet's page is, of a replica that is believed, took a request and lost another."""
    cache = KVCacheManager(CacheConfig(num_blocks=20, observe=ObserveConfig(enable_kv_cache_events=True)))
    publisher = KVEventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat=0.1)
    known, figures = SharedFleet("robust", 3600.0), FleetMetrics()
    known.sync({"a": (publisher.endpoint, publisher.replay_endpoint)})
    known.choose("request", list(range(100)), ["a"], max_tokens=10)
    figures.count_claim("a", 64, GenerationResult(1, [Completion(0, "", [1], FinishReason.LENGTH)], 100, 48, 0))
    figures.count_loss("a")
    figures.count_resume(5)
    page = FleetPage([FleetCollector(known, figures, {"engine": "fleet", "model_name": "tiny"})])
    app = FastAPI()

    @app.get("/metrics")
    async def metrics() -> Response:
        known.poll()
        return Response(await page.text(), media_type="text/plain; version=0.0.4")

    server = uvicorn.Server(uvicorn.Config(app, log_level="error", loop="asyncio"))
    (listening,) = open_sockets("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(PATIENCE_SECONDS)
    known.fleet.close()
    publisher.close()


@pytest.fixture(scope="module")
def ruled() -> Iterator[Running]:
    """A server whose order of admission is not arrival, which excludes tenants."""
    with running_server(tiny_engine(40, max_num_seqs=4, admission="room")) as running:
        work(running)
        yield running


def work(running: Running) -> None:
    prompts = [f"{number} bottles of beer on the wall, {number} bottles of beer. " * 2 for number in range(10)]
    for prompt in [*prompts, prompts[-1], prompts[0]]:
        running.client().completions.create(model=MODEL, prompt=prompt, max_tokens=8, n=2, temperature=0)
    running.call("POST", "/v1/hints", b'{"session_id": "a conversation", "over": true}')


@pytest.fixture(scope="module")
def exported(served: Running, ruled: Running, fleet: str) -> set[str]:
    """Names of series, and what may be seen of them only when it happens."""
    pages = [running.call("GET", "/metrics")[2].decode() for running in (served, ruled)]
    with urllib.request.urlopen(f"http://{fleet}/metrics", timeout=PATIENCE_SECONDS) as answer:
        text = "".join(pages) + answer.read().decode()
    names = set(re.findall(r"^([\w:]+)\{", text, re.MULTILINE))
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    return names | {name for name, kind in types.items() if kind == "counter"}


@pytest.mark.parametrize("file", [DASHBOARD, ALERT_RULES], ids=lambda file: file.name)
def test_dashboard_and_alerts_name_exported_metrics(file: Path, exported: set[str]) -> None:
    named = set(NAME.findall(file.read_text()))
    assert len(named) > 8
    assert named - exported == set()


def test_panels_have_titles_descriptions_and_do_not_overlap() -> None:
    board = json.loads(DASHBOARD.read_text())
    places: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places
        assert at["x"] + at["w"] <= 24
        places |= cells
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"].endswith(".")
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used <= variables


def test_without_a_flag_only_rows_that_name_one_are_empty() -> None:
    """Under plain `blockyard serve` every target outside the flagged rows has its series, from the first request."""
    with running_server(tiny_engine(40, max_num_seqs=4)) as running:
        work(running)
        _, _, page = running.call("GET", "/metrics")
    seen = set(re.findall(r"^([\w:]+)\{", page.decode(), re.MULTILINE))
    flagged, empty, in_flagged = False, [], 0
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        flagged = bool(FLAGGED_ROW.search(panel["title"])) if panel["type"] == "row" else flagged
        for target in panel.get("targets", []):
            is_empty = not set(NAME.findall(target["expr"])) <= seen
            in_flagged += is_empty and flagged
            if is_empty and not flagged and target["legendFormat"] not in QUIET:
                empty.append(f"{panel['title']} | {target['legendFormat']}")
    assert empty == []
    assert in_flagged > 10, "a plain server lacks what the flags switch on"


def documented() -> set[str]:
    """Return the names in the docs' tables. In a row, `a:b_c` and `_d` stand for a:b_c, a:d and a:b_d."""
    rows = [
        re.findall(r"`([\w:]+)`", row.split(" | ")[0])
        for page in ("metrics.md", "serving.md", "fleet.md")
        for row in (ROOT / "docs" / page).read_text().splitlines()
        if re.match(r"\| `(?:vllm|blockyard):", row)
    ]
    names: set[str] = set()
    for first, *others in rows:
        words = re.findall(r"[a-z]+[:_]?", first)
        for at in range(len(words)):
            begun = "".join(words[: at + 1])
            names |= {begun.rstrip("_") + other for other in others}
            names |= {begun.rstrip("_") + other + "".join(words[at + 2 :]) for other in others if other.endswith("_")}
        names |= {first, *others}
    return {name.removesuffix("_total") for name in names}


def test_docs_describe_every_metric(exported: set[str]) -> None:
    shown = {re.sub(r"(_total)?(_bucket|_count|_sum)?$", "", name) for name in exported if NAME.match(name)}
    assert len(shown) > 80
    assert shown - documented() == set()


def test_docs_list_every_alert() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    alerts = re.findall(r"- alert: (\w+)", ALERT_RULES.read_text())
    assert re.findall(r"^\| `(\w+)` \| (?:info|warning|critical) ", page, re.MULTILINE) == alerts


@NEEDS_PROMETHEUS
def test_promtool_accepts_the_rules() -> None:
    assert "13 rules found" in check_rules(ALERT_RULES)


@NEEDS_PROMETHEUS
def test_each_alert_fires_on_its_condition(tmp_path: Path) -> None:
    shutil.copy(ALERT_RULES, tmp_path)
    shutil.copy(Path(__file__).parent / "alerts_test.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "alerts_test.yml")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMETHEUS
def test_a_real_prometheus_scrapes_and_every_panel_has_data(
    served: Running, ruled: Running, fleet: str, tmp_path: Path
) -> None:
    targets = [f"{served.host}:{served.port}", f"{ruled.host}:{ruled.port}", fleet]
    with scraping(targets, ALERT_RULES, tmp_path) as prometheus:
        prometheus.wait_for('count(up{job="blockyard"} == 1) == 3')
        prometheus.wait_for("count_over_time(blockyard:fleet_claims_total[1m]) > 2")
        prometheus.wait_for('count_over_time(vllm:generation_tokens_total{job="blockyard"}[1m]) > 2')
        work(served)
        work(ruled)
        prometheus.wait_for("sum(rate(vllm:request_success_total[1m])) > 0")
        prometheus.wait_for("count_over_time(vllm:generation_tokens_total[1m]) > 12")
        empty = [title for title, expression in expressions() if not values(prometheus, expression)]
        assert [title for title in empty if title.split(" | ")[1] not in QUIET] == []
        assert prometheus.query('ALERTS{alertstate="firing", severity="critical"}') == []
        _, rules = prometheus.get("/api/v1/rules")
    states = {rule["name"]: rule["health"] for group in rules["data"]["groups"] for rule in group["rules"]}
    assert len(states) == 13
    assert set(states.values()) == {"ok"}


def values(prometheus: Prometheus, expression: str) -> list[Any]:
    """An expression of the dashboard as Grafana would send it: variables filled in."""
    filled = expression.replace("$__rate_interval", "1m")
    return prometheus.query(re.sub(r"\$\w+", ".*", filled))
