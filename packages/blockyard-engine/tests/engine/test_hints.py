"""Sessions and hints: the engine passes them to the cache, and no token depends on them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import InvalidArgument
from blockyard.answers import HintOutcome
from blockyard_engine import Engine, SamplingParams
from blockyard_testing.tiny_models import mixed_prompts

SAMPLING = SamplingParams(max_tokens=4)
#: Prompts of 8 blocks each.
PROMPTS = mixed_prompts((65, 65, 65, 65))


class Clock:
    """A clock set by the test."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def load_engine(llama: Any, clock: Clock | None = None, **options: Any) -> Engine:
    """Return an engine with room for three prompts but not four."""
    return Engine(llama, **{"num_blocks": 31, "block_size": 8, "clock": clock or Clock(), **options})


def finish(engine: Engine) -> dict[int, Any]:
    found = {}
    while engine.has_unfinished:
        for result in engine.step().finished:
            found[result.request_id] = result
        engine.cache.check()
    return found


def run(engine: Engine, prompt: list[int], session: str | None = None, **sampling: Any) -> Any:
    number = engine.add_request(prompt, SamplingParams(**{"max_tokens": 4, **sampling}), session=session)
    return finish(engine)[number]


def test_an_ended_session_is_evicted_first(llama: Any) -> None:
    engine = load_engine(llama)
    for number, prompt in enumerate(PROMPTS[:3]):
        run(engine, prompt, f"s{number}")
    assert engine.hint("s2", over=True) is HintOutcome.ACCEPTED
    run(engine, PROMPTS[3], "s3")
    # Without the hint the oldest, s0, would have gone.
    assert [run(engine, prompt).num_cached_tokens for prompt in PROMPTS[:2]] == [64, 64]
    assert run(engine, PROMPTS[2]).num_cached_tokens < 64


def test_without_a_hint_the_oldest_session_is_evicted(llama: Any) -> None:
    engine = load_engine(llama)
    for number, prompt in enumerate(PROMPTS):
        run(engine, prompt, f"s{number}")
    assert run(engine, PROMPTS[2]).num_cached_tokens == 64
    assert run(engine, PROMPTS[0]).num_cached_tokens < 64


def test_a_hint_ends_when_withdrawn_or_at_the_next_turn(llama: Any) -> None:
    engine = load_engine(llama)
    for number, prompt in enumerate(PROMPTS[:3]):
        run(engine, prompt, f"s{number}")
    engine.hint("s1", over=True)
    engine.hint("s2", over=True)
    assert engine.hint("s1") is HintOutcome.ACCEPTED  # taken back
    assert run(engine, PROMPTS[2], "s2").num_cached_tokens == 64  # and it goes on after all
    run(engine, PROMPTS[3], "s3")
    assert run(engine, PROMPTS[2]).num_cached_tokens == 64
    assert run(engine, PROMPTS[1]).num_cached_tokens == 64


def test_completions_of_a_request_are_all_its_sessions(llama: Any) -> None:
    engine = load_engine(llama, num_blocks=60)
    run(engine, PROMPTS[1], "older")
    run(engine, PROMPTS[0], "n", n=3, temperature=1.0, seed=1, max_tokens=20)
    assert engine.hint("n", over=True) is HintOutcome.ACCEPTED
    run(engine, list(reversed(PROMPTS[2] + PROMPTS[3])) * 3)
    assert run(engine, PROMPTS[1]).num_cached_tokens == 64
    assert run(engine, PROMPTS[0]).num_cached_tokens < 64


@pytest.mark.parametrize("options", [{}, {"num_cpu_blocks": 64, "preemption": "swap"}], ids=["recompute", "swap"])
def test_a_preempted_request_stays_in_its_session(llama: Any, options: dict[str, Any]) -> None:
    engine = load_engine(llama, num_blocks=24, **options)
    numbers = [
        engine.add_request(prompt, SamplingParams(max_tokens=40), session=f"s{number}")
        for number, prompt in enumerate(PROMPTS[:2])
    ]
    found = finish(engine)
    assert sum(found[number].num_preemptions for number in numbers) > 0
    assert [engine.hint(f"s{number}", over=True) for number in range(2)] == [HintOutcome.ACCEPTED] * 2
    engine.cache.check()


def test_no_token_depends_on_hints(llama: Any) -> None:
    plain = load_engine(llama).generate(PROMPTS, SAMPLING)
    engine = load_engine(llama)
    numbers = [engine.add_request(prompt, SAMPLING, session=f"s{n % 2}") for n, prompt in enumerate(PROMPTS)]
    found: dict[int, list[int]] = {}
    while engine.has_unfinished:
        for result in engine.step().finished:
            found[result.request_id] = result.token_ids
        engine.hint("s0", over=True)
        engine.hint("s1")
        engine.cache.check()
    assert [found[number] for number in numbers] == [result.token_ids for result in plain]


def test_hints_for_unknown_and_waiting_sessions_return_unknown(llama: Any) -> None:
    engine = load_engine(llama)
    assert engine.hint("nobody", over=True) is HintOutcome.UNKNOWN
    number = engine.add_request(PROMPTS[0], SAMPLING, session="waits")
    assert engine.hint("waits", over=True) is HintOutcome.UNKNOWN  # no step has admitted it
    engine.step()
    assert engine.hint("waits", over=True) is HintOutcome.ACCEPTED  # of what it will leave
    engine.abort_request(number)
    assert engine.hint("waits", over=True) is HintOutcome.ACCEPTED
    engine.cache.check()


@pytest.mark.parametrize("bad", ["", "x" * 201, 5, b"name"])
def test_bad_sessions_change_nothing(llama: Any, bad: Any) -> None:
    engine = load_engine(llama)
    with pytest.raises(InvalidArgument, match="session"):
        engine.add_request(PROMPTS[0], session=bad)
    assert not engine.has_unfinished
    with pytest.raises(InvalidArgument):
        engine.hint(bad, over=True)


@pytest.mark.parametrize("bad", [{"over": 1}, {"over": None}, {"over": "yes"}])
def test_bad_hints_are_refused(llama: Any, bad: dict[str, Any]) -> None:
    engine = load_engine(llama)
    run(engine, PROMPTS[0], "s")
    with pytest.raises(InvalidArgument):
        engine.hint("s", **bad)
