"""Every panel of vLLM's dashboards, and of ours, has its series under GET /metrics, from a server at work."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard_engine import PromptLookup
from blockyard_testing.places import ROOT
from blockyard_testing.prometheus import check_metrics
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

from ..support.vllm_panels import ABSENT, CACHE, INSTANCES, OVERVIEW, PERFORMANCE, SERVICE

WHOSE = ("engine=", "model_name=", "le=", "handler=")
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The page of a server that has answered: hits, evictions, several completions, guessed tokens."""
    options = {"track_misses": True, "residency_sample": 1}
    engine = tiny_engine(40, max_num_seqs=4, cache_options=options, speculation=PromptLookup(), num_cpu_blocks=60)
    with running_server(engine) as running:
        ask(running)
        _, _, text = running.call("GET", "/metrics")
        yield text.decode()


def ask(running: Running) -> None:
    """Prompts that fill the pool, some twice."""
    prompts = [f"{number} bottles of beer on the wall, {number} bottles of beer. " * 2 for number in range(12)]
    for prompt in [*prompts, prompts[-1], prompts[0]]:
        running.client().completions.create(model=MODEL, prompt=prompt, max_tokens=12, n=2, temperature=0)
    running.require_idle()


def series(page: str) -> dict[str, float]:
    """Samples by name, and by name and one label of their own."""
    found = {}
    for name, labels, value in SAMPLE.findall(page):
        own = [each for each in labels.split(",") if each and not each.startswith(WHOSE)]
        found[f"{name}{{{own[0]}}}" if len(own) == 1 else name] = float(value)
    return found


BOARDS = (
    ("performance", PERFORMANCE),
    ("cache", CACHE),
    ("service", SERVICE),
    ("overview", OVERVIEW),
    ("instances", INSTANCES),
)
PANELS = [(f"{board}: {panel}", name) for board, panels in BOARDS for panel, names in panels.items() for name in names]


@pytest.mark.parametrize(("panel", "name"), PANELS, ids=[f"{panel}-{name}" for panel, name in PANELS])
def test_a_panel_of_vllms_dashboards_has_data(page: str, panel: str, name: str) -> None:
    found = series(page)
    if name == "vllm:request_success_total":
        assert found['vllm:request_success_total{finished_reason="length"}'] == 28
    elif name in found:
        assert found[name] >= 0
    else:
        assert found[f"{name}_count"] > 0, panel
        assert found[f"{name}_sum"] > 0, panel


def test_dashboards_show_the_load(page: str) -> None:
    found = series(page)
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_hits", "spec_decode_num_drafts"):
        assert found[f"vllm:{name}_total"] > 0
    drafted, accepted = (found[f"vllm:spec_decode_num_{each}_tokens_total"] for each in ("draft", "accepted"))
    assert drafted >= accepted > 0
    assert found["vllm:request_params_n_sum"] == 28
    assert found["blockyard:kv_blocks_evicted_total"] > 0
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    device, host = (found[f'{by_source}{{source="{each}"}}'] for each in ("device", "host"))
    assert device > 0
    assert host > 0
    assert device + host == found["vllm:prefix_cache_hits_total"]


def test_panels_of_absent_features_are_empty(page: str) -> None:
    assert [name for name in series(page) if name.startswith(ABSENT)] == []


def test_the_page_is_well_formed(page: str) -> None:
    assert "_created" not in page
    of_engines = [line for line in page.splitlines() if not line.startswith(("#", "process_", "http_"))]
    assert all('engine="0"' in line for line in of_engines)
    names = re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert len(names) == len(set(names)) > 50
    check_metrics(page)


def test_the_docs_say_how_many_panels_have_data() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().split("## vLLM's dashboards")[1]
    assert [int(each) for each in re.findall(r"^\|.*\.json`\) \| (\d+) \|$", page, re.MULTILINE)] == [
        len(panels) for _, panels in BOARDS
    ]


def test_requests_are_counted_by_route_and_status() -> None:
    with running_server(tiny_engine(40)) as running:
        running.client().completions.create(model=MODEL, prompt="Hello", max_tokens=2)
        assert running.call("POST", "/v1/completions", b"{")[0] == 400
        for path in ("/nowhere", "/no/" + "x" * 300, "/health", "/metrics"):
            running.call("GET", path)
        assert running.call("BREW", "/v1/completions")[0] == 405
        _, _, page = running.call("GET", "/metrics")
    lines = [line for line in page.decode().splitlines() if line.startswith("http_requests_total")]
    assert sorted(lines) == [
        'http_requests_total{handler="/v1/completions",method="OTHER",status="4xx"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0',
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0',
        'http_requests_total{handler="none",method="GET",status="4xx"} 2.0',
    ]
    assert 'http_request_duration_seconds_count{handler="/v1/completions"} 3.0' in page.decode()
