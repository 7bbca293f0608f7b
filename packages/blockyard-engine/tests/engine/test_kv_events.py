"""An engine that publishes its cache's contents, and a consumer that follows it over real sockets."""

from __future__ import annotations

import argparse
import contextlib
import socket
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("zmq")
pytest.importorskip("xxhash")

from blockyard import InvalidArgument
from blockyard.events import Mirror, PublisherError, Subscriber, Trust
from blockyard_engine import Engine, ModelError, SamplingParams
from blockyard_engine.cli.model_loading import _kv_events
from blockyard_testing.hybrid_models import hybrid_model
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.tiny_models import mixed_prompts, tiny_model
from blockyard_tiers import FileTier

ENDPOINTS = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", "heartbeat": 0.05}


@pytest.mark.parametrize(("num_blocks", "num_cpu_blocks", "has_states"), [(30, 0, 0), (30, 40, 0), (400, 0, 1)])
def test_a_consumer_of_events_has_the_contents_of_the_cache(
    num_blocks: int, num_cpu_blocks: int, has_states: bool
) -> None:
    prompts = mixed_prompts((30, 45, 61, 17), shared=16)
    model = hybrid_model("lfm2") if has_states else tiny_model("llama-gqa")
    engine = Engine(model, num_blocks=num_blocks, block_size=4, num_cpu_blocks=num_cpu_blocks, kv_events=ENDPOINTS)
    assert engine.kv_events is not None
    mirror = Mirror()
    try:
        with Subscriber(mirror) as subscriber:
            subscriber.follow("engine", engine.kv_events.endpoint, engine.kv_events.replay_endpoint)
            engine.generate(prompts, SamplingParams(max_tokens=5))
            expected = [engine.cache.num_cached_tokens([*prompt, 0]) // 4 * 4 for prompt in prompts]
            assert min(expected) > 0

            def found() -> list[int]:
                matches = [mirror.match(prompt).get("engine") for prompt in prompts]
                return [match.num_tokens if match else 0 for match in matches]

            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (found() == expected and mirror.trust("engine") is Trust.LIVE) and time.monotonic() < deadline:
                subscriber.poll(0.05)
            assert found() == expected
            assert mirror.trust("engine") is Trust.LIVE
    finally:
        engine.close()


@pytest.mark.parametrize("in_use", ["endpoint", "replay_endpoint"])
def test_a_port_in_use_is_reported_before_the_model_is_loaded(in_use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard_engine.engine.load_model", lambda *_: pytest.fail("the model is loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        options = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", in_use: taken}
        with pytest.raises(
            PublisherError, match=rf"^{in_use} is '{taken}'; it cannot be bound: Address already in use"
        ):
            Engine.from_pretrained("no model", kv_events=options)
        if in_use == "endpoint":
            with pytest.raises(PublisherError, match="Address already in use"):
                Engine.from_pretrained("no model", kv_events=taken)


def test_endpoints_checked_before_the_load_can_be_bound_after_it() -> None:
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
        options = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": "tcp://127.0.0.1:*"}
        with pytest.raises(ModelError):
            Engine.from_pretrained("no model", kv_events=options)
        engine = Engine(tiny_model("llama-gqa"), num_blocks=30, kv_events=options)
        assert engine.kv_events is not None
        assert engine.kv_events.endpoint == options["endpoint"]
        engine.close()


def test_bad_options_are_named() -> None:
    model = tiny_model("llama-gqa")
    with pytest.raises(InvalidArgument, match="kv_events is 7; it must be an endpoint or a dict"):
        Engine(model, num_blocks=30, kv_events=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="unexpected keyword argument 'port'"):
        Engine(model, num_blocks=30, kv_events={"port": 1})
    with pytest.raises(InvalidArgument, match="endpoint is 'nowhere'; it must begin with tcp://"):
        Engine(model, num_blocks=30, kv_events="nowhere")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:70000", "tcp://h:-1"])
def test_an_endpoint_without_a_port_is_one_sentence_that_names_the_option(endpoint: str) -> None:
    expected = f"is {endpoint!r}; it must end with a port from 0 to 65535, as tcp://127.0.0.1:5557 does"
    with pytest.raises(InvalidArgument) as told:
        Engine.from_pretrained("no model", kv_events=endpoint)
    assert str(told.value) == f"endpoint {expected}"
    with pytest.raises(InvalidArgument) as told:
        _kv_events(argparse.Namespace(kv_events=endpoint, kv_events_topic=""))
    assert str(told.value) == f"--kv-events {expected}"


def router_of(engine: Engine) -> tuple[Mirror, Subscriber]:
    assert engine.kv_events is not None
    mirror = Mirror()
    subscriber = Subscriber(mirror)
    subscriber.follow("engine", engine.kv_events.endpoint, engine.kv_events.replay_endpoint)
    return mirror, subscriber


def believed(mirror: Mirror, subscriber: Subscriber, prompt: list[int], wanted: int) -> int:
    """Return the tokens of a prompt that the router trusts, once they are `wanted`."""

    def found() -> int:
        match = mirror.match(prompt).get("engine")
        return match.num_tokens if match else 0

    deadline = time.monotonic() + PATIENCE_SECONDS
    while found() != wanted and time.monotonic() < deadline:
        subscriber.poll(0.02)
    return found()


@pytest.mark.parametrize("change", ["reset", "resize"])
def test_an_idle_engine_publishes_evictions(change: str) -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=30, block_size=4, kv_events=ENDPOINTS)
    mirror, subscriber = router_of(engine)
    with contextlib.closing(engine), subscriber:
        prompt = list(range(1, 62))
        engine.generate([prompt], SamplingParams(max_tokens=1))
        assert believed(mirror, subscriber, prompt, 60) == 60
        if change == "reset":
            engine.cache.reset_prefix_cache()
        else:
            engine.cache.resize(5)
        left = engine.cache.num_cached_tokens(prompt)
        assert left < 60
        assert believed(mirror, subscriber, prompt, left) == left


def test_an_idle_engine_publishes_blocks_of_a_snapshot(tmp_path: Path) -> None:
    prompt = list(range(1, 62))
    for is_second in (False, True):
        tiers = [FileTier(tmp_path / "tier", 2**30)]
        engine = Engine(tiny_model("llama-gqa"), num_blocks=30, block_size=4, kv_events=ENDPOINTS, tiers=tiers)
        mirror, subscriber = router_of(engine)
        with contextlib.closing(engine), subscriber:
            assert engine.offload is not None
            if is_second:
                assert engine.offload.restore(tmp_path / "warm", PATIENCE_SECONDS) == 60
                assert believed(mirror, subscriber, prompt, 60) == 60
            else:
                engine.generate([prompt], SamplingParams(max_tokens=1))
                assert engine.offload.snapshot(tmp_path / "warm", PATIENCE_SECONDS).error == ""


def test_a_beam_search_and_a_preempted_request_are_published() -> None:
    options = {"num_cpu_blocks": 40, "preemption": "swap"}
    engine = Engine(tiny_model("llama-gqa"), num_blocks=40, block_size=4, kv_events=ENDPOINTS, **options)  # type: ignore[arg-type]
    mirror, subscriber = router_of(engine)
    with contextlib.closing(engine), subscriber:
        prompt = list(range(1, 42))
        engine.beam_search(prompt, 2, 3)
        assert engine.cache.num_cached_tokens(prompt) == 40
        assert believed(mirror, subscriber, prompt, 40) == 40
        other = list(range(80, 121))
        engine.add_request(other, SamplingParams(max_tokens=5))
        engine.step()
        engine.preempt_all()
        engine.abort_all()
        kept = engine.cache.num_cached_tokens(other)
        assert believed(mirror, subscriber, other, kept) == kept
        engine.cache.reset_prefix_cache()
        assert believed(mirror, subscriber, prompt, 0) == 0
