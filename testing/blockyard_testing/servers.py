"""Real servers for tests: on loopback, on a free port, ended by the test that started them."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai

from blockyard_engine import Engine
from blockyard_serve import Server, ServerLimits, ServerOptions

from .patience import PATIENCE_SECONDS
from .tiny_models import NUM_TOKENS, byte_tokenizer, tiny_model

MODEL = "tiny"


def tiny_engine(
    num_blocks: int = 200, max_num_seqs: int = 8, *, max_position_embeddings: int = 512, **options: Any
) -> Engine:
    """An engine over a model with random weights and a token for each byte."""
    model = tiny_model("llama-gqa", vocab_size=NUM_TOKENS, max_position_embeddings=max_position_embeddings)
    return Engine(model, byte_tokenizer(), num_blocks=num_blocks, max_num_seqs=max_num_seqs, **options)


class Running:
    """A server that runs in a thread, and what tests ask of it."""

    def __init__(self, server: Server, address: str) -> None:
        self.server = server
        self.address = address
        parts = urlsplit(address)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """OpenAI's own client, which does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_SECONDS)

    def call(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request by hand: status, headers in lower case, body."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
        """POST fields as JSON; status, headers and the JSON that comes back."""
        status, headers, body = self.call("POST", path, json.dumps({"model": MODEL, **fields}).encode())
        return status, headers, json.loads(body)

    def check(self) -> dict[str, Any]:
        """What GET /check says; the invariants of the cache hold."""
        status, _, body = self.call("GET", "/check")
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        assert answer["ok"] is True
        return answer

    def require_idle(self) -> None:
        """Wait until nothing runs; then no block is held."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        answer = self.check()
        while answer["has_unfinished"] and time.monotonic() < deadline:
            time.sleep(0.02)
            answer = self.check()
        assert not answer["has_unfinished"]
        assert answer["num_used_blocks"] == 0, answer["holders"]
        assert answer["num_running_seqs"] == 0

    def figures(self) -> dict[str, float]:
        """The samples of GET /metrics, by name; those with labels of their own are left out."""
        _, _, page = self.call("GET", "/metrics")
        samples = {}
        for line in page.decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.endswith(f'{{engine="0",model_name="{MODEL}"}}'):
                samples[name.partition("{")[0]] = float(value)
        return samples


@contextmanager
def running_server(
    engine: Engine,
    limits: ServerLimits | None = None,
    api_key: str | None = None,
    access_log: bool = False,
    cors_origins: tuple[str, ...] = (),
    ui: str = "text",
    model_name: str = MODEL,
    **more: Any,
) -> Iterator[Running]:
    """Serve an engine in a thread for as long as the block lasts. more: of `ServerOptions`."""
    address: list[str] = []
    listening = threading.Event()

    def note(where: str) -> None:
        address.append(where)
        listening.set()

    options = ServerOptions(
        model_name=model_name,
        port=0,
        limits=limits or ServerLimits(),
        api_key=api_key,
        access_log=access_log,
        has_check=True,
        cors_origins=cors_origins,
        ui=ui,
        **more,
    )
    server = Server(engine, options, note)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert listening.wait(PATIENCE_SECONDS)
        yield Running(server, address[0])
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
