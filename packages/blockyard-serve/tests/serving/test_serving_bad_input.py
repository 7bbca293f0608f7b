"""What the server says to requests that are wrong, too large, too slow or too many: OpenAI's form, and no leak."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from pydantic import ValidationError

from blockyard.errors import InvalidArgument
from blockyard_serve import ApiError, ServerLimits, ServerOptions, create_app
from blockyard_serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    parse_request,
)
from blockyard_serve.openai.unsupported_fields import HARMLESS, requested_fields
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.places import ROOT
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

pytestmark = pytest.mark.usefixtures("nothing_leaks")

LIMITS = ServerLimits(max_body_bytes=4096, max_tokens=100, max_waiting=2)
IMPATIENT = ServerLimits(body_seconds=1.0, header_seconds=1.0)
JSON = b"Content-Type: application/json\r\n"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running_server(tiny_engine(max_num_seqs=4), LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[Running]:
    """Short timeouts for the tests of slow clients only: on a busy machine a good client is slow too."""
    with running_server(tiny_engine(), IMPATIENT) as running:
        yield running
        running.require_idle()


def require_form(body: bytes) -> dict[str, Any]:
    """Check the error object: four fields, and nothing about the server's internals."""
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert ".py" not in error["message"]
    return error


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "max_tokens": 1' + b"0" * 500 + b"}",
        b"[" * 4000,
        b'{"a":' * 800,
        b'{"model": "tiny", "prompt": "a"} x',
        b"\0" * 100,
    ],
)
def test_unreadable_bodies_are_refused(served: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        status, _, answer = served.call("POST", path, body)
        assert status == 400
        assert require_form(answer)["type"] == "invalid_request_error"


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "unheard_of": 1}, "unheard_of"),
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [258]}, "prompt"),
    ({"prompt": "a" * 600}, "prompt"),
    ({"prompt": "a" * 500, "max_tokens": 50}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 101}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 5}, "n"),
    ({"prompt": ["a", "b"], "n": 4}, "n"),
    ({"prompt": "a", "n": 10**9}, "n"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.1}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"other": True}}, "stream_options"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "echo": True}, "echo"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": "1"}, "frequency_penalty"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"258": 1}}, "logit_bias"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "cache_salt": 7}, "cache_salt"),
    ({"prompt": "a", "cache_salt": "a" * 1025}, "cache_salt"),
    ({"prompt": "a", "lora_path": "a"}, "lora_path"),
    ({"prompt": "a", "guided_json": {}}, "guided_json"),
    ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
]


@pytest.mark.parametrize(("fields", "name"), BAD_FIELDS)
def test_a_bad_field_is_named(served: Running, fields: dict[str, Any], name: str) -> None:
    status, _, answer = served.post("/v1/completions", **fields)
    assert status == 400, answer
    error = require_form(json.dumps(answer).encode())
    assert re.split(r"[.\[]", error["param"])[0] == name
    assert name in error["message"]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages"),
    ({"messages": [*HI, {"role": "system", "content": "late"}]}, "messages"),  # the template raises
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": HI, "tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": HI, "prompt": "a"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "name"), BAD_CHATS)
def test_a_bad_chat_is_named(served: Running, fields: dict[str, Any], name: str) -> None:
    status, _, answer = served.post("/v1/chat/completions", **fields)
    assert status == 400, answer
    assert re.split(r"[.\[]", require_form(json.dumps(answer).encode())["param"])[0] == name


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": {}}, "prompt", "'prompt': it must be a string or a list"),
        ({"prompt": 7}, "prompt", "'prompt' is 7: it must be a string or a list"),
        ({"prompt": [[]]}, "prompt[0]", "'prompt[0]': list should have at least 1 item, not 0"),
        ({"prompt": [None]}, "prompt[0]", "'prompt[0]': it must be an integer, a string or a list"),
        ({"prompt": ["a", 1]}, "prompt[1]", "is 1: it must be a string"),
        ({"prompt": [1, "a"]}, "prompt[1]", "it must be an integer"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]", "is -1: it must be greater"),
        ({"prompt": [[1], [2, 258]]}, "prompt[1]", "prompt[1]"),
        ({"prompt": ["a", ""]}, "prompt[1]", "has no tokens"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": ["a", ""]}, "stop[1]", "at least 1"),
        ({"stop": 5}, "stop", "is 5: it must be a string or a list"),
        ({"stream": True, "stream_options": []}, "stream_options", "it must be an object"),
        ({"stream": True, "stream_options": {"str": 1}}, "stream_options.str", "unknown field 'stream_options.str'"),
        ({"temperature": 2.5}, "temperature", "is 2.5: it must be less than or equal to 2"),
        ({"n": True}, "n", "is true: "),
        ({"seed": 10**3000}, "seed", "less than"),
        ({"max_tokens": 10**3000}, "max_tokens", "room for"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'logit_bias': its keys must be token ids; one is 'x'"),
        ({"logit_bias": {"1" * 3000: 1}}, "logit_bias", "its keys must be token ids"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias", "its keys must be token ids"),
        ({"logit_bias": {"7": 10**3000}}, "logit_bias", "'logit_bias': the bias of token 7 must be from -100 to 100"),
        ({"logit_bias": {"7": True}}, "logit_bias", "the bias of token 7 must be"),
        ({"logit_bias": {"7": [[[[]]]]}}, "logit_bias", "the bias of token 7 must be"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "logit_bias has token 300; the model's last token is 257"),
        ({"logit_bias": 5}, "logit_bias", "'logit_bias' is 5: it must be an object from token ids to numbers"),
        ({"min_tokens": 20}, "min_tokens", "min_tokens is 20; it must be at most max_tokens, 16"),
        ({"cache_salt": "a" * 1025}, "cache_salt", "at most 1024"),
        (
            {"lora_name": "x"},
            "lora_name",
            "'lora_name' is not supported by this server: it serves one model and loads no",
        ),
        ({"guided_regex": "x"}, "guided_regex", "is not supported by this server: it cannot constrain answers to a"),
        ({"str": 1}, "str", "unknown field"),
        ({"no-name": 1}, "no-name", "unknown field 'no-name'"),
        ({"temprature": 1}, "temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"a" * 300: 1}, "a" * 200, "unknown field"),
    ],
)
def test_error_describes_the_intended_type(served: Running, fields: dict[str, Any], name: str, words: str) -> None:
    status, _, answer = served.post("/v1/completions", **{"prompt": "a", **fields})
    assert (status, answer["error"]["param"]) == (400, name)
    assert words in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("message", "name", "words"),
    [
        ("hi", "messages[0]", "it must be an object"),
        ({}, "messages[0].role", "missing"),
        ({"role": "tool", "content": "a"}, "messages[0].role", "it must be 'system', 'developer', 'user' or"),
        ({"role": "user", "content": 5}, "messages[0].content", "is 5: it must be a string or a list"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]", "is 5: it must be an object"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "missing"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
            "it must be 'text'",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls", "is not supported by this"),
        ({"role": "user", "content": "a", "no name": 1}, "messages[0].no name", "unknown field"),
    ],
)
def test_a_field_of_a_message_is_named_as_clients_write_it(
    served: Running, message: Any, name: str, words: str
) -> None:
    status, _, answer = served.post("/v1/chat/completions", messages=[message])
    assert (status, answer["error"]["param"]) == (400, name)
    assert words in answer["error"]["message"]


MANY = b"{" + b",".join(b'"x%d":1' % number for number in range(90_000)) + b"}"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (MANY, "x0"),
        (b'{"model": "tiny", "messages": [' + MANY + b"]}", "messages[0].x0"),
        (
            b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text",' + MANY[1:] + b"]}]}",
            "messages[0].content[0].x0",
        ),
        (b'{"model": "tiny", "stream": true, "messages": [], "stream_options": ' + MANY + b"}", "stream_options.x0"),
    ],
)
def test_unknown_fields_by_the_ten_thousand_cost_one_error(body: bytes, name: str) -> None:
    """pydantic would make an error for each, which takes the better part of a second for a body of the usual limit."""
    with pytest.raises(ApiError) as caught:
        parse_request(ChatRequest, body)
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")
    found = caught.value.__context__
    assert isinstance(found, ValidationError)
    assert found.error_count() < 5


def test_biases_by_the_ten_thousand_cost_one_error() -> None:
    biases = b",".join(b'"%d":101' % number for number in range(90_000))
    with pytest.raises(ApiError, match="'logit_bias': it has 90000 tokens; the limit is 1024") as caught:
        parse_request(ChatRequest, b'{"model": "tiny", "messages": [], "logit_bias": {' + biases + b"}}")
    found = caught.value.__context__
    assert isinstance(found, ValidationError)
    assert found.error_count() < 5


@pytest.mark.parametrize("salt", [b'"' + b"x" * 1_000_000 + b'"', b"[" * 100 + b"]" * 100, b'"\\ud800"', b"1e400"])
def test_a_hostile_salt_is_refused_in_a_short_sentence(salt: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(ChatRequest, b'{"model": "tiny", "messages": [{"role": "user"}], "cache_salt": ' + salt + b"}")
    assert caught.value.status == 400
    assert len(str(caught.value)) < 200


def test_no_list_has_more_items_than_the_limit() -> None:
    part = {"type": "text", "text": ""}
    for fields, name in (
        ({"messages": HI * 2049}, "messages"),
        ({"messages": [{"role": "user", "content": [part] * 2049}]}, "messages[0].content"),
    ):
        with pytest.raises(ApiError, match="2048") as caught:
            parse_request(ChatRequest, json.dumps({"model": MODEL, **fields}).encode())
        assert caught.value.param == name
    assert (
        len(parse_request(ChatRequest, json.dumps({"model": MODEL, "messages": HI * 2048}).encode()).messages) == 2048
    )
    with pytest.raises(ApiError, match="it has 3000 prompts; the limit is 2048"):
        parse_request(CompletionRequest, json.dumps({"model": MODEL, "prompt": [[1]] * 3000}).encode())
    many_tokens = parse_request(CompletionRequest, json.dumps({"model": MODEL, "prompt": [7] * 3000}).encode())
    assert many_tokens.prompts() == [[7] * 3000]


@pytest.mark.parametrize(
    ("before", "element", "after"),
    [
        (b'"prompt": [', b"null", b"]"),
        (b'"prompt": [[', b"-1", b"]]"),
        (b'"messages": [', b"1", b"]"),
        (b'"messages": [{"role": "user", "content": [', b"1", b"]}]"),
        (b'"messages": [{"role": "user"}], "stop": [', b"1", b"]"),
        (b'"messages": [{"role": "user"}], "stop_token_ids": [', b"-1", b"]"),
        (b'"messages": [{"role": "user"}], "logit_bias": {"a": [', b"1", b"]}"),
    ],
)
def test_bad_elements_by_the_hundred_thousand_cost_one_error(before: bytes, element: bytes, after: bytes) -> None:
    """An error for each would take seconds and a gigabyte, and every other client would wait."""
    body = b'{"model": "tiny", ' + before + b",".join([element] * 100_000) + after + b"}"
    kind = CompletionRequest if b"prompt" in before else ChatRequest
    with pytest.raises(ApiError) as caught:
        parse_request(kind, body)
    found = caught.value.__context__
    assert isinstance(found, ValidationError)
    assert found.error_count() < 10


def test_a_prompt_beyond_the_context_has_the_code_that_clients_know(served: Running) -> None:
    answer = served.post("/v1/completions", prompt="a" * 600)[2]
    assert answer["error"]["code"] == "context_length_exceeded"


def test_unknown_models_and_paths_get_404(served: Running) -> None:
    status, _, answer = served.call("POST", "/v1/completions", b'{"model": "other", "prompt": "a"}')
    assert (status, require_form(answer)["code"]) == (404, "model_not_found")
    for method, path, wanted in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/health/x", 404),
        ("GET", "/v1/models/other/", 404),
        ("POST", "/v1/completions/", 400),
        ("X" * 5000, "/health", 405),
    ):
        status, _, answer = served.call(method, path)
        assert status == wanted, path
        assert len(require_form(answer)["message"]) < 300


# ---------------------------------------------------------------- fields


def test_path_without_v1_gets_a_hint(served: Running) -> None:
    _, _, answer = served.post("/chat/completions", messages=HI)
    assert answer["error"]["message"] == "POST /chat/completions: Not Found; OpenAI's paths begin with /v1/ here"
    assert "begin with" not in served.post("/v1/embeddings")[2]["error"]["message"]


def test_harmless_fields_change_nothing() -> None:
    body = {"model": MODEL, "messages": HI, **{name: {"a": 1} for name in HARMLESS}}
    plain = parse_request(ChatRequest, json.dumps({"model": MODEL, "messages": HI}).encode())
    assert parse_request(ChatRequest, json.dumps(body).encode()) == plain


KINDS: list[type[GenerationFields]] = [ChatRequest, CompletionRequest]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in kind.refused])
def test_refused_field_may_have_its_neutral_value(kind: type[GenerationFields], name: str) -> None:
    for neutral in (None, *kind.refused[name]):
        assert requested_fields({name: neutral}, kind.refused) == {}
    for value in (True, False, 7, "words", [1], {"a": 1}):
        if not any(value is neutral for neutral in kind.refused[name]):
            with pytest.raises(ApiError) as caught:
                requested_fields({name: value}, kind.refused)
            assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_understood_and_refused(kind: type[GenerationFields]) -> None:
    assert not set(kind.model_fields) & (set(kind.refused) | HARMLESS)
    assert not set(kind.refused) & HARMLESS


@pytest.mark.parametrize("kind", KINDS)
def test_the_guide_names_every_field(kind: type[GenerationFields]) -> None:
    guide = (ROOT / "docs" / "serving.md").read_text()
    start, end = guide.index("## Fields"), guide.index("## Errors")
    named = set(re.findall(r"`([a-z_]+)`", guide[start:end]))
    assert set(kind.model_fields) - {"stream_options"} <= named
    assert set(kind.refused) | HARMLESS <= named


#: Every field of vLLM 0.32's requests with its default, as clients send it that fill in what they do not set.
VLLM_DEFAULTS: dict[str, Any] = {
    "echo": False, "frequency_penalty": None, "logit_bias": None, "n": 1, "presence_penalty": None, "seed": None,
    "stop": [], "stream": False, "stream_options": None, "temperature": None, "top_p": None, "user": None,
    "use_beam_search": False, "top_k": None, "min_p": None, "repetition_penalty": None, "watermarking": None,
    "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False,
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None, "truncation_side": None, "allowed_token_ids": None, "prompt_logprobs": None,
    "logprob_token_ids": None, "bad_words": [], "response_format": None, "structured_outputs": None, "priority": 0,
    "request_id": "5f0c", "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None,
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "mm_payload": "tensors",
    "return_mm_kwargs": None, "cache_salt": None, "kv_transfer_params": None, "ec_transfer_params": None,
    "vllm_xargs": None, "repetition_detection": None, "thinking_token_budget": None, "stream_interval": None,
}  # fmt: skip
VLLM_COMPLETION_DEFAULTS = {"logprobs": None, "suffix": None, "prompt_embeds": None, "add_special_tokens": True}
VLLM_CHAT_DEFAULTS: dict[str, Any] = {
    "logprobs": False, "top_logprobs": 0, "max_completion_tokens": None, "tools": None, "tool_choice": "none",
    "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "documents": None, "chat_template": None,
    "chat_template_kwargs": None, "media_io_kwargs": None, "mm_processor_kwargs": None, "return_prompt_text": None,
}  # fmt: skip
#: What other clients send beside them: empty lists and objects, and OpenAI's own defaults.
OTHER_DEFAULTS: dict[str, Any] = {
    "best_of": 1, "tools": [], "tool_choice": "auto", "functions": [], "function_call": "auto", "detokenize": True,
    "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "top_k": -1,
    "min_p": 0, "repetition_penalty": 1, "logits_processors": [], "response_format": {"type": "text"},
    "modalities": ["text"], "vllm_xargs": {}, "store": False, "service_tier": "auto", "early_stopping": False,
}  # fmt: skip


@pytest.mark.parametrize("others", [{}, OTHER_DEFAULTS], ids=["vllm", "others"])
def test_defaults_that_clients_send_change_nothing(served: Running, others: dict[str, Any]) -> None:
    wanted = {"max_tokens": 8, "seed": 3}
    for path, own, defaults in (
        ("/v1/completions", {"prompt": "abc"}, VLLM_COMPLETION_DEFAULTS),
        ("/v1/chat/completions", {"messages": HI}, VLLM_CHAT_DEFAULTS),
    ):
        plain = served.post(path, **own, **wanted)[2]
        status, _, answer = served.post(path, **{**VLLM_DEFAULTS, **defaults, **others, **own, **wanted})
        assert (status, answer.get("choices")) == (200, plain["choices"]), answer


@pytest.mark.parametrize(
    "values", [{"max_body_bytes": 1}, {"max_waiting": -1}, {"body_seconds": 0}, {"request_seconds": float("nan")}]
)
def test_server_limits_outside_their_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(values))):
        ServerLimits(**values)


def test_model_name_must_be_valid_unicode() -> None:
    with pytest.raises(InvalidArgument, match=r"model_name holds '\\udcff' at position 1; it must be valid Unicode"):
        create_app(tiny_engine(), ServerOptions("a\udcff"))


# ---------------------------------------------------------------- size and time


def test_a_body_beyond_the_limit_gets_413(served: Running) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a" * 5000}).encode()
    status, headers, answer = served.call("POST", "/v1/completions", body)
    assert (status, headers["connection"]) == (413, "close")
    assert require_form(answer)["code"] == "request_too_large"


def test_a_body_without_a_length_is_counted_as_it_comes(served: Running) -> None:
    with socket.create_connection((served.host, served.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(5):  # 5,000 bytes, and it has not said that it ends
            client.sendall(b"3e8\r\n" + b"a" * 1000 + b"\r\n")
        assert b" 413 " in client.recv(4096)


def test_body_that_never_ends_gets_408(impatient: Running) -> None:
    with socket.create_connection((impatient.host, impatient.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + JSON + b'Content-Length: 100\r\n\r\n{"model"'
        )
        answer = b""
        while piece := client.recv(4096):
            answer += piece
        assert b" 408 " in answer
        assert b"timeout" in answer


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_silent_connection_is_closed(impatient: Running, sent: bytes) -> None:
    with socket.create_connection((impatient.host, impatient.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(sent)
        received = b""
        while piece := client.recv(4096):
            received += piece
        assert received.startswith(b"HTTP/1.1 200") is sent.endswith(b"\r\n\r\n")


def test_non_http_input_is_answered_and_closed(served: Running) -> None:
    with socket.create_connection((served.host, served.port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        received = b""
        while piece := client.recv(4096):
            received += piece
    assert b" 400 " in received


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_only_json_is_read(served: Running, kind: str) -> None:
    """What a browser sends to another site without asking first is not taken."""
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    status, _, answer = served.call("POST", "/v1/completions", body, {"Content-Type": kind})
    assert status == 415
    require_form(answer)


def test_a_compressed_body_is_refused(served: Running) -> None:
    status, _, answer = served.call("POST", "/v1/completions", b"x", {"Content-Encoding": "gzip"})
    assert status == 415
    require_form(answer)


def test_requests_beyond_the_capacity_get_429(served: Running) -> None:
    """Four run, two wait, and the others get 429 with Retry-After."""

    def ask(number: int) -> tuple[int, dict[str, str], dict[str, Any]]:
        return served.post("/v1/completions", prompt=[1, 2, number], max_tokens=60, temperature=0)

    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(ask, range(100)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    for status, headers, answer in answers:
        if status == 200:
            assert answer["usage"]["completion_tokens"] == 60
        else:
            assert int(headers["retry-after"]) >= 1
            assert answer["error"]["code"] == "rate_limit_exceeded"
    assert served.post("/v1/completions", prompt="a", max_tokens=2)[0] == 200


@pytest.mark.parametrize("template", ["{{ messages + 1 }}", "{{ 'a' * 2**22 }}"])
def test_a_chat_template_that_fails_or_makes_too_much_is_a_bad_request(template: str) -> None:
    engine = tiny_engine()
    engine.tokenizer.chat_template = template
    with running_server(engine) as running:
        status, _, answer = running.post("/v1/chat/completions", messages=HI)
        assert status == 400, answer
        error = require_form(json.dumps(answer).encode())
        assert error["param"] == "messages"
        assert "chat template" in error["message"]
        running.require_idle()
