"""Paths beside OpenAI's: prompts tokenized block by block, probes, the version, HEAD, and pages of other origins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import blockyard
from blockyard.errors import InvalidArgument
from blockyard_serve import ServerLimits, ServerOptions, create_app
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine
from blockyard_testing.tiny_models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("nothing_leaks")

TEXT = "Blocks hold sixteen tokens each, and here a token is a byte: é."
CHAT = [{"role": "user", "content": TEXT}]
PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running_server(tiny_engine(), ServerLimits(max_body_bytes=100_000)) as running:
        yield running


# ---------------------------------------------------------------- /tokenize, /detokenize


def test_text_is_tokenized_like_the_tokenizer_does(served: Running) -> None:
    wanted = byte_tokenizer()(TEXT).input_ids
    status, _, answer = served.post("/tokenize", prompt=TEXT)
    assert status == 200
    assert answer == {
        "count": len(wanted),
        "max_model_len": 512,
        "tokens": wanted,
        "token_strs": None,
        "block_size": 16,
    }
    strings = served.post("/tokenize", prompt="aé", return_token_strs=True)[2]["token_strs"]
    assert strings == ["a", "Ã", "©"]
    assert served.post("/detokenize", tokens=wanted)[2] == {"prompt": TEXT}
    assert served.post("/detokenize", tokens=[])[2] == {"prompt": ""}
    assert served.post("/detokenize", tokens=[256, 257])[2] == {"prompt": "<|turn|><|end|>"}


def test_tokenize_returns_the_blocks_of_a_prompt(served: Running) -> None:
    _, _, answer = served.post("/tokenize", prompt=TEXT, return_blocks=True)
    blocks = answer["blocks"]
    assert [(each["start"], each["end"]) for each in blocks] == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 65)][
        : len(blocks)
    ]
    assert blocks[-1]["end"] == answer["count"]
    assert "".join(each["text"] for each in blocks).rstrip(".\N{REPLACEMENT CHARACTER}é") == TEXT[:-2]
    assert blocks[0]["text"] == TEXT[:16]


def test_tokenized_chat_equals_the_computed_prompt(served: Running) -> None:
    """The count is that of the usage, and its full blocks are what a second request finds."""
    _, _, answer = served.post("/tokenize", messages=CHAT)
    for _ in range(2):
        used = served.post("/v1/chat/completions", messages=CHAT, max_tokens=2)[2]["usage"]
    assert used["prompt_tokens"] == answer["count"]
    assert used["prompt_tokens_details"]["cached_tokens"] == (answer["count"] - 1) // 16 * 16
    tokens = served.post("/v1/completions", prompt=answer["tokens"], max_tokens=6, temperature=0)[2]
    chat = served.post("/v1/chat/completions", messages=CHAT, max_tokens=6, temperature=0)[2]
    assert tokens["choices"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_special_tokens_are_added_unless_they_are_not_wanted() -> None:
    from tokenizers import processors

    engine = tiny_engine()
    engine.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|turn|> $A", special_tokens=[("<|turn|>", 256)]
    )
    with running_server(engine) as running:
        plain = byte_tokenizer()("ab").input_ids
        assert running.post("/tokenize", prompt="ab")[2]["tokens"] == [256, *plain]
        assert running.post("/tokenize", prompt="ab", add_special_tokens=False)[2]["tokens"] == plain
        assert running.post("/v1/completions", prompt="ab", max_tokens=1)[2]["usage"]["prompt_tokens"] == 3
        own = engine.tokenizer("ab").input_ids
        assert own == [256, *plain]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_blocks": 1}, "return_blocks"),
        ("/tokenize", {"prompt": "a", "other": 1}, "other"),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": CHAT, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": [{"role": "tool"}]}, "messages[0].role"),
        ("/tokenize", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
    ],
)
def test_bad_tokenize_requests_name_the_field(served: Running, path: str, fields: dict[str, Any], param: str) -> None:
    status, _, answer = served.post(path, **fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_the_model_may_be_left_out_and_must_be_this_one(served: Running) -> None:
    assert served.call("POST", "/tokenize", b'{"prompt": "a"}')[0] == 200
    assert served.call("POST", "/detokenize", b'{"tokens": [1]}')[0] == 200
    for path, body in (
        ("/tokenize", b'{"model": "x", "prompt": "a"}'),
        ("/detokenize", b'{"model": "x", "tokens": []}'),
    ):
        status, _, answer = served.call("POST", path, body)
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")


def test_text_longer_than_the_context_is_tokenized(served: Running) -> None:
    answer = served.post("/tokenize", prompt="a" * 90_000, return_blocks=True)[2]
    assert answer["count"] == 90_000 > answer["max_model_len"]
    assert len(answer["blocks"]) == 5625
    assert served.call("POST", "/tokenize", b"x" * 100_001)[0] == 413


def test_tokenizer_routes_need_the_key() -> None:
    with running_server(tiny_engine(), api_key="open sesame") as guarded:
        for path in ("/tokenize", "/detokenize"):
            assert guarded.post(path, prompt="a", tokens=[1])[0] == 401
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert guarded.call("GET", path)[0] == 200


# ---------------------------------------------------------------- probes, HEAD, paths that are not there


def test_version_and_ping_answer(served: Running) -> None:
    assert json.loads(served.call("GET", "/version")[2]) == {"version": blockyard.__version__}
    for method in ("GET", "POST"):
        assert served.call(method, "/ping")[0] == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics", "/v1/models", f"/v1/models/{MODEL}"])
def test_head_is_get_without_a_body(served: Running, path: str) -> None:
    status, headers, body = served.call("HEAD", path)
    assert (status, body) == (200, b"")
    assert headers["content-type"] == served.call("GET", path)[1]["content-type"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/embeddings", "not embeddings"),
        ("/v1/responses", "chat and completion paths"),
        ("/v1/audio/speech", "only reads and writes text"),
        ("/v1/load_lora_adapter", "loads no LoRA adapters"),
    ],
)
def test_a_path_of_another_server_is_refused_in_a_sentence(served: Running, path: str, why: str) -> None:
    status, _, answer = served.post(path, input="a")
    assert status == 404
    assert why in answer["error"]["message"]


def test_a_lora_adapter_is_not_a_known_model(served: Running) -> None:
    status, _, answer = served.call("POST", "/v1/completions", b'{"model": "my-adapter", "prompt": "a"}')
    assert status == 404
    said = "the model 'my-adapter' does not exist; this server serves 'tiny', without LoRA adapters"
    assert json.loads(answer)["error"]["message"] == said


# ---------------------------------------------------------------- pages of other origins


def preflight(running: Running, origin: str) -> tuple[int, dict[str, str]]:
    """What a browser asks before it sends a page's JSON."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    status, headers, _ = running.call("OPTIONS", "/v1/chat/completions", None, {"Origin": origin, **asked})
    return status, headers


def test_page_of_an_allowed_origin_is_answered() -> None:
    with running_server(tiny_engine(), api_key="open sesame", cors_origins=(PAGE,)) as running:
        status, headers = preflight(running, PAGE)
        assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in headers
        for origin in ("http://localhost:3001", "https://localhost:3000", "http://evil.test", "null"):
            status, headers = preflight(running, origin)
            assert (status, headers.get("access-control-allow-origin")) == (400, None)
        bearer = {"Origin": PAGE, "Authorization": "Bearer open sesame"}
        body = json.dumps({"model": MODEL, "prompt": [1], "max_tokens": 3, "stream": True}).encode()
        status, headers, events = running.call("POST", "/v1/completions", body, bearer)
        assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
        assert "X-Request-ID" in headers["access-control-expose-headers"]
        assert events.endswith(b"data: [DONE]\n\n")
        status, headers, _ = running.call("POST", "/v1/completions", body, {"Origin": PAGE})
        assert (status, headers["access-control-allow-origin"]) == (401, PAGE)  # a page can read why


def test_all_pages_may_be_allowed() -> None:
    with running_server(tiny_engine(), cors_origins=("*",)) as running:
        assert preflight(running, "http://any.test")[1]["access-control-allow-origin"] == "*"


def test_pages_are_refused_without_allowed_origins(served: Running) -> None:
    status, headers = preflight(served, PAGE)
    assert (status, headers.get("access-control-allow-origin")) == (405, None)
    assert "access-control-allow-origin" not in served.call("GET", "/health", None, {"Origin": PAGE})[1]


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "localhost",
        "http://",
        "http://a/",
        "http://a/b",
        "HTTP://a",
        "http://a:x",
        "http://a:99999",
        "http://u@a",
        "é",
    ],
)
def test_invalid_origin_is_named(origin: str) -> None:
    with pytest.raises(InvalidArgument, match="cors_origins holds"):
        create_app(tiny_engine(), ServerOptions(MODEL, cors_origins=(PAGE, origin)))


@pytest.mark.parametrize("origin", ["http://a", "https://a.b:8443", "http://[::1]:80", "chrome-extension://abc"])
def test_valid_origin_is_accepted(origin: str) -> None:
    create_app(tiny_engine(), ServerOptions(MODEL, cors_origins=(origin,)))
