"""`vllm serve MODEL --scheduler-cls blockyard_vllm.AsyncScheduler`, asked by the `openai` client."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
import zmq
from openai import OpenAI
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

MODEL = os.environ.get("BLOCKYARD_VLLM_MODEL", "")
STARTS_WITHIN = 500
PROMPT = "The history of paged memory began with machines whose programs were larger than their store. " * 4

pytestmark = pytest.mark.skipif(not MODEL, reason="BLOCKYARD_VLLM_MODEL names no model")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A process of its own, with its engine in another one, as `vllm serve` makes them."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        # vLLM binds to sockets of files, and to TCP ports of all interfaces alone.
        self.events = f"ipc://{folder}/events"
        metadata = folder / "vllm-0.32.0+cpu.dist-info"
        metadata.mkdir()
        # `vllm serve` asks for the metadata of a package named vllm; the wheel for CPUs has another name.
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        counted = folder / "counted"
        counted.mkdir()
        options = '{"blockyard": {"eviction_policy": "s3fifo", "miss_causes": 10000}}'
        events = f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "{self.events}"}}'
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", MODEL]
        command += ["--scheduler-cls", "blockyard_vllm.AsyncScheduler", "--additional-config", options]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--kv-events-config", events]
        command += ["--served-model-name", "smollm2", "--max-model-len", "512", "--dtype", "float32", "--enforce-eager"]
        command += ["--block-size", "32", "--num-gpu-blocks-override", "100", "--distributed-executor-backend", "uni"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "PROMETHEUS_MULTIPROC_DIR": str(counted),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + STARTS_WITHIN
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(self.url("/health"), timeout=5).close()
                return
            except OSError:
                time.sleep(1)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def url(self, path: str) -> str:
        """On loopback."""
        return f"http://127.0.0.1:{self.port}{path}"

    def metric(self, pattern: str) -> float:
        """The sum of the samples of `/metrics` that match."""
        text = urllib.request.urlopen(self.url("/metrics"), timeout=30).read().decode()
        return sum(float(value) for value in re.findall(rf"^{pattern}[^ ]* (\S+)$", text, re.M))

    def stop(self) -> None:
        """End the server and its engine, which share a session of their own."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                continue


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    try:
        made.wait()
        yield made
    finally:
        made.stop()


class Batch(msgspec.Struct, array_like=True):  # type: ignore[call-arg]
    """What vLLM's publisher sends."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def test_client_gets_an_answer(server: Server) -> None:
    """Twice the same prompt: the same answer, the second from the cache; causes and events are there."""
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(server.events)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    time.sleep(1)
    client = OpenAI(base_url=server.url("/v1"), api_key="none")
    answers: list[Any] = [
        client.completions.create(model="smollm2", prompt=PROMPT, max_tokens=12, temperature=0) for _ in range(2)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    num_tokens = answers[0].usage.prompt_tokens
    hits = (num_tokens - 1) // 32 * 32
    assert hits > 0
    assert server.metric("vllm:prefix_cache_hits_total") == hits
    assert server.metric('blockyard:prompt_tokens_total{cause="hit"') == hits
    assert server.metric('blockyard:prompt_tokens_total{cause="never_seen"') == hits
    assert server.metric("blockyard:prompt_tokens_total") == 2 * num_tokens
    stored = sum(len(event.block_hashes) for event in received(subscriber) if isinstance(event, BlockStored))
    assert stored >= hits // 32
    assert "hits are proved by tokens (level 'tokens'), eviction s3fifo" in server.log.read_text()
    stream = client.completions.create(model="smollm2", prompt=PROMPT + "x", max_tokens=30, temperature=0, stream=True)
    for _ in stream:
        break
    stream.close()  # a client who goes away: the request is aborted, and its blocks are free again
    for _ in range(60):
        if server.metric("vllm:kv_cache_usage_perc") == 0 == server.metric("vllm:num_requests_running"):
            return
        client.completions.create(model="smollm2", prompt="a", max_tokens=1)
        time.sleep(0.5)
    raise AssertionError("blocks are still held")


def received(subscriber: Any) -> list[Any]:
    """All events that have come."""
    found = []
    while subscriber.poll(2000):
        found += msgspec.msgpack.decode(subscriber.recv_multipart()[-1], type=Batch).events
    return found
