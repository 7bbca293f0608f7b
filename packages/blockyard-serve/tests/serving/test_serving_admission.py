"""A server whose order of admission is not arrival answers everybody, and wakes for what arrives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.servers import Running, running_server, tiny_engine

#: 96 tokens each, six blocks of 16.
PROMPTS = ["".join(chr(97 + (7 * number + place) % 26) for place in range(96)) for number in range(6)]


def complete(running: Running, number: int) -> str:
    prompt, answers = PROMPTS[number], ""
    for _ in range(3):
        status, _, body = running.post(
            "/v1/completions", prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True, session_id=f"s{number}"
        )
        assert status == 200
        text = body["choices"][0]["text"]
        answers += text
        prompt += text + "more"
    return answers


def answers_of(admission: str) -> tuple[list[str], dict[str, float]]:
    """Run six sessions at once in a pool for one and a half."""
    with running_server(tiny_engine(14, max_num_seqs=4, admission=admission)) as running:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda number: complete(running, number), range(6)))
        return found, running.figures()


def test_sessions_that_overflow_the_pool_get_the_same_answers_under_every_order() -> None:
    by_arrival, plain = answers_of("arrival")
    by_room, figures = answers_of("room")
    assert by_room == by_arrival
    assert "blockyard:waiting_missing_tokens" not in plain
    assert plain["blockyard:longest_wait_seconds"] == figures["blockyard:longest_wait_seconds"] == 0
    assert figures["blockyard:waiting_missing_tokens"] == 0
    assert figures["blockyard:lane_admissions_total"] >= 0


def test_a_request_is_answered_while_another_is_held_back() -> None:
    """The engine thread sleeps for up to a second while nobody may start, and a new request wakes it."""
    engine = tiny_engine(14, admission="room", admission_lane=1e6)
    control = engine.admission
    assert control is not None
    control.estimate.note_step(1, 1e12)  # contexts cost so much that room is kept for them for years
    with running_server(engine) as running, ThreadPoolExecutor(1) as pool:
        complete(running, 0)
        held = pool.submit(complete, running, 1)
        wait_until(lambda: running.figures()["blockyard:waiting_missing_tokens"] > 0)
        assert running.figures()["vllm:num_requests_running"] == 0
        assert not held.done()
        control.estimate.note_step(10**18, 1.0)  # and now next to nothing
        assert complete(running, 0)
        assert held.result(PATIENCE_SECONDS)
