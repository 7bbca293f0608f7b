"""Spans of requests: their times, what the cache did for them, who asked, and how they ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")
pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer

from blockyard import InvalidArgument
from blockyard.answers import MissCauses
from blockyard_engine import SamplingParams
from blockyard_serve.jobs.tracing import RequestTracer, missed_tokens
from blockyard_serve.otlp import otlp_tracer
from blockyard_testing.servers import MODEL, running_server, tiny_engine

from ..support.engine_jobs import run_jobs
from .test_serving_failures import Paced, fragile_engine

PROMPT = list(range(40))
SECOND = 10**9


class Kept(InMemorySpanExporter):
    """What was exported, and the tracer that leads to it."""

    def __init__(self) -> None:
        super().__init__()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self))
        self.tracer: Tracer = provider.get_tracer("tests")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.name == name]


@pytest.fixture
def kept() -> Kept:
    return Kept()


def serve(kept: Kept, *prompts: list[int], **options: Any) -> None:
    """One prompt after the other, three tokens each, a second a step."""
    engine = tiny_engine(max_num_seqs=1, **options)
    tracer = RequestTracer(kept.tracer, engine.cache.block_size, MODEL)
    run_jobs(engine, prompts, SamplingParams(max_tokens=3, ignore_eos=True), tracer=tracer)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / SECOND, 3)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_the_phases_of_a_request_follow_one_another(kept: Kept) -> None:
    serve(kept, PROMPT, PROMPT[::-1])
    roots = kept.named("llm_request")
    assert [seconds(span) for span in roots] == [3, 6]
    for root, queue in zip(roots, (0, 3), strict=True):
        children = [
            span for span in kept.get_finished_spans() if span.parent and span.parent.span_id == root.context.span_id
        ]
        assert [(span.name, seconds(span)) for span in children] == [("queue", queue), ("prefill", 1), ("decode", 2)]
        assert children[0].start_time == root.start_time
        assert [span.end_time for span in children[:2]] == [span.start_time for span in children[1:]]
        assert children[2].end_time == root.end_time
        assert root.status.status_code is StatusCode.UNSET
    found = attributes(roots[1])
    assert found["gen_ai.usage.prompt_tokens"] == 40
    assert found["gen_ai.usage.completion_tokens"] == 3
    assert found["gen_ai.latency.time_in_queue"] == 3
    assert found["gen_ai.latency.time_to_first_token"] == 4
    assert found["gen_ai.latency.e2e"] == 6
    assert found["gen_ai.response.model"] == MODEL


def test_span_has_blocks_hit_and_missed(kept: Kept) -> None:
    """Two of two full blocks missed, then hit; the rest of the prompt is no block."""
    serve(kept, PROMPT, PROMPT, cache_options={"track_misses": True})
    first, second = (attributes(span) for span in kept.named("prefill"))
    assert first == {
        "kv_cache.blocks_hit": 0,
        "kv_cache.blocks_missed": 2,
        "kv_cache.tier_hit": "none",
        "kv_cache.missed_tokens.never_seen": 32,
        "kv_cache.miss_cause": "never_seen",
    }
    assert second["kv_cache.blocks_hit"] == 2
    assert second["kv_cache.blocks_missed"] == 0
    assert second["kv_cache.tier_hit"] == "gpu"
    assert second["kv_cache.miss_cause"] == "tail"


def test_without_the_log_of_misses_no_cause_is_named(kept: Kept) -> None:
    serve(kept, PROMPT)
    assert set(attributes(kept.named("prefill")[0])) == {
        "kv_cache.blocks_hit",
        "kv_cache.blocks_missed",
        "kv_cache.tier_hit",
    }


def test_hits_in_the_cpu_pool_are_named(kept: Kept) -> None:
    others = [[*range(first, first + 40)] for first in (50, 100, 150)]
    serve(kept, PROMPT, *others, PROMPT, num_blocks=7, num_cpu_blocks=40)
    assert attributes(kept.named("prefill")[-1])["kv_cache.tier_hit"] in ("cpu", "gpu+cpu")


def test_most_frequent_cause_is_named() -> None:
    misses = MissCauses(
        num_hit=16, num_tail=9, num_never_seen=16, num_evicted=32, num_other_keys=0, num_recomputed=0, evicted_ago=1
    )
    assert missed_tokens(misses) == {"evicted": 32, "other_keys": 0, "never_seen": 16, "recomputed": 0, "no_state": 0}


def test_spans_have_the_callers_span_as_parent_and_contain_no_salt(kept: Kept) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with running_server(tiny_engine(), tracer=kept.tracer) as running:
        body = b'{"model": "tiny", "prompt": "words nobody should see", "max_tokens": 2, "cache_salt": "secret"}'
        headers = {"traceparent": parent, "X-Request-ID": "mine"}
        assert running.call("POST", "/v1/completions", body, headers)[0] == 200
    [root] = kept.named("llm_request")
    assert format(root.context.trace_id, "032x") == parent[3:35]
    assert root.parent is not None
    assert format(root.parent.span_id, "016x") == parent[36:52]
    assert attributes(root)["gen_ai.request.id"] == "mine"
    shown = "".join(span.to_json() for span in kept.get_finished_spans())
    assert "secret" not in shown
    assert "nobody" not in shown


def test_span_of_a_failed_request_has_the_error(kept: Kept) -> None:
    engine = tiny_engine()
    engine.step = _raising  # type: ignore[method-assign]
    with running_server(engine, tracer=kept.tracer) as running:
        assert running.post("/v1/completions", prompt="x", max_tokens=2)[0] == 500
    [root] = kept.named("llm_request")
    assert root.status.status_code is StatusCode.ERROR
    assert [span.name for span in kept.get_finished_spans()] == ["queue", "llm_request"]


def _raising(**options: Any) -> Any:
    raise RuntimeError("no step today")


def test_a_request_whose_client_left_has_the_phases_that_it_reached(kept: Kept) -> None:
    with running_server(fragile_engine(Paced()), tracer=kept.tracer) as running:
        answer = running.client().completions.create(
            model=MODEL, prompt="a long one", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(answer))
        answer.close()
        running.require_idle()
    [root] = kept.named("llm_request")
    assert root.status.status_code is StatusCode.ERROR
    assert 0 < attributes(root)["gen_ai.usage.completion_tokens"] < 500
    assert [span.name for span in kept.get_finished_spans()] == ["queue", "prefill", "decode", "llm_request"]


def test_a_tracer_that_raises_costs_its_spans_and_no_answer() -> None:
    class Broken:
        def start_span(self, *arguments: object, **options: object) -> None:
            raise RuntimeError("no span today")

    with running_server(tiny_engine(), tracer=Broken()) as running:
        assert running.post("/v1/completions", prompt="x", max_tokens=2)[0] == 200
        assert running.post("/v1/completions", prompt="y", max_tokens=2)[0] == 200


# ---------------------------------------------------------------- by OTLP


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An address, and what was posted to it."""
    posted: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *parts: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", posted
    server.shutdown()
    server.server_close()
    thread.join(60)


def test_spans_arrive_at_a_collector(collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    endpoint, posted = collector
    tracer = otlp_tracer(endpoint)
    run_jobs(tiny_engine(), [PROMPT], SamplingParams(max_tokens=2), tracer=RequestTracer(tracer, 16, MODEL))
    tracer.span_processor.force_flush(60_000)  # type: ignore[attr-defined]
    assert [path for path, _ in posted] == ["/v1/traces"]
    assert all(name in posted[0][1] for name in (b"llm_request", b"queue", b"prefill", b"decode", b"blockyard"))


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "ftp://host/x", "http://"])
def test_invalid_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="otlp_traces_endpoint is"):
        otlp_tracer(endpoint)
