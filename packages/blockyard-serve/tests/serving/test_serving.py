"""The server with OpenAI's own client, over a tiny model: answers, streams, usage, figures, the key."""

from __future__ import annotations

import json
import runpy
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from blockyard.errors import InvalidArgument
from blockyard.metrics.families import FAMILIES
from blockyard_engine import SamplingParams
from blockyard_serve.http.access import KeyGuard, read_key_file
from blockyard_serve.jobs.engine_reading import COUNTERS, GAUGES
from blockyard_testing.places import ROOT
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

pytestmark = pytest.mark.usefixtures("nothing_leaks")

PROMPT = "Blocks are pages of keys and values, and pages are shared. "
CHAT = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "Well?"}]


def expected(prompt: Any, **sampling: Any) -> Any:
    """What an engine of its own gives for the prompt."""
    return tiny_engine().generate([prompt], SamplingParams(**sampling))[0]


def joined(stream: Any) -> dict[int, str]:
    """The text of each completion of a stream of chat chunks."""
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


# ---------------------------------------------------------------- answers


def test_models_lists_the_served_model(served: Running) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "blockyard"
    assert client.models.retrieve(MODEL).max_model_len == 512
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("another")


def test_completion_equals_the_engines_result(served: Running) -> None:
    answer = served.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    own = expected(PROMPT, max_tokens=12)
    assert answer.choices[0].text == own.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == own.num_prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == own.num_prompt_tokens + 12


def test_a_chat_goes_through_the_template(served: Running) -> None:
    answer = served.client().chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected(CHAT, max_tokens=12).text
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"


def test_content_may_come_in_parts_and_from_a_developer(served: Running) -> None:
    parts = [{"type": "text", "text": "We"}, {"type": "text", "text": "ll?"}]
    messages = [{"role": "developer", "content": PROMPT}, {"role": "user", "content": parts}]
    answer = served.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=6, temperature=0)
    assert answer.choices[0].message.content == expected(CHAT, max_tokens=6).text


def test_an_answer_can_be_sent_back(served: Running) -> None:
    client = served.client()
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4, temperature=0)
    longer = [*CHAT, answer.choices[0].message, {"role": "user", "content": "And?"}]
    again = client.chat.completions.create(model=MODEL, messages=longer, max_tokens=4, temperature=0)
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_prompts_may_be_token_ids_and_several(served: Running) -> None:
    prompts = [[5, 6, 7], [8, 9], [1]]
    answer = served.client().completions.create(model=MODEL, prompt=prompts, max_tokens=5, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    wanted = [expected(prompt, max_tokens=5).text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [text for text in wanted for _ in range(2)]
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == 30


def test_a_seed_decides_the_draws(served: Running) -> None:
    def draw(seed: int | None) -> str:
        answer = served.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=2, seed=seed)
        return answer.choices[0].text

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert len({draw(None) for _ in range(3)}) > 1


def test_a_chat_without_a_limit_ends_at_the_context(served: Running) -> None:
    answer = served.client().chat.completions.create(model=MODEL, messages=CHAT, temperature=0, stop="\0never\0")
    assert answer.usage.total_tokens <= 512
    assert answer.choices[0].finish_reason in {"length", "stop"}
    assert answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == 512


# ---------------------------------------------------------------- streams


def test_stream_equals_the_whole_response(served: Running) -> None:
    wanted = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "temperature": 1.5, "seed": 3, "n": 3}
    whole = served.client().chat.completions.create(**wanted)
    streamed = joined(served.client().chat.completions.create(**wanted, stream=True))
    assert streamed == {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(streamed.values())) == 3


def test_streamed_completions_equal_the_whole_answer(served: Running) -> None:
    chunks = list(
        served.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(PROMPT, max_tokens=10).text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_each_completion_of_a_stream_ends_when_it_ends(served: Running) -> None:
    """The reason comes with the last token of a choice, while others go on."""
    wanted = {"model": MODEL, "messages": CHAT, "max_tokens": 40, "temperature": 2, "seed": 1, "n": 4}
    wanted["stop"] = ["e", "a"]
    whole = served.client().chat.completions.create(**wanted)
    reasons: dict[int, str] = {}
    order = []
    for chunk in served.client().chat.completions.create(**wanted, stream=True):
        for choice in chunk.choices:
            assert choice.index not in reasons  # nothing comes behind the end
            order.append(choice.index)
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    ends = sorted(max(at for at, index in enumerate(order) if index == each) for each in range(4))
    assert ends[0] < len(order) - 4, "all ends came together"


def test_stream_has_openais_events(served: Running) -> None:
    fields = {"model": MODEL, "messages": CHAT, "max_tokens": 3, "temperature": 0, "stream": True}
    status, headers, body = served.call("POST", "/v1/chat/completions", json.dumps(fields).encode())
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    first, last = json.loads(events[0][6:]), json.loads(events[-3][6:])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert "usage" not in first


def test_usage_is_in_the_last_chunk_of_a_stream(served: Running) -> None:
    chunks = list(
        served.client().chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


def test_usage_can_be_in_every_chunk_of_a_stream(served: Running) -> None:
    """vLLM's option, which load generators send."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        served.client().chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=5, n=2, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [10, 10]
    assert (chunks[0].choices[0].delta.role, counts[0]) == ("assistant", 0)
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_multibyte_character_is_sent_whole(served: Running) -> None:
    """Random bytes are seldom whole characters; what cannot be read is U+FFFD, and the same in both ways."""
    wanted = {"model": MODEL, "prompt": "éß漢", "max_tokens": 60, "temperature": 2, "seed": 11}
    whole = served.client().completions.create(**wanted).choices[0].text
    pieces = [
        chunk.choices[0].text for chunk in served.client().completions.create(**wanted, stream=True) if chunk.choices
    ]
    assert "".join(pieces) == whole
    assert not whole.isascii()


# ---------------------------------------------------------------- stop, probabilities, usage


def test_a_stop_string_ends_before_it(served: Running) -> None:
    text = expected(PROMPT, max_tokens=40).text
    stop = next(text[at : at + 3] for at in range(8, 30) if text.find(text[at : at + 3]) == at)
    wanted = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": ["\0\0\0\0", stop]}
    whole = served.client().completions.create(**wanted).choices[0]
    assert whole.text == text[: text.index(stop)]
    assert whole.finish_reason == "stop"
    chunks = list(served.client().completions.create(**wanted, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


def test_log_probabilities_of_a_chat_have_openais_format(served: Running) -> None:
    wanted = {"model": MODEL, "messages": CHAT, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    found = served.client().chat.completions.create(**wanted).choices[0].logprobs.content
    assert len(found) == 6
    for token in found:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy takes the likeliest
        assert token.bytes is None or bytes(token.bytes).decode() == token.token
    streamed = [
        token
        for chunk in served.client().chat.completions.create(**wanted, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in found]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in found], abs=1e-4)


def test_log_probabilities_of_a_completion_have_openais_format(served: Running) -> None:
    wanted = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    found = served.client().completions.create(**wanted, logprobs=2).choices[0].logprobs
    assert [len(each) for each in (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)] == [
        6
    ] * 4
    assert found.text_offset[0] == 0
    assert served.client().completions.create(**wanted).choices[0].logprobs is None


@pytest.mark.parametrize("stop", [None, True])
def test_text_offsets_are_positions_in_the_text(served: Running, stop: bool | None) -> None:
    """Of parts of characters too, which have no text of their own; in a stream as in a whole answer."""
    wanted = {"model": MODEL, "prompt": "éß漢", "max_tokens": 60, "temperature": 2, "seed": 11, "logprobs": 1}
    if stop:
        text = served.client().completions.create(**wanted).choices[0].text
        wanted["stop"] = [text[len(text) // 2 :][:3]]
    whole = served.client().completions.create(**wanted).choices[0]
    found = whole.logprobs
    assert "\ufffd" in found.tokens
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[0] == 0
    assert found.text_offset[-1] <= len(whole.text)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        has_text = "\ufffd" not in token and not token.startswith("<|")  # the others are a part, or special
        is_cut = stop is not None and offset + len(token) > len(whole.text)
        assert not has_text or is_cut or whole.text[offset:].startswith(token)
    streamed = [
        offset
        for chunk in served.client().completions.create(**wanted, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for offset in choice.logprobs.text_offset
    ]
    assert [min(offset, len(whole.text)) for offset in streamed] == found.text_offset


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/health", "/version", "/metrics", "/tokenize"])
def test_slash_at_the_end_of_a_path_changes_nothing(served: Running, path: str) -> None:
    body = b'{"prompt": "a"}' if path == "/tokenize" else None
    method = "POST" if body else "GET"
    (status, _, expected), (again, _, found) = (served.call(method, path + end, body) for end in ("", "/"))
    assert (status, again) == (200, 200)
    assert path == "/metrics" or found == expected


@pytest.mark.parametrize("logprobs", [0, 1, 3])
def test_the_chosen_token_is_among_the_alternatives(served: Running, logprobs: int) -> None:
    """As OpenAI has it: up to logprobs + 1 entries. A hot draw seldom takes one of the likeliest."""
    prompt = list(range(30, 60))
    wanted = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "temperature": 2, "seed": 5, "logprobs": logprobs}
    whole = served.client().completions.create(**wanted).choices[0].logprobs
    streamed = [chunk.choices[0].logprobs for chunk in served.client().completions.create(**wanted, stream=True)]
    pieces = [piece for piece in streamed if piece is not None]
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens
    for found in (whole, *pieces):
        for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert top[token] == logprob
            assert len(top) <= logprobs + 1
    assert any(len(top) == logprobs + 1 for top in whole.top_logprobs)


def test_cached_tokens_are_counted(served: Running) -> None:
    prompt = "A prompt that no other test in this file begins with, longer than two blocks of sixteen tokens."
    first, second = (
        served.client().completions.create(model=MODEL, prompt=prompt, max_tokens=2).usage for _ in range(2)
    )
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16


# ---------------------------------------------------------------- health, figures


def test_health_answers_200(served: Running) -> None:
    assert served.call("GET", "/health")[0] == 200


def test_metrics_of_dashboards_change_with_requests(served: Running) -> None:
    before = served.figures()
    served.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=3)
    served.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=3)
    after = served.figures()
    # Blocks are retained under a budget alone.
    whole = [family for family in FAMILIES if not family.label and family.name != "blockyard:kv_blocks_retained"]
    assert {*GAUGES, *(family.name for family in whole if not family.is_counter)} <= set(after)
    assert {f"{name}_total" for name in [*COUNTERS, *(each.name for each in whole if each.is_counter)]} <= set(after)
    grown = {name: after[name] - before[name] for name in before}
    assert grown["vllm:prefix_cache_queries_total"] == grown["vllm:prompt_tokens_total"] == 2 * len(PROMPT)
    assert grown["vllm:prefix_cache_hits_total"] == grown["vllm:prompt_tokens_cached_total"] > 0
    assert grown["vllm:generation_tokens_total"] == 6
    assert grown["vllm:time_to_first_token_seconds_count"] == grown["vllm:e2e_request_latency_seconds_count"] == 2
    assert grown["vllm:inter_token_latency_seconds_count"] == 4
    assert after["vllm:kv_cache_usage_perc"] == after["vllm:num_requests_running"] == 0


def test_two_servers_count_apart(served: Running) -> None:
    before = served.figures()
    with running_server(tiny_engine()) as other:
        other.client().completions.create(model=MODEL, prompt=PROMPT, max_tokens=3)
        assert other.figures()["vllm:generation_tokens_total"] == 3
    assert served.figures()["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"]


def test_example_chat_prints_an_answer(
    served: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["chat_client.py", "Well?", "--address", served.address])
    runpy.run_path(str(ROOT / "examples" / "chat_client.py"), run_name="__main__")
    assert "of them cached]" in capsys.readouterr().out


def test_example_chat_without_a_server_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr("sys.argv", ["chat_client.py", "Well?", "--address", address])
    with pytest.raises(SystemExit, match=rf"^chat_client: {address}: .* Is `blockyard serve` running there\?$"):
        runpy.run_path(str(ROOT / "examples" / "chat_client.py"), run_name="__main__")


# ---------------------------------------------------------------- the key


def test_requests_need_the_key() -> None:
    with running_server(tiny_engine(), api_key="open sesame") as guarded:
        assert guarded.client("open sesame").models.list().data[0].id == MODEL
        for wrong in ("open sesam", "open sesame2", "x"):
            with pytest.raises(openai.AuthenticationError) as caught:
                guarded.client(wrong).chat.completions.create(model=MODEL, messages=CHAT)
            assert "sesame" not in str(caught.value.body)
        status, headers, _ = guarded.call("GET", "/v1/models")
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert guarded.call("GET", "/v1/models", headers={"Authorization": "Basic open sesame"})[0] == 401
        assert guarded.call("GET", "/check")[0] == 401
        assert guarded.call("GET", "/health")[0] == 200


def test_a_key_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("  secret-1\n")
    assert read_key_file(path) == "secret-1"
    for bad in (b"", b"  \n", b"two\nlines", "schlüssel".encode(), b"\xff", b"x" * 5000):
        path.write_bytes(bad)
        with pytest.raises(InvalidArgument) as caught:
            read_key_file(path)
        assert "lines" not in str(caught.value)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_key_file(tmp_path / "none")


def test_key_is_stored_only_as_a_digest() -> None:
    assert "secret-1" not in str(vars(KeyGuard("secret-1")))
