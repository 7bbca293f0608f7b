"""Random programs on stock vLLM and both levels in step: preemptions, aborts in any phase, resets, dying engines."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from .engine import BLOCK_SIZE, LEVELS, Engine, request_of


class Program:
    """The same random work on several engines, whose states must be equal after every step."""

    def __init__(self, seed: int, engines: list[Engine]) -> None:
        self.random = random.Random(seed)
        self.engines = engines
        self.names: list[str] = []
        shared = [self.random.randrange(50_000) for _ in range(200)]
        self.prefixes = [shared[:length] for length in (0, 40, 96, 200)]

    def add(self) -> None:
        """A request that may begin like others."""
        name = f"r{len(self.names)}"
        self.names.append(name)
        tokens = self.random.choice(self.prefixes) + [
            self.random.randrange(50_000) for _ in range(self.random.randrange(1, 120))
        ]
        num_new = self.random.randrange(1, 60)
        salt = self.random.choice((None, None, None, "tenant"))
        for engine in self.engines:
            engine.add(request_of(name, list(tokens), num_new, salt=salt))

    def abort(self) -> None:
        """Some of all: waiting, running, preempted, with outputs under way, finished long ago."""
        chosen = self.random.sample(self.names, min(len(self.names), self.random.randrange(1, 4)))
        for engine in self.engines:
            engine.abort(chosen)

    def reset(self) -> None:
        """Mostly refused, as blocks are held; with `reset_running_requests` all are preempted."""
        running = self.random.random() < 0.3
        answers = [engine.scheduler.reset_prefix_cache(reset_running_requests=running) for engine in self.engines]
        assert len(set(answers)) == 1

    def step(self) -> None:
        """Run one step of each engine."""
        planned = [engine.step() for engine in self.engines]
        assert all(one == planned[0] for one in planned)

    def run(self, num_operations: int) -> None:
        """Do random work, then serve all requests to their ends."""
        operations = [self.add, self.abort, self.reset, self.step]
        for _ in range(num_operations):
            self.random.choices(operations, (20, 6, 2, 72))[0]()
            self.compare()
        for engine in self.engines:
            engine.drain()
        self.compare()
        for engine in self.engines:
            engine.require_empty()

    def compare(self) -> None:
        """Compare tokens, hits, free blocks and every request's state."""
        for engine in self.engines:
            engine.check()
        states = [self.state(engine) for engine in self.engines]
        assert all(state == states[0] for state in states)

    def state(self, engine: Engine) -> tuple[Any, ...]:
        """Return all that must be equal."""
        requests = {
            name: (request.status, request.num_computed_tokens, request.num_preemptions)
            for name, request in engine.scheduler.requests.items()
        }
        return engine.num_free_blocks, engine.hits, engine.queries, engine.tokens, requests


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_blocks", [40, 70, 400])
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_behave_as_in_vllm(seed: int, num_blocks: int, asynchronous: bool) -> None:
    """Few blocks cause very many preemptions, many blocks none."""
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "asynchronous": asynchronous}
    engines = [Engine(level, num_blocks, **settings) for level in ("stock", *LEVELS)]
    Program(seed, engines).run(250)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("level", ["stock", *LEVELS])
def test_wrong_base_class_gives_the_same_tokens(level: str, asynchronous: bool) -> None:
    """`Scheduler` where vLLM schedules asynchronously, and `AsyncScheduler` where it does not."""
    tokens = []
    for other_class in (False, True):
        engine = Engine(level, 60, asynchronous, other_class, max_model_len=512, max_num_batched_tokens=128)
        for number in range(12):
            engine.add(request_of(f"r{number}", list(range(number % 3, 100)), 40))
            engine.step()
            engine.check()
        engine.drain()
        engine.require_empty()
        tokens.append(engine.tokens)
    assert tokens[0] == tokens[1]
    assert all(len(each) == 40 for each in tokens[0].values())


def test_overload_preempts_requests() -> None:
    """The premise of the programs with few blocks."""
    engine = Engine("tokens", 40, max_model_len=512, max_num_batched_tokens=128)
    requests = [request_of(f"r{number}", list(range(number, number + 100)), 100) for number in range(12)]
    for request in requests:
        engine.add(request)
    engine.drain()
    assert sum(request.num_preemptions for request in requests) > 5
    engine.require_empty()


class Died(Exception):
    """The error of an engine that dies."""


def some_steps(engine: Engine) -> None:
    """Run enough steps for nine allocations."""
    for _ in range(3):
        engine.step()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_dying_engine_leaves_a_sound_pool(call: int, is_after: bool, level: str, asynchronous: bool) -> None:
    """`schedule` is interrupted before or after the n-th allocation; after all requests are aborted nothing is held."""
    engine = Engine(level, 100, asynchronous, max_model_len=512)
    for number in range(8):
        engine.add(request_of(f"r{number}", list(range(number % 2, 100)), 50))
        engine.step()
    allocate, calls = engine.manager.allocate_slots, []

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and not is_after:
            raise Died
        result = allocate(*args, **kwargs)
        if len(calls) == call:
            raise Died
        return result

    engine.manager.allocate_slots = dying
    engine.add(request_of("last", list(range(30)), 5))
    with pytest.raises(Died):
        some_steps(engine)
    engine.manager.allocate_slots = allocate
    engine.check()
    engine.pending.clear()
    engine.abort([f"r{number}" for number in range(8)] + ["last"])
    # The steps that died were never finished: what an asynchronous engine has deferred, it frees with the next one.
    engine.add(request_of("next", list(range(40)), 3))
    engine.drain()
    assert len(engine.tokens["next"]) == 3
    engine.require_empty()


def test_harness_uses_the_models_block_size() -> None:
    """The programs' prefixes end inside blocks and at their ends."""
    assert 96 % BLOCK_SIZE == 0
    assert 40 % BLOCK_SIZE
