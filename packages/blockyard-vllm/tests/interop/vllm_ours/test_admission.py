"""The option `admission`: sessions that overflow the pool compute less, with vLLM's tokens, and nobody starves."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from .engine import BLOCK_SIZE, Engine, request_of

SIZES = {"max_model_len": 1024, "max_num_batched_tokens": 128}


def engine_of(num_blocks: int, admission: str, **others: Any) -> tuple[Engine, list[float]]:
    """An engine, and the time of its order of admission, which the test sets."""
    engine = Engine("tokens", num_blocks, options={"admission": admission}, **SIZES, **others)
    now = [100.0]
    if engine.scheduler.admission is not None:
        engine.scheduler.admission.clock = lambda: now[0]
    return engine, now


def step(engine: Engine, now: list[float]) -> None:
    """A step, which takes a millisecond and a tenth for each token."""
    planned = engine.step()
    now[0] += 1e-3 + 1e-4 * sum(planned.values())
    engine.check()


def talk(engine: Engine, now: list[float], count: int = 8, turns: int = 8) -> int:
    """Serve sessions that send their next turn when they are answered; return the prompt tokens computed."""
    rng = random.Random(3)
    contexts = [[rng.randrange(50_000) for _ in range(96)] for _ in range(count)]
    turn = [0] * count

    def ask(number: int) -> None:
        contexts[number] += [rng.randrange(50_000) for _ in range(24)]
        request = request_of(f"s{number}.{turn[number]}", list(contexts[number]), 8)
        request.session_id = f"s{number}"
        request.arrival_time = now[0]
        engine.add(request)

    for number in range(count):
        ask(number)
    for _ in range(10_000):
        step(engine, now)
        for number in range(count):
            name = f"s{number}.{turn[number]}"
            if turn[number] < turns and name not in engine.scheduler.requests:
                contexts[number] += engine.tokens[name]
                turn[number] += 1
                if turn[number] < turns:
                    ask(number)
        if not engine.scheduler.has_unfinished_requests():
            break
    engine.drain()
    assert turn == [turns] * count
    return engine.queries - engine.hits


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sessions_that_overflow_the_pool_compute_less(asynchronous: bool) -> None:
    """Contexts grow to 352 tokens each, four times the pool in all."""
    computed, tokens = {}, []
    for admission in ("arrival", "fewest", "room"):
        engine, now = engine_of(8 * 352 // BLOCK_SIZE // 4 + 1, admission, asynchronous=asynchronous)
        computed[admission] = talk(engine, now)
        tokens.append(dict(sorted(engine.tokens.items())))
        engine.require_empty()
    assert tokens[0] == tokens[1] == tokens[2]
    assert computed["room"] < 0.7 * computed["arrival"]


def serve(engine: Engine, now: list[float], seed: int) -> tuple[dict[str, list[int]], int]:
    """Run a random program; return the tokens of requests that were not aborted, and the number of preemptions."""
    rng = random.Random(seed)
    shared = [rng.randrange(50_000) for _ in range(200)]
    requests: dict[str, Any] = {}
    dropped: set[str] = set()
    for _ in range(250):
        drawn = rng.random()
        if drawn < 0.2:
            name, more = f"r{len(requests)}", [rng.randrange(50_000) for _ in range(rng.randrange(1, 120))]
            request = request_of(name, shared[: rng.choice((0, 40, 96, 200))] + more, rng.randrange(1, 60))
            request.session_id = rng.choice((None, "a", "b", "c"))
            request.arrival_time = now[0]
            requests[name] = request
            engine.add(request)
        elif drawn < 0.23 and requests:
            dropped.add(rng.choice(list(requests)))
            engine.abort(list(dropped))
        elif drawn < 0.25:
            engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        else:
            step(engine, now)
    for _ in range(20_000):
        if not engine.scheduler.has_unfinished_requests():
            break
        step(engine, now)
    engine.drain()
    kept = {name: tokens for name, tokens in engine.tokens.items() if name not in dropped}
    return kept, sum(request.num_preemptions for request in requests.values())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("admission", ["fewest", "room"])
def test_random_programs_get_vllms_tokens(admission: str, asynchronous: bool) -> None:
    """Few blocks, so that requests are preempted; some are aborted, and the cache is reset."""
    preemptions = 0
    for seed in range(4):
        expected, _ = serve(Engine("stock", 400, **SIZES), [0.0], seed)
        engine, now = engine_of((40, 70)[seed % 2], admission, asynchronous=asynchronous)
        tokens, number = serve(engine, now, seed)
        assert tokens == expected
        assert len(engine.scheduler.waiting) == 0
        assert engine.scheduler.admission.index.tickets() == []
        assert engine.scheduler.admission._running == {}
        preemptions += number
        engine.require_empty()
    assert preemptions > 0


def test_queue_that_admits_nobody_is_false_and_has_a_length() -> None:
    engine, now = engine_of(30, "room")
    first, other = (
        request_of(name, [start + place for place in range(300)], 4) for name, start in (("a", 0), ("b", 1000))
    )
    first.session_id, first.arrival_time = "talk", now[0]
    engine.add(first)
    while engine.scheduler.has_unfinished_requests():
        step(engine, now)
    other.arrival_time = now[0]
    engine.add(other)
    assert engine.schedule() == {}
    engine.finish_step()
    assert (bool(engine.scheduler.waiting), len(engine.scheduler.waiting)) == (False, 1)
    with pytest.raises(IndexError, match="no waiting request may start now"):
        engine.scheduler.waiting.peek_request()
    now[0] += 1000.0
    engine.drain()
    assert len(engine.tokens["b"]) == 4
    engine.require_empty()
