"""Fleets that grow with their load, and fleets behind several ingresses: their counts, and the page over all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("zmq")

import asyncio
import json
import pickle
from collections.abc import Callable

import numpy as np

from blockyard.errors import InvalidArgument
from blockyard_engine import Completion, FinishReason, GenerationResult, SamplingParams
from blockyard_serve import ApiError
from blockyard_serve.fleet.app import FleetEngines
from blockyard_serve.fleet.dispatcher import TraceHeaders
from blockyard_serve.fleet.fleet_metrics import FleetMetrics, fleet_state, merge_states
from blockyard_serve.fleet.replica import Replica
from blockyard_serve.fleet.replica_request import ReplicaRequest
from blockyard_serve.fleet.shared import SharedFleet, shared_fleet
from blockyard_serve.fleet.token_load import TOKEN_LOAD, TokenLoad
from blockyard_serve.http.routes import RetainRequest
from blockyard_serve.jobs.planner import session_name
from blockyard_serve.openai.session_hints import parse_hints
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.servers import tiny_engine


def context(loads: list[float] | None, target: int = 2) -> Any:
    metrics = None if loads is None else {TOKEN_LOAD: dict(enumerate(loads))}
    return SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)


def test_number_of_replicas_keeps_each_at_the_target_load() -> None:
    wants = TokenLoad(0.5)
    assert wants(context([0.5, 0.5])) == (2.0, {})
    assert wants(context([2.0, 0.5]))[0] == 5.0
    assert wants(context([0.0, 0.0]))[0] == 0.0
    assert wants(context(None, 3)) == wants(context([], 3)) == (3, {})
    for target in (0, -1, float("nan"), "x"):
        with pytest.raises(InvalidArgument, match="target"):
            TokenLoad(target)  # type: ignore[arg-type]


def test_a_replica_counts_the_tokens_of_its_requests_until_they_end() -> None:
    async def play() -> None:
        engine = tiny_engine(50)
        replica, pool = Replica(engine, 8, "tiny"), 50 * engine.cache.block_size
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        first, second = (ReplicaRequest(np.arange(20, dtype=np.int32), 20, 40, sampling) for _ in range(2))
        one, two = replica.generate(first), replica.generate(second)
        await anext(one)
        assert replica.token_load == 60 / pool
        await anext(two)
        assert replica.token_load == 120 / pool
        async for _ in one:
            pass
        assert replica.token_load == 60 / pool
        await two.aclose()  # type: ignore[attr-defined]
        assert replica.token_load == 0
        assert replica.thread.stop(PATIENCE_SECONDS)

    asyncio.run(play())


def test_cost_is_fixed_once_there_are_replicas() -> None:
    name = "tests#named-later"
    early = shared_fleet(name)
    assert shared_fleet(name, "round-robin", 5.0) is early
    early.sync({"a": None, "b": None})
    assert {early.choose(f"r{number}", [1], ["a", "b"]).replica for number in range(2)} == {"a", "b"}
    assert shared_fleet(name) is shared_fleet(name, "round-robin") is shared_fleet(name, heartbeat_timeout=5.0) is early
    for cost, silence in (("robust", None), (None, 3.0), ("no such", None), (None, 0.0)):
        with pytest.raises(InvalidArgument):
            shared_fleet(name, cost, silence)
    assert early.fleet.router.replicas == ["a", "b"]
    with pytest.raises(InvalidArgument, match="no such"):
        shared_fleet("tests#never", "no such")
    with pytest.raises(InvalidArgument, match="heartbeat_timeout"):
        shared_fleet("tests#never", heartbeat_timeout=0.0)


def state_of(fleet: SharedFleet, replica: str, hits: int) -> dict[str, Any]:
    figures = FleetMetrics()
    figures.choices.append((replica, fleet.choose(f"to {replica}", list(range(200)), [replica], max_tokens=10)))
    figures.count_claim(replica, hits, GenerationResult(1, [Completion(0, "", [1], FinishReason.LENGTH)], 200, 160, 0))
    figures.count_loss(replica)
    figures.count_resume(5)
    return fleet_state(fleet, figures, "tiny")


def test_views_of_ingresses_are_merged() -> None:
    one, two = SharedFleet("robust", 3.0), SharedFleet("robust", 3.0)
    one.sync({"a": None, "b": None})
    two.sync({"b": None, "c": None})
    states = [state_of(one, "b", 160), state_of(two, "b", 176)]
    assert merge_states(states[:1]) == {**states[0], "ingresses": 1}
    both = merge_states(states)
    assert {each["name"]: each["requests"] for each in both["replicas"]} == {"a": 0, "b": 2, "c": 0}
    (shared,) = [each for each in both["replicas"] if each["name"] == "b"]
    assert (shared["held"], shared["lost"], shared["trust"], shared["silence"]) == (420, 2, "none", None)
    assert both["claims"]["b"] == {"requests": 2, "exact": 1, "claimed": 336, "true": 320, "over": 16, "under": 0}
    assert (both["lost_attempts"], both["resumed_requests"], both["resumed_tokens"]) == (2, 2, 10)
    assert len(both["choices"]) == 2


def test_merged_trust_is_the_least() -> None:
    def knows(trust: str, silence: float) -> dict[str, Any]:
        fleet = SharedFleet("robust", 3.0)
        fleet.sync({"a": None})
        state = fleet_state(fleet, FleetMetrics(), "tiny")
        state["replicas"][0] |= {"trust": trust, "silence": silence, "is_believed": trust == "live"}
        return state

    for states in ([knows("live", 1.0), knows("catching_up", 2.0)], [knows("catching_up", 2.0), knows("live", 1.0)]):
        (replica,) = merge_states(states)["replicas"]
        assert (replica["trust"], replica["silence"], replica["is_believed"]) == ("catching_up", 2.0, False)


class Two:
    """Two engines in this process, asked as a fleet's are: calls and answers are carried to another process."""

    def __init__(self, **options: Any) -> None:
        self.replicas = [Replica(tiny_engine(50, **options), 8, "tiny") for _ in range(2)]

    async def ask(self, call: Callable[[Any], Any]) -> list[Any]:
        told = [await replica.call(pickle.loads(pickle.dumps(call))) for replica in self.replicas]
        return list(pickle.loads(pickle.dumps(told)))

    async def run(self, which: int, **more: Any) -> None:
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        ask = ReplicaRequest(np.arange(100, dtype=np.int32), 100, 2, sampling, **more)
        async for _ in self.replicas[which].generate(ask):
            pass

    def close(self) -> None:
        for replica in self.replicas:
            assert replica.thread.stop(PATIENCE_SECONDS)


def test_a_hint_reaches_the_engine_that_has_the_session() -> None:
    async def play(two: Two) -> None:
        await two.run(1, session=session_name("mine", None))
        said = parse_hints(
            json.dumps({"hints": [{"session_id": name, "action": "over"} for name in ("mine", "no")]}).encode()
        )
        assert await FleetEngines(two.ask).hint(said) == ["accepted", "unknown"]

    two = Two()
    asyncio.run(play(two))
    two.close()


def test_each_engine_retains_its_own_blocks() -> None:
    async def play(two: Two) -> None:
        client = FleetEngines(two.ask)
        request = RetainRequest(list(range(100)), (), 1, None)
        assert await client.retain_prompt(request) == (0, 0)
        await two.run(1)
        assert await client.retain_prompt(request) == (0, 6)
        assert await client.retain_prompt(request) == (6, 6)
        assert await client.retain_prompt(RetainRequest(list(range(100)), (), 0, None)) == (6, 6)
        assert await client.retain_prompt(request) == (0, 6)

    two = Two(cache_options={"retention_blocks": 8})
    asyncio.run(play(two))
    two.close()


def test_error_of_all_engines_reaches_the_client() -> None:
    async def nobody(call: Callable[[Any], Any]) -> list[Any]:
        return []

    async def play(two: Two) -> None:
        request = RetainRequest(list(range(100)), (), 1, None)
        with pytest.raises(ApiError, match="--retention-blocks") as found:
            await FleetEngines(two.ask).retain_prompt(request)
        assert found.value.status == 400
        with pytest.raises(ApiError, match="no replica is ready"):
            await FleetEngines(nobody).retain_prompt(request)

    two = Two()
    asyncio.run(play(two))
    two.close()


def test_an_error_for_a_client_is_the_same_in_another_process() -> None:
    error = ApiError(409, "no", "conflict", code="c", param="p", retry_after=3, close=True)
    there = pickle.loads(pickle.dumps(error))
    assert (there.body(), there.headers(), there.status) == (error.body(), error.headers(), 409)


def test_trace_context_reaches_the_replica() -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    simple = pytest.importorskip("opentelemetry.sdk.trace.export")
    exporter, provider = export.InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(simple.SimpleSpanProcessor(exporter))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def play() -> None:
        replica = Replica(tiny_engine(50), 8, "tiny", provider.get_tracer("test"))
        headers = TraceHeaders().context_of({"traceparent": parent, "authorization": "secret"})
        assert headers == {"traceparent": parent}
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        ask = ReplicaRequest(np.arange(40, dtype=np.int32), 40, 3, sampling, name="mine", trace=headers)
        async for _ in replica.generate(pickle.loads(pickle.dumps(ask))):
            pass
        assert replica.thread.stop(PATIENCE_SECONDS)

    asyncio.run(play())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    root = spans["llm_request"]
    assert f"{root.parent.trace_id:032x}-{root.parent.span_id:016x}" == parent[3:-3]
    assert root.attributes["gen_ai.request.id"] == "mine"
