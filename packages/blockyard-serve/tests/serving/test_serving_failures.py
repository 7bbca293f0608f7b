"""Failures while the server works: a model that raises, clients that vanish, timeouts, and shutdown."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
import torch
from uvicorn.protocols.http.h11_impl import H11Protocol

from blockyard_engine import Engine, SamplingParams
from blockyard_serve import ServerLimits
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine
from blockyard_testing.tiny_models import NUM_TOKENS, byte_tokenizer, tiny_model

FIRE = RuntimeError("the device is on fire, at /secret/path.py")


def fragile_engine(raises: Callable[[torch.Tensor], bool], error: BaseException = FIRE, **options: Any) -> Engine:
    """An engine whose model raises in every forward pass over tokens of which `raises` is true."""
    model = tiny_model("llama-gqa", vocab_size=NUM_TOKENS)
    engine = Engine(model, byte_tokenizer(), num_blocks=200, max_num_seqs=8, **options)

    def hook(module: Any, arguments: tuple[torch.Tensor]) -> None:
        if raises(arguments[0]):
            raise error

    model.get_input_embeddings().register_forward_pre_hook(hook)
    return engine


class Paced:
    """For `fragile_engine`: behind the fifth step each takes a tenth of a second, until `may_go_on` is set.

    A long answer then lasts for most of a minute, so that what happens during it happens during it.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.may_go_on = threading.Event()

    def __call__(self, tokens: torch.Tensor) -> bool:
        self.num_steps += 1
        if self.num_steps > 5:
            self.may_go_on.wait(0.1)
        return False


def unused_token(prompts: list[list[int]], **sampling: Any) -> int:
    """A token that stands in none of the prompts and their completions: one that can make the model raise."""
    results = tiny_engine().generate(prompts, SamplingParams(**sampling))
    used = {token for result in results for each in result.completions for token in each.token_ids}
    return min(set(range(256)) - used.union(*prompts))


def stream_text(running: Running, prompt: Any, num_tokens: int, **fields: Any) -> str:
    """The text of a stream; raises what the client raises."""
    chunks = running.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True, **fields
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


def send_request(client: socket.socket, **fields: Any) -> None:
    """Send a request by hand."""
    body = json.dumps({"model": MODEL, "temperature": 0, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)


def raw_request(running: Running, **fields: Any) -> socket.socket:
    """A connection that has sent a request and read nothing."""
    client = socket.create_connection((running.host, running.port), timeout=PATIENCE_SECONDS)
    send_request(client, **fields)
    return client


# ---------------------------------------------------------------- a model that raises


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}], ids=["whole", "chunked"])
def test_only_the_request_that_fails_alone_gets_the_error(options: dict[str, Any]) -> None:
    prompts = [[number, 2, 3, 4 + number] for number in range(5)]
    alone = tiny_engine()
    with running_server(alone) as calm:
        wanted = [stream_text(calm, prompt, 60) for prompt in prompts]
    poison = unused_token(prompts, max_tokens=60)
    engine = fragile_engine(lambda tokens: bool((tokens == poison).any()), **options)
    with running_server(engine) as running, ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream_text, running, prompt, 60) for prompt in prompts]
        wait_until(lambda: running.figures()["vllm:generation_tokens_total"] > 5)
        with pytest.raises(openai.InternalServerError) as caught:
            running.client().completions.create(model=MODEL, prompt=[9] * 40 + [poison], max_tokens=5, n=2)
        assert "fire" not in str(caught.value)
        assert "secret" not in str(caught.value)
        assert [stream.result(PATIENCE_SECONDS) for stream in streams] == wanted  # nothing is lost or said twice
        figures = running.figures()
        assert figures["blockyard:failed_steps_total"] == figures["blockyard:requests_failed_total"] == 1
        running.require_idle()
        assert stream_text(running, prompts[0], 60) == wanted[0]
        running.require_idle()


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    calls, has_begun = [], threading.Event()

    def raises(tokens: torch.Tensor) -> bool:
        calls.append(tokens.numel())
        return len(calls) > 5 and has_begun.wait(PATIENCE_SECONDS)

    def text_of(chunk: openai.types.Completion) -> str:
        has_begun.set()
        return chunk.choices[0].text

    with running_server(fragile_engine(raises)) as running:
        texts = []
        stream = running.client().completions.create(model=MODEL, prompt=[1, 2], max_tokens=50, stream=True)
        with pytest.raises(openai.APIError, match="server failed"):
            texts.extend(map(text_of, stream))
        assert texts
        running.require_idle()


def test_requests_that_fail_only_together_all_complete() -> None:
    """As if memory were too short for three sequences but enough for one: all complete."""
    prompts = [[number, 7, 7, 7, 7] for number in range(3)]
    # A step of two or three tokens is one in which that many sequences decode.
    engine = fragile_engine(lambda tokens: 2 <= tokens.numel() <= 3, enable_prefix_caching=False)
    with running_server(tiny_engine()) as calm:
        wanted = [stream_text(calm, prompt, 12) for prompt in prompts]
    with running_server(engine) as running, ThreadPoolExecutor(8) as pool:
        thread, all_are_there = running.server.app.state.engine_thread, threading.Event()
        thread.call(lambda _: all_are_there.wait(PATIENCE_SECONDS))
        streams = [pool.submit(stream_text, running, prompt, 12) for prompt in prompts]
        wait_until(lambda: thread._slots.num_taken == 3)
        all_are_there.set()
        assert [stream.result(PATIENCE_SECONDS) for stream in streams] == wanted
        assert running.figures()["blockyard:failed_steps_total"] > 0
        assert running.figures()["blockyard:requests_failed_total"] == 0
        running.require_idle()


def test_many_completions_survive_a_failing_request_in_their_step() -> None:
    wanted = {"model": MODEL, "prompt": [3, 4, 5], "max_tokens": 40, "temperature": 1.5, "seed": 5, "n": 3}
    with running_server(tiny_engine()) as calm:
        texts = [choice.text for choice in calm.client().completions.create(**wanted).choices]
    poison = unused_token([[3, 4, 5]], max_tokens=40, temperature=1.5, seed=5, n=3)
    engine = fragile_engine(lambda tokens: bool((tokens == poison).any()))
    with running_server(engine) as running, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(running.client().completions.create, **wanted)
        wait_until(lambda: running.figures()["vllm:generation_tokens_total"] > 5)
        with pytest.raises(openai.InternalServerError):
            running.client().completions.create(model=MODEL, prompt=[poison], max_tokens=5)
        assert [choice.text for choice in answer.result(PATIENCE_SECONDS).choices] == texts
        running.require_idle()


@pytest.mark.parametrize("failing_call", [1, 2, 4, 7, 12, 25, 40])
def test_a_tokenizer_that_raises_loses_no_token_of_other_requests(
    monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """Requests that had taken a token before the error take it again: streams neither lose nor repeat one."""
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    sampling = SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=3, logprobs=1, stop=("\x07\x07",))
    wanted = tiny_engine().generate(prompts, sampling)
    engine, calls = tiny_engine(), []
    decode = engine.tokenizer.decode

    def failing(*arguments: Any, **options: Any) -> str:
        calls.append(arguments)
        if len(calls) == failing_call:
            raise FIRE
        return str(decode(*arguments, **options))

    monkeypatch.setattr(engine.tokenizer, "decode", failing)
    numbers = [engine.add_request(prompt, sampling) for prompt in prompts]
    texts = {(number, index): "" for number in numbers for index in range(2)}
    results, num_failures = {}, 0
    while engine.has_unfinished:
        try:
            report = engine.step(keep_on_error=True)
        except RuntimeError:
            num_failures += 1
            continue
        for token in report.new_tokens:
            texts[token.request_id, token.index] += token.text
        results.update({result.request_id: result for result in report.finished})
    assert num_failures == 1
    for number, result in zip(numbers, wanted, strict=True):
        for got, right in zip(results[number].completions, result.completions, strict=True):
            assert (got.token_ids, got.text, got.finish_reason) == (right.token_ids, right.text, right.finish_reason)
            assert texts[number, got.index] == right.text
            assert len(got.logprobs or []) == len(right.token_ids)
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0


def test_broken_engine_ends_its_requests_and_refuses_new_ones() -> None:
    """An error that is not an Exception ends the engine's thread: no client waits forever, and /health reports it."""
    with running_server(fragile_engine(lambda tokens: True, SystemExit(1))) as running:
        with pytest.raises(openai.InternalServerError):
            running.client().completions.create(model=MODEL, prompt=[1], max_tokens=300)
        status, headers, _ = running.post("/v1/completions", prompt=[1])
        assert status == 503
        assert "retry-after" in headers
        assert running.post("/tokenize", prompt="a")[0] == 503
        assert running.call("GET", "/health")[0] == running.call("GET", "/ping")[0] == 503
        assert running.call("GET", "/check")[0] == 503
        assert running.call("GET", "/metrics")[0] == 200


# ---------------------------------------------------------------- clients that vanish


def test_a_client_that_leaves_a_stream_frees_its_blocks() -> None:
    with running_server(fragile_engine(Paced())) as running:
        stream = running.client().completions.create(model=MODEL, prompt=[1, 2], max_tokens=500, stream=True)
        next(iter(stream))
        stream.close()
        running.require_idle()
        figures = running.figures()
        assert figures["blockyard:requests_cancelled_total"] == 1
        assert figures["vllm:generation_tokens_total"] < 500


def test_a_client_that_leaves_before_the_answer_frees_its_blocks() -> None:
    with running_server(fragile_engine(Paced())) as running:
        client = raw_request(running, prompt=[1, 2], max_tokens=500, n=3)
        wait_until(lambda: running.figures()["vllm:num_requests_running"] == 1)
        client.close()
        running.require_idle()
        assert running.figures()["blockyard:requests_cancelled_total"] == 1


@pytest.mark.parametrize(
    "early",
    [b"\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", b"garbage", b"x" * 2**14, b"x" * 2**20],
)
def test_a_client_that_sent_more_before_it_left_frees_its_blocks(early: bytes) -> None:
    """uvicorn stops reading where a next request begins too early, and would not see the end behind it."""
    model = Paced()
    with running_server(fragile_engine(model)) as running:
        client = raw_request(running, prompt=[1, 2], max_tokens=500, ignore_eos=True)
        wait_until(lambda: model.num_steps > 5)
        with suppress(ConnectionError):  # far too much of it has the connection cut
            client.sendall(early)
        time.sleep(0.1)  # it is read before the end of the connection is
        client.close()
        figures = running.figures
        wait_until(lambda: figures()["blockyard:requests_cancelled_total"] == 1 or model.num_steps > 300)
        model.may_go_on.set()
        running.require_idle()
        assert figures()["vllm:generation_tokens_total"] < 300


def test_client_that_pipelines_too_much_is_disconnected() -> None:
    """A client that sends more than 16 KiB after a request gets no answer to it."""
    with running_server(fragile_engine(Paced())) as running:
        client = raw_request(running, prompt=[1, 2], max_tokens=500, ignore_eos=True, stream=True)
        wait_until(lambda: running.figures()["vllm:generation_tokens_total"] > 0)
        with client, pytest.raises(ConnectionError):
            client.sendall(b"x" * 2**24)
        running.require_idle()
        assert running.figures()["blockyard:requests_cancelled_total"] == 1


def test_two_requests_in_one_piece_are_answered_one_after_the_other() -> None:
    with running_server(tiny_engine()) as running:
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        with socket.create_connection((running.host, running.port), timeout=PATIENCE_SECONDS) as client:
            client.sendall(ask + b"\r\n" + ask + b"Connection: close\r\n\r\n")
            received = b""
            while piece := client.recv(4096):
                received += piece
        assert received.count(b"HTTP/1.1 200") == 2


def test_the_prompt_of_a_client_that_has_left_is_not_encoded() -> None:
    """There is one thread for prompts: a prompt that no client waits for must not hold up the others."""
    with running_server(tiny_engine()) as running, ThreadPoolExecutor(2) as pool:
        encoder, may_go_on, encoded = running.server.app.state.encoder, threading.Event(), []
        encode = encoder._encode

        def noted(tokenizer: Any, name: str, prompt: Any, *others: Any) -> Any:
            encoded.append(prompt)
            may_go_on.wait(PATIENCE_SECONDS)
            return encode(tokenizer, name, prompt, *others)

        encoder._encode = noted
        first = pool.submit(running.post, "/v1/completions", prompt="first", max_tokens=1)
        wait_until(lambda: encoded == ["first"])
        clients = [raw_request(running, prompt="left", max_tokens=1, stream=stream) for stream in (False, True)]
        tasks = running.server.server_state.tasks
        wait_until(lambda: len(tasks) == 3)
        time.sleep(0.1)
        for client in clients:
            client.close()
        wait_until(lambda: len(tasks) == 1)
        may_go_on.set()
        assert first.result(PATIENCE_SECONDS)[0] == 200
        assert running.post("/v1/completions", prompt="last", max_tokens=1)[0] == 200
        assert encoded == ["first", "last"]
        running.require_idle()


def test_clients_that_leave_at_any_time_leak_nothing() -> None:
    rng = np.random.default_rng(4)
    plans = [(int(rng.integers(1, 200)), float(rng.random() * 0.4), bool(rng.integers(2))) for _ in range(60)]
    with running_server(tiny_engine(num_blocks=60), ServerLimits(max_waiting=200)) as running:

        def come_and_go(plan: tuple[int, float, bool]) -> None:
            length, seconds, is_stream = plan
            with raw_request(running, prompt=[length] * length, max_tokens=200, stream=is_stream, n=1 + length % 2):
                time.sleep(seconds)

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(come_and_go, plans))
        running.require_idle()
        assert running.figures()["blockyard:requests_failed_total"] == 0
        assert len(stream_text(running, [1, 2, 3], 20)) > 0


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_reads_nothing_is_cut_off(is_stream: bool) -> None:
    """Its answer is longer than what the system buffers; it holds neither blocks nor its connection."""
    with (
        running_server(tiny_engine(), ServerLimits(client_seconds=0.5)) as running,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_SECONDS)
        client.connect((running.host, running.port))
        send_request(client, prompt=[[1, 2]] * 8, max_tokens=200, stream=is_stream, logprobs=20)
        wait_until(lambda: running.server.server_state.total_requests == 1)
        wait_until(lambda: not running.server.server_state.connections)
        running.require_idle()


def test_unread_short_answer_is_disconnected_too() -> None:
    """Where the system buffers little, as of a network card: what is left over is less than a server buffers itself."""
    fields = {"prompt": [1, 2, 3], "max_tokens": 180, "ignore_eos": True, "logprobs": 20, "temperature": 0}
    with running_server(tiny_engine(), ServerLimits(client_seconds=0.5)) as running, socket.socket() as client:
        _, headers, _ = running.post("/v1/completions", **fields)
        assert 35_000 < int(headers["content-length"]) < 65_000
        for listening in running.server.servers[0].sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connections = running.server.server_state.connections
        wait_until(lambda: not connections)
        client.connect((running.host, running.port))
        send_request(client, **fields)
        wait_until(lambda: running.server.server_state.total_requests == 2)
        wait_until(lambda: not connections)
        running.require_idle()


def test_a_client_that_sends_much_is_read_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are served between two pieces; a body in one-byte chunks takes long to read."""
    sizes, read = [], H11Protocol.data_received

    def noted(self: H11Protocol, data: bytes) -> None:
        sizes.append(len(data))
        read(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", noted)
    with running_server(tiny_engine()) as running:
        status, _, _ = running.post("/v1/completions", prompt="a" * 1_000_000)
        assert status == 400
    assert sum(sizes) > 1_000_000
    assert max(sizes) <= 8192


# ---------------------------------------------------------------- time, and the end


def test_answer_that_takes_too_long_gets_504() -> None:
    with running_server(tiny_engine(), ServerLimits(request_seconds=0.05)) as running:
        status, _, answer = running.post("/v1/completions", prompt=[1], max_tokens=500)
        assert status == 504
        assert answer["error"]["code"] == "timeout"
        running.require_idle()


def test_the_time_that_a_prompt_waits_to_be_encoded_counts() -> None:
    """One thread encodes: while it is busy with another's prompt, the time of a request runs."""
    with (
        running_server(tiny_engine(), ServerLimits(request_seconds=0.3)) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        encoder, may_go_on, encoded = running.server.app.state.encoder, threading.Event(), []
        encode = encoder._encode

        def slow(tokenizer: Any, name: str, prompt: Any, *others: Any) -> Any:
            encoded.append(prompt)
            may_go_on.wait(PATIENCE_SECONDS)
            return encode(tokenizer, name, prompt, *others)

        encoder._encode = slow
        first = pool.submit(running.post, "/v1/completions", prompt="first", max_tokens=1)
        wait_until(lambda: encoded == ["first"])
        for stream in (False, True):
            status, _, answer = running.post("/v1/completions", prompt="next", max_tokens=1, stream=stream)
            assert (status, answer["error"]["code"]) == (504, "timeout")
        assert first.result(PATIENCE_SECONDS)[0] == 504
        may_go_on.set()
        assert encoded == ["first"]  # a prompt that no client waits for is not encoded
        wait_until(lambda: running.post("/v1/completions", prompt="last", max_tokens=1)[0] == 200)
        running.require_idle()


def test_running_requests_complete_during_shutdown() -> None:
    with running_server(tiny_engine()) as running, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(stream_text, running, [1, 2, 3], 300)
        wait_until(lambda: running.figures()["vllm:generation_tokens_total"] > 2)
        running.server.should_exit = True
        thread = running.server.app.state.engine_thread
        wait_until(lambda: thread.refusal is not None)
        with pytest.raises(openai.APIConnectionError):
            running.client().models.list()
        assert len(answer.result(PATIENCE_SECONDS)) > 0
        wait_until(lambda: not thread._thread.is_alive())


def test_shutdown_ends_requests_after_the_drain_limit() -> None:
    with running_server(fragile_engine(Paced()), ServerLimits(drain_seconds=0.2)) as running:
        stream = running.client().completions.create(model=MODEL, prompt=[1], max_tokens=500, stream=True)
        first = next(iter(stream))
        assert first.choices[0].finish_reason is None
        slow = threading.Event()
        running.server.app.state.engine_thread.call(lambda engine: slow.wait(1))  # the engine is busy for a while
        running.server.should_exit = True
        with pytest.raises(openai.APIError, match="stopping"):
            for _ in stream:
                pass
