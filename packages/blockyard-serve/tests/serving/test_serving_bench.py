"""The requests of `vllm bench serve`, recorded from vLLM 0.32.0 in November 2026, and read as it reads the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

NUM_REQUESTS = 12
NUM_TOKENS = 8
HEADERS = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate", "User-Agent": "Python/3.11 aiohttp/3.14.5"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
#: What its options add: --top-p, --top-k, --min-p, --temperature, the three penalties, and --extra-body.
SAMPLING = {
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "temperature": 0.0,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
}
FIXED_LENGTH = {"ignore_eos": True, "min_tokens": NUM_TOKENS, "cache_salt": "tenant"}


def completion(prompt: str, **others: Any) -> dict[str, Any]:
    """`async_request_openai_completions`: --backend openai and vllm."""
    wanted = {"model": MODEL, "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": NUM_TOKENS, "logprobs": None}
    return {**wanted, **STREAM, "ignore_eos": True, **others}


def chat(prompt: str, **others: Any) -> dict[str, Any]:
    """`async_request_openai_chat_completions`: --backend openai-chat."""
    messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    return {"model": MODEL, "messages": messages, "max_completion_tokens": NUM_TOKENS, **STREAM, **others}


@dataclass
class Read:
    """What its client makes of a stream: RequestFuncOutput."""

    num_chunks: int = 0
    text: str = ""
    output_tokens: int | None = None
    prompt_len: int | None = None


def read(body: bytes) -> Read:
    """Chunks with choices are tokens; the one without has the usage."""
    found = Read()
    for message in body.decode().split("\n\n"):
        chunk = message.strip().removeprefix("data: ")
        if chunk in ("", "[DONE]"):
            continue
        data = json.loads(chunk)
        if choices := data.get("choices"):
            found.num_chunks += 1
            found.text += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
        elif usage := data.get("usage"):
            found.output_tokens, found.prompt_len = usage["completion_tokens"], usage["prompt_tokens"]
    return found


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running_server(tiny_engine(num_blocks=60)) as running:
        yield running


def ask(running: Running, path: str, fields: dict[str, Any], number: int | None = None) -> bytes:
    headers = HEADERS if number is None else {**HEADERS, "x-request-id": f"bench-0e9b1955-{number}"}
    status, answered, body = running.call("POST", path, json.dumps(fields).encode(), headers)
    assert status == 200, body
    assert number is None or answered["x-request-id"] == headers["x-request-id"]
    return body


def align(running: Running, prompt: str, num_tokens: int) -> str:
    """`_align_prompts_to_server_tokenizer`: without special tokens, cut to the length that was asked for."""
    body = ask(running, "/tokenize", {"model": MODEL, "prompt": prompt, "add_special_tokens": False})
    tokens = json.loads(body)["tokens"][:num_tokens]
    return str(json.loads(ask(running, "/detokenize", {"model": MODEL, "tokens": tokens}))["prompt"])


@pytest.mark.parametrize(
    ("path", "make", "others"),
    [
        ("/v1/completions", completion, {}),
        ("/v1/completions", completion, {"logprobs": 2, **FIXED_LENGTH}),
        ("/v1/completions", completion, SAMPLING),
        ("/v1/chat/completions", chat, {}),
        ("/v1/chat/completions", chat, {**SAMPLING, **FIXED_LENGTH}),
    ],
    ids=["plain", "fixed-length", "sampling", "chat", "chat-sampling"],
)
def test_a_benchmark_runs_to_its_end_without_a_refused_field(
    served: Running, path: str, make: Any, others: dict[str, Any]
) -> None:
    _, _, models = served.call("GET", "/v1/models", None, HEADERS)
    assert json.loads(models)["data"][0]["id"] == MODEL
    prompts = [align(served, f"{number} is the number of this prompt, cut to a length", 32) for number in range(3)]
    assert [len(prompt) for prompt in prompts] == [32] * 3
    assert read(ask(served, path, make(prompts[0], **others))).num_chunks > 0  # --ready-check-timeout-sec
    assert served.call("GET", "/metrics", None, HEADERS)[0] == 200

    def one(number: int) -> Read:
        return read(ask(served, path, make(prompts[number % 3], **others), number))

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(one, range(NUM_REQUESTS)))
    template = "user:assistant:" if make is chat else ""
    is_fixed = make is completion or "ignore_eos" in others
    for answer in answers:
        assert answer.num_chunks > 0  # what counts as a success there: a first chunk, to take the time of
        assert answer.prompt_len == 32 + len(template) + 2 * bool(template)
        assert answer.output_tokens in ({NUM_TOKENS} if is_fixed else range(1, NUM_TOKENS + 1))
    served.require_idle()
