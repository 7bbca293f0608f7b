"""`session_id` and POST /v1/hints: clients give hints for their own sessions, and cannot for others'."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard_serve import ServerLimits
from blockyard_serve.jobs.planner import session_name
from blockyard_serve.openai.session_hints import MAX_HINTS
from blockyard_testing.servers import Running, running_server, tiny_engine

#: 48 tokens and one, three blocks of 16 that can be hit.
PROMPTS = ["".join(chr(97 + (number + place) % 26) for place in range(49)) for number in range(4)]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(tiny_engine()) as running:
        yield running


def complete(running: Running, prompt: str, **fields: object) -> int:
    """Tokens of the prompt that the cache had."""
    status, _, body = running.post("/v1/completions", prompt=prompt, max_tokens=1, **fields)
    assert status == 200
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def send(running: Running, body: object, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    status, _, answer = running.call("POST", "/v1/hints", raw, sent)
    return status, json.loads(answer)


def outcome_of(running: Running, **hint: object) -> str:
    status, answer = send(running, hint)
    assert (status, answer["object"], len(answer["data"])) == (200, "list", 1)
    return str(answer["data"][0]["outcome"])


def test_session_that_is_over_is_evicted_first() -> None:
    # Ten blocks: three prompts of three full ones and a part, one after another.
    with running_server(tiny_engine(num_blocks=12, max_num_seqs=1)) as running:
        for number in range(3):
            complete(running, PROMPTS[number], session_id=f"s{number}")
        assert outcome_of(running, session_id="s2", action="over") == "accepted"
        complete(running, PROMPTS[3], session_id="s3")
        assert complete(running, PROMPTS[0]) == 48
        assert complete(running, PROMPTS[2]) < 48


def test_chats_have_sessions_too(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "session_id": "a chat"}
    assert server.post("/v1/chat/completions", **chat)[0] == 200
    assert outcome_of(server, session_id="a chat", action="over") == "accepted"
    assert outcome_of(server, session_id="a chat", action="forget") == "accepted"
    assert outcome_of(server, session_id="another", action="over") == "unknown"


def test_a_list_is_answered_in_its_order(server: Running) -> None:
    complete(server, PROMPTS[0], session_id="first")
    hints = [
        {"session_id": "nobody", "action": "over"},
        {"session_id": "first", "action": "forget"},
        {"session_id": "first", "action": "over"},
    ]
    status, answer = send(server, {"hints": hints})
    assert status == 200
    assert [(one["session_id"], one["action"], one["outcome"]) for one in answer["data"]] == [
        ("nobody", "over", "unknown"), ("first", "forget", "accepted"), ("first", "over", "accepted"),
    ]  # fmt: skip


def test_no_tenant_ends_anothers_session(server: Running) -> None:
    complete(server, PROMPTS[1], session_id="mine", cache_salt="secret a")
    for salt in ({}, {"cache_salt": "secret b"}, {"cache_salt": "mine"}):
        assert outcome_of(server, session_id="mine", action="over", **salt) == "unknown"
    assert outcome_of(server, session_id="mine", action="over", cache_salt="secret a") == "accepted"
    # The name that the engine knows is no session id.
    name = session_name("mine", "secret a")
    assert outcome_of(server, session_id=name, action="over") == "unknown"


def test_session_names_do_not_collide_or_reveal_ids() -> None:
    pairs = [("a", None), ("a", "a"), ("a", "b"), ("b", "a"), ("aa", None), ("a", "aa"), ("", "a")]
    names = [session_name(*pair) for pair in pairs]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch("[0-9a-f]{64}", name) for name in names)


def test_outcomes_are_counted(server: Running) -> None:
    def counts() -> dict[str, float]:
        page = server.call("GET", "/metrics")[2].decode()
        found = re.findall(r'^blockyard:hints_total\{.*outcome="(\w+)"\} (\S+)$', page, re.MULTILINE)
        return {outcome: float(value) for outcome, value in found}

    before = counts()
    assert set(before) == {"accepted", "refused", "unknown"}  # from the start
    complete(server, PROMPTS[2], session_id="counted")
    outcome_of(server, session_id="counted", action="over")
    send(server, {"hints": [{"session_id": "x", "action": "over"}] * 3})
    after = counts()
    assert {name: after[name] - before[name] for name in after} == {
        "accepted": 1, "refused": 0, "unknown": 3,
    }  # fmt: skip


GOOD = {"session_id": "s", "action": "over"}
BAD: list[tuple[dict[str, Any], str | None]] = [
    ({}, "session_id"),
    ({"session_id": "s"}, "action"),
    ({**GOOD, "session_id": ""}, "session_id"),
    ({**GOOD, "session_id": "s" * 201}, "session_id"),
    ({**GOOD, "session_id": 7}, "session_id"),
    ({**GOOD, "action": "end"}, "action"),
    ({**GOOD, "back_in": 1.0}, "back_in"),
    ({**GOOD, "action": "wait"}, "action"),
    ({**GOOD, "cache_salt": ""}, "cache_salt"),
    ({**GOOD, "sesion": "s"}, "sesion"),
    ({"hints": []}, "hints"),
    ({"hints": [GOOD] * (MAX_HINTS + 1)}, "hints"),
    ({"hints": GOOD}, "hints"),
    ({"hints": [GOOD, {**GOOD, "back_in": 1.0}]}, "hints[1].back_in"),
    ({"hints": [GOOD], "session_id": "s"}, "session_id"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_bad_hints_are_refused_by_name(server: Running, body: dict[str, Any], param: str | None) -> None:
    status, answer = send(server, body)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_unknown_field_of_a_hint_lists_the_known_ones(server: Running) -> None:
    status, answer = send(server, {"session_id": "s", "over": True})
    assert (status, answer["error"]["param"]) == (400, "over")
    assert answer["error"]["message"] == "unknown field 'over'; it takes action, cache_salt, session_id"


def test_list_with_one_bad_hint_has_no_effect(server: Running) -> None:
    complete(server, PROMPTS[3], session_id="kept")
    stats = server.call("GET", "/metrics")[2].decode()
    counted = re.findall(r"^blockyard:hints_total.*$", stats, re.MULTILINE)
    assert send(server, {"hints": [{"session_id": "kept", "action": "over"}, {"session_id": "kept"}]})[0] == 400
    again = re.findall(r"^blockyard:hints_total.*$", server.call("GET", "/metrics")[2].decode(), re.MULTILINE)
    assert counted == again


@pytest.mark.parametrize("bad", ["", "s" * 201, 7, ["s"], {"id": "s"}])
def test_bad_session_ids_of_requests_are_refused(server: Running, bad: object) -> None:
    status, _, answer = server.post("/v1/completions", prompt="a", max_tokens=1, session_id=bad)
    assert (status, answer["error"]["param"]) == (400, "session_id")


def test_session_requires_a_single_prompt(server: Running) -> None:
    status, _, answer = server.post("/v1/completions", prompt=["a", "b"], max_tokens=1, session_id="s")
    assert (status, answer["error"]["param"]) == (400, "session_id")
    assert server.post("/v1/completions", prompt=["a", "b"], max_tokens=1, session_id=None)[0] == 200


def test_the_key_guards_hints_and_bodies_are_bounded() -> None:
    with running_server(tiny_engine(), ServerLimits(max_body_bytes=1024), api_key="the key") as running:
        assert send(running, GOOD)[0] == 401
        assert send(running, GOOD, {"Authorization": "Bearer the key"})[0] == 200
        large = json.dumps({**GOOD, "session_id": "s" * 2000}).encode()
        assert send(running, large, {"Authorization": "Bearer the key"})[0] == 413
        assert running.call("GET", "/v1/hints", None, {"Authorization": "Bearer the key"})[0] == 405
