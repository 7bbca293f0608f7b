"""POST /v1/retain: prompts whose blocks stay longer, within a budget, and only one's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard_testing.servers import Running, running_server, tiny_engine

#: 48 tokens and one, three blocks of 16 that can be hit.
PROMPTS = ["".join(chr(97 + (number + place) % 26) for place in range(49)) for number in range(5)]
KEPT, OTHERS = PROMPTS[0], PROMPTS[1:]


def complete(running: Running, prompt: str, **fields: object) -> int:
    """Tokens of the prompt that the cache had."""
    status, _, body = running.post("/v1/completions", prompt=prompt, max_tokens=1, **fields)
    assert status == 200
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def retain(running: Running, **fields: object) -> tuple[int, dict[str, Any]]:
    status, _, body = running.call(
        "POST", "/v1/retain", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    return status, json.loads(body)


def server_of(retention_blocks: int = 6, num_blocks: int = 12) -> Any:
    """Room for ten blocks: three prompts of three full ones and a part, one after another."""
    options = {"retention_blocks": retention_blocks}
    return running_server(tiny_engine(num_blocks=num_blocks, max_num_seqs=1, cache_options=options))


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_retained_prompt_outlives_others(is_kept: bool) -> None:
    with server_of() as running:
        complete(running, KEPT)
        if is_kept:
            wish = {"object": "retention", "num_blocks": 3, "num_kept": 0, "num_tokens": 49}
            assert retain(running, prompt=KEPT) == (200, wish)
            assert retain(running, prompt=KEPT) == (200, wish | {"num_kept": 3})
            assert running.figures()["blockyard:kv_blocks_retained"] == 3
        for prompt in OTHERS:
            complete(running, prompt)
        assert complete(running, KEPT) == (48 if is_kept else 0)


def test_priority_0_ends_a_retention() -> None:
    with server_of() as running:
        complete(running, KEPT)
        retain(running, prompt=KEPT)
        assert retain(running, prompt=KEPT, priority=0)[1]["num_blocks"] == 3
        for prompt in OTHERS:
            complete(running, prompt)
        assert complete(running, KEPT) == 0


def test_retention_ends_after_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(num_blocks=12, max_num_seqs=1, cache_options={"retention_blocks": 6})
    now = 100.0
    monkeypatch.setattr(engine, "_clock", lambda: now)
    with running_server(engine) as running:
        complete(running, KEPT)
        retain(running, prompt=KEPT, seconds=60.0)
        for prompt in OTHERS:
            complete(running, prompt)
        assert complete(running, KEPT) == 48
        now = 161.0
        for prompt in OTHERS:
            complete(running, prompt)
        assert complete(running, KEPT) == 0


def test_messages_go_through_the_template() -> None:
    system = {"role": "system", "content": "You answer in one word, and never explain anything at all."}
    with server_of(num_blocks=60) as running:
        messages = [system, {"role": "user", "content": "Hi"}]
        assert running.post("/v1/chat/completions", messages=messages, max_tokens=1)[0] == 200
        status, answer = retain(running, messages=[system])
        assert (status, answer["num_blocks"]) == (200, answer["num_tokens"] // 16)
        assert answer["num_blocks"] > 2


def test_tenants_retain_their_own() -> None:
    with server_of() as running:
        complete(running, KEPT, cache_salt="one")
        assert retain(running, prompt=KEPT)[1]["num_blocks"] == 0
        assert retain(running, prompt=KEPT, cache_salt="two")[1]["num_blocks"] == 0
        assert retain(running, prompt=KEPT, cache_salt="one")[1]["num_blocks"] == 3


def test_invalid_retentions_are_refused() -> None:
    with server_of(retention_blocks=2) as running:
        complete(running, KEPT)
        status, answer = retain(running, prompt=KEPT)
        assert (status, answer["error"]["code"]) == (409, "over_budget")
        assert "3 more blocks would be retained; 0 of 2 are already" in answer["error"]["message"]
        for field, value in {"priority": -1, "seconds": 0.0, "cache_salt": "", "model": "other", "n": 2}.items():
            status, answer = retain(running, prompt=KEPT, **{field: value})
            assert (status, answer["error"]["param"]) == (404 if field == "model" else 400, field)
        assert retain(running)[1]["error"]["param"] == "prompt"
        assert retain(running, prompt=KEPT, messages=[])[0] == 400
        assert running.figures()["blockyard:kv_blocks_retained"] == 0


def test_retention_needs_a_budget() -> None:
    with running_server(tiny_engine()) as running:
        status, answer = retain(running, prompt=KEPT)
        assert status == 400
        assert "start it with --retention-blocks" in answer["error"]["message"]


def test_retention_needs_the_key() -> None:
    with running_server(tiny_engine(), api_key="secret") as running:
        assert retain(running, prompt=KEPT)[0] == 401
