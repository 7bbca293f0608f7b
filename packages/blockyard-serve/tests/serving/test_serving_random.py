"""Random requests over all fields, some from clients that leave: each gets its answer, and nothing leaks."""

from __future__ import annotations

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard_engine import PromptLookup
from blockyard_serve import ServerLimits
from blockyard_testing.seeds import run_seed
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

NUM_REQUESTS = 80
VALUES: dict[str, list[Any]] = {
    "presence_penalty": [-2, 0, 2, 2.01],
    "frequency_penalty": [-2, 0, 2],
    "logit_bias": [{}, {"5": 100}, {str(token): -100 for token in range(258)}, {"258": 1}],
    "min_tokens": [0, 1, 30, 10**30],
    "cache_salt": ["a", "b", "\N{GRINNING FACE}" * 1024, ""],
    "n": [1, 2, 5],
    "stop": ["a", ["e", "\0"], []],
    "stop_token_ids": [[5], list(range(64)), [70_000]],
    "ignore_eos": [True, False],
    "stream": [True, False],
    "logprobs": [0, 3],
    "repetition_penalty": [1, 0.01, 2],
    "top_k": [-1, 1, 5],
    "top_p": [1, 0.001],
    "min_p": [0, 1],
    "priority": [-5, 5],
    "tools": [[]],
}
PROMPTS = ["abc" * 50, [1, 2, 3] * 40, ["a", "bb" * 40], [7] * 33, "x", [[1], [2, 3]]]


def fields_of(rng: random.Random) -> dict[str, Any]:
    """Each field in two of five requests."""
    fields = {name: rng.choice(values) for name, values in VALUES.items() if rng.random() < 0.4}
    limits = {"max_tokens": rng.randrange(1, 40), "temperature": rng.choice([0, 1, 2])}
    return {"model": MODEL, "prompt": rng.choice(PROMPTS), **limits, **fields}


def visit(running: Running, number: int) -> str:
    """One client: the status of its answer, or "left"."""
    rng = random.Random(f"{run_seed()} {number}")
    body = json.dumps(fields_of(rng)).encode()
    head = f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((running.host, running.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + head.encode())
        leaves = rng.random()
        client.sendall(body if leaves > 0.05 else body[: len(body) // 2])
        if leaves < 0.3:
            time.sleep(rng.random() * 0.2)
            return "left"
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert b"Traceback" not in answer
    return answer[9:12].decode() + " and an error" * (b'data: {"error"' in answer)


OPTIONS: list[dict[str, Any]] = [{}, {"num_cpu_blocks": 30, "preemption": "swap"}, {"speculation": PromptLookup()}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "swap", "drafts"])
def test_random_requests_leak_nothing(options: dict[str, Any]) -> None:
    engine = tiny_engine(num_blocks=26, max_num_seqs=8, **options)
    with running_server(engine, ServerLimits(max_waiting=300)) as running, ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda number: visit(running, number), range(NUM_REQUESTS)))
        running.require_idle()
        figures = running.figures()
    assert set(statuses) == {"200", "400", "left"}, f"seed {run_seed()}"
    assert figures["blockyard:failed_steps_total"] == figures["blockyard:requests_failed_total"] == 0
