"""How long blocks live and why prompts miss, under GET /metrics, from an engine that follows them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

import torch

from blockyard.metrics.families import RESIDENCY
from blockyard_engine import Engine
from blockyard_serve.jobs import metrics_page
from blockyard_serve.jobs.engine_reading import EngineReading
from blockyard_testing.hybrid_models import hybrid_model
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine
from blockyard_testing.tiny_models import NUM_TOKENS, byte_tokenizer

from .test_serving_failures import Paced, fragile_engine

PROMPTS = [f"{number} is a number that says nothing of what a block is worth to others. " for number in range(12)]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    engine = tiny_engine(24, max_num_seqs=2, cache_options={"track_misses": True, "residency_sample": 1})
    with running_server(engine) as running:
        yield running


def page_of(running: Running) -> str:
    status, _, page = running.call("GET", "/metrics")
    assert status == 200
    return page.decode()


def test_metrics_have_lifetimes_of_blocks_and_causes_of_misses(served: Running) -> None:
    for prompt in [*PROMPTS, *PROMPTS[:3]]:
        served.client().completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    served.client().completions.create(model=MODEL, prompt=PROMPTS[2], max_tokens=2)
    served.require_idle()
    page, figures = page_of(served), served.figures()
    evicted = figures["blockyard:kv_blocks_evicted_total"]
    assert evicted > 0
    for name in (each.name for each in RESIDENCY):
        assert f"# TYPE {name} histogram" in page
        buckets = re.findall(
            rf'^{name}_bucket{{engine="0",le="([^"]+)",model_name="{MODEL}"}} (\S+)$', page, re.MULTILINE
        )
        counts = [float(count) for _, count in buckets]
        assert counts == sorted(counts)
        assert buckets[-1][0] == "+Inf"
        assert counts[-1] == figures[f"{name}_count"]
    assert figures["vllm:kv_block_lifetime_seconds_count"] == evicted
    assert figures["vllm:kv_block_idle_before_evict_seconds_count"] == evicted
    assert 0 < figures["vllm:kv_block_lifetime_seconds_sum"] < 600 * evicted
    assert figures["vllm:kv_block_reuse_gap_seconds_count"] > 0
    missed = {
        cause: float(value)
        for cause, value in re.findall(r'^blockyard:missed_tokens_total{cause="(\w+)",.*} (\S+)$', page, re.MULTILINE)
    }
    assert set(missed) == {"tail", "never_seen", "evicted", "other_keys", "recomputed", "no_state"}
    assert missed["evicted"] > 0
    assert missed["never_seen"] > 0
    not_hit = figures["vllm:prefix_cache_queries_total"] - figures["vllm:prefix_cache_hits_total"]
    assert sum(missed.values()) - missed["recomputed"] == not_hit


def test_a_hybrid_model_is_served_and_a_miss_for_want_of_a_state_is_a_cause() -> None:
    model = hybrid_model("lfm2", vocab_size=NUM_TOKENS)
    engine = Engine(model, byte_tokenizer(), num_blocks=400, max_num_seqs=2, cache_options={"track_misses": True})
    beginning = "what both begin with, in blocks of sixteen " * 2
    with running_server(engine) as running:
        client = running.client()
        first, other, again = [
            client.completions.create(model=MODEL, prompt=beginning + end, max_tokens=4, temperature=0)
            for end in ("and one goes on", "while the other does not", "and one goes on")
        ]
        running.require_idle()
        missed = {
            cause: float(value)
            for cause, value in re.findall(
                r'^blockyard:missed_tokens_total{cause="(\w+)",.*} (\S+)$', page_of(running), re.M
            )
        }
    assert first.choices[0].text == again.choices[0].text
    assert first.choices[0].text != other.choices[0].text
    # No state stood where the second prompt left the first; of the third one did at its end.
    assert missed["no_state"] == len(beginning) // 16 * 16


def test_refusals_are_exported_from_0(served: Running) -> None:
    """An alert on a rate notices the first refusal only if there was a sample before it."""
    status, _, page = served.call("GET", "/metrics")
    assert status == 200
    for reason in ("queue_full", "not_serving"):
        assert re.search(rf'^blockyard:requests_refused_total{{[^}}]*reason="{reason}"}} 0\.0$', page.decode(), re.M)


def test_metrics_of_disabled_features_are_absent() -> None:
    with running_server(tiny_engine()) as running:
        page = page_of(running)
    assert "kv_block_lifetime" not in page
    assert "missed_tokens" not in page


def test_a_scrape_during_a_long_step_shows_the_reading_before() -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def waits(tokens: torch.Tensor) -> bool:
        has_begun.set()
        may_go_on.wait(60)
        return False

    with running_server(fragile_engine(waits)) as running, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.post, "/v1/completions", prompt="slow", max_tokens=1)
        assert has_begun.wait(60)
        assert running.figures()["vllm:prefix_cache_queries_total"] == 0
        assert not answer.done()
        may_go_on.set()
        assert answer.result(60)[0] == 200
        assert running.figures()["vllm:prefix_cache_queries_total"] == 4


def test_scrapes_share_a_reading_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading delays the engine's next step: eight scrapers used to make short answers take seven times as long."""
    readings = []
    read = EngineReading.of.__func__  # type: ignore[attr-defined]

    def noted(kind: type[EngineReading], *arguments: Any) -> Any:
        readings.append(arguments)
        return read(kind, *arguments)

    monkeypatch.setattr(EngineReading, "of", classmethod(noted))
    monkeypatch.setattr(metrics_page, "SHARE_SECONDS", 3600.0)
    paced = Paced()
    with running_server(fragile_engine(paced)) as running, ThreadPoolExecutor(8) as pool:
        stream = running.client().completions.create(model=MODEL, prompt="a", max_tokens=60, stream=True)
        next(iter(stream))
        page_of(running)
        before = len(readings)
        pages = set(pool.map(lambda _: page_of(running), range(40)))
        assert len(readings) == before
        assert len(pages) == 1
        assert f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 1.0' in pages.pop()
        paced.may_go_on.set()
        stream.close()
        running.require_idle()
        assert running.figures()["vllm:num_requests_running"] == 0  # without requests each scrape reads anew


def test_a_server_whose_engine_has_ended_still_shows_its_metrics() -> None:
    with running_server(tiny_engine()) as running:
        running.client().completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=2)
        assert running.server.app.state.engine_thread.stop(60)
        assert running.figures()["vllm:prefix_cache_queries_total"] == len(PROMPTS[0])
