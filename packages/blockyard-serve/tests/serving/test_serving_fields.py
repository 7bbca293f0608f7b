"""Fields that other servers have: salts of the cache, penalties, biases, a least length; and what the pool can hold."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from blockyard_engine import SamplingParams
from blockyard_serve.cli.serve import _summary
from blockyard_testing.servers import MODEL, Running, running_server, tiny_engine

pytestmark = pytest.mark.usefixtures("nothing_leaks")

PROMPT = "Tenants share a server, and with a salt of their own they share no block of keys and values."
CACHED = (len(PROMPT) - 1) // 16 * 16


def cached_tokens(running: Running, salt: str | None, prompt: str = PROMPT, **fields: Any) -> int:
    """How much of the prompt a request with this salt finds in the cache."""
    body = {} if salt is None else {"cache_salt": salt}
    answer = running.client().completions.create(model=MODEL, prompt=prompt, max_tokens=2, extra_body=body, **fields)
    return int(answer.usage.prompt_tokens_details.cached_tokens)


# ---------------------------------------------------------------- salts


def test_requests_share_blocks_only_under_equal_salts(served: Running) -> None:
    salts = [None, "tenant 1", "tenant 2", "tenant 1 ", "\N{GRINNING FACE}", "\0", "x" * 1024, "x" * 1023]
    assert [cached_tokens(served, salt) for salt in salts] == [0] * len(salts)
    assert [cached_tokens(served, salt) for salt in salts] == [CACHED] * len(salts)


def test_a_salt_counts_for_chats_streams_and_every_prompt_of_a_request(served: Running) -> None:
    client, messages = served.client(), [{"role": "user", "content": PROMPT}]

    def chat(salt: str) -> int:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": salt},
        )
        return int([chunk.usage for chunk in chunks][-1].prompt_tokens_details.cached_tokens)

    assert (chat("a"), chat("b"), chat("a")) == (0, 0, (len(PROMPT) + len("<|turn|>user:")) // 16 * 16)
    prompts = [f"{number} {PROMPT}" for number in range(2)]
    assert [cached_tokens(served, "many", prompt) for prompt in prompts] == [0, 0]
    both = client.completions.create(model=MODEL, prompt=prompts, max_tokens=2, extra_body={"cache_salt": "many"})
    assert both.usage.prompt_tokens_details.cached_tokens == sum((len(each) - 1) // 16 * 16 for each in prompts)
    none = client.completions.create(model=MODEL, prompt=prompts, max_tokens=2, extra_body={"cache_salt": "other"})
    assert none.usage.prompt_tokens_details.cached_tokens == 0


def test_a_salt_does_not_change_the_answer(served: Running) -> None:
    texts = {
        served.post("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0, **salt)[2]["choices"][0]["text"]
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    }
    assert texts == {tiny_engine().generate([PROMPT], SamplingParams(max_tokens=12))[0].text}


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": -1.5},
        {"logit_bias": {"65": 100, "66": 99.5}},
        {"min_tokens": 20, "stop": ["e", "a"]},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_fields_reach_the_engine(served: Running, fields: dict[str, Any]) -> None:
    wanted = {"temperature": 1.5, "seed": 4, "max_tokens": 24}
    _, _, answer = served.post("/v1/completions", prompt=PROMPT, **wanted, **fields)
    params: dict[str, Any] = {**wanted, **fields}
    if "logit_bias" in fields:
        params["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    (own,) = tiny_engine().generate([PROMPT], SamplingParams(**params))
    assert answer["choices"][0]["text"] == own.text
    assert answer["usage"]["completion_tokens"] == len(own.token_ids)
    del params[next(iter(fields))]
    assert own.token_ids != tiny_engine().generate([PROMPT], SamplingParams(**params))[0].token_ids


# ---------------------------------------------------------------- what the pool can hold


@pytest.mark.parametrize(("num_blocks", "longest"), [(20, 305), (200, 512), (2, 17)])
def test_longest_sequence_fits_the_pool(num_blocks: int, longest: int) -> None:
    engine = tiny_engine(num_blocks=num_blocks)
    small = " (the model's context is 512)" if longest < 512 else ""
    assert _summary(engine).endswith(f"; sequences of up to {longest} tokens{small}")  # the start-up line
    with running_server(engine) as running:
        assert running.client().models.retrieve(MODEL).max_model_len == longest == engine.max_model_len
        prompt = [7] * (longest - 4)
        status, _, answer = running.post("/v1/completions", prompt=prompt, max_tokens=4, ignore_eos=True)
        assert (status, answer["usage"]["total_tokens"]) == (200, longest)
        _, _, answer = running.post("/v1/completions", prompt=prompt, max_tokens=5)
        small = f", of which the pool of {num_blocks} blocks holds {longest}" if longest < 512 else ""
        said = f"'prompt' has {longest - 4} tokens and 'max_tokens' is 5; there is room for 4 new tokens"
        assert answer["error"]["message"] == f"{said} (the context is 512 tokens{small})"
        _, _, answer = running.post("/v1/completions", prompt=[7] * longest)
        said = f"'prompt' has {longest} tokens; the context is 512 tokens{small}, answer included"
        assert answer["error"]["message"] == said
        chat = running.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], ignore_eos=True)
        assert chat[0] == (400 if num_blocks == 2 else 200)  # its template is longer than 17 tokens
        assert chat[0] == 400 or chat[2]["usage"]["total_tokens"] == longest
        running.require_idle()
