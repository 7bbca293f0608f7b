"""The order of admission changes which prompt tokens are computed again, and no answer."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import InvalidArgument, KVCacheManager, LayerGroup, NeverFits
from blockyard.config import cache_config
from blockyard.tenants import Tenant
from blockyard_engine import Engine, SamplingParams
from blockyard_engine.engine_options import ADMISSION_ORDERS, Preemption
from blockyard_engine.request import Branch, make_request
from blockyard_engine.scheduling.admission_control import AdmissionControl
from blockyard_engine.scheduling.scheduler import Scheduler
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.tiny_models import VOCAB_SIZE, tiny_model

from .test_scheduler import finish, prompt_of, served


class Clock:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def model_on(clock: Clock) -> Any:
    """Return a model that takes a millisecond, and a tenth for each token."""
    model = tiny_model("llama-gqa")

    def tick(_: Any, arguments: Any, named: dict[str, Any]) -> None:
        token_ids = named["input_ids"] if "input_ids" in named else arguments[0]
        clock.now += 1e-3 + 1e-4 * token_ids.numel()

    model.register_forward_pre_hook(tick, with_kwargs=True)
    return model


class Sessions:
    """Conversations that send their next turn as soon as they are answered."""

    def __init__(self, engine: Engine, clock: Clock, count: int, turns: int, first: int, more: int) -> None:
        self.engine = engine
        self.clock = clock
        rng = np.random.default_rng(5)
        self.news = rng.integers(1, VOCAB_SIZE, (count, turns, more)).tolist()
        self.contexts: list[list[int]] = rng.integers(1, VOCAB_SIZE, (count, first)).tolist()
        self.turns = [0] * count
        self.sessions: dict[int, int] = {}
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.num_computed = 0

    def run(self) -> None:
        for number in range(len(self.contexts)):
            self.ask(number)
        while self.engine.has_unfinished:
            report = self.engine.step()
            self.clock.now += self.engine.idle_seconds
            for result in report.finished:
                self.take(result)

    def ask(self, number: int) -> None:
        self.contexts[number] += self.news[number][self.turns[number]]
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        self.sessions[self.engine.add_request(self.contexts[number], sampling, session=f"s{number}")] = number

    def take(self, result: Any) -> None:
        number = self.sessions[result.request_id]
        self.num_computed += result.num_prompt_tokens - result.num_cached_tokens
        answer = result.completions[0].token_ids
        self.answers[number, self.turns[number]] = answer
        self.contexts[number] += answer
        self.turns[number] += 1
        if self.turns[number] < len(self.news[number]):
            self.ask(number)


def overflowed(admission: str, **options: Any) -> Sessions:
    """Run ten sessions of ten turns, whose contexts fill the pool four times in the end."""
    clock = Clock()
    engine = Engine(
        model_on(clock),
        num_blocks=111,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        clock=clock,
        admission=admission,
        **options,
    )
    sessions = Sessions(engine, clock, count=10, turns=10, first=64, more=24)
    sessions.run()
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0
    return sessions


def test_room_computes_fewer_tokens_than_arrival_and_answers_the_same() -> None:
    runs = {order: overflowed(order) for order in ADMISSION_ORDERS}
    assert runs["fewest"].answers == runs["room"].answers == runs["arrival"].answers
    assert len(runs["room"].answers) == 100
    assert runs["room"].num_computed < 0.7 * runs["arrival"].num_computed


class Ruled:
    """A scheduler without a model, whose order of admission is not arrival.

    Every admission is checked against the lane's bound.
    """

    def __init__(self, order: str, budget: int = 64, lane: float = 4.0, way: str = "recompute", **changes: Any) -> None:
        sizes = {"num_blocks": 33, "block_size": 4, "max_num_seqs": 4, "max_model_len": 200, "watermark": 0.0}
        self.cache = KVCacheManager(cache_config(**{**sizes, **changes}))
        self.clock = Clock()
        self.control = AdmissionControl(self.cache, order, lane, self.clock)
        self.scheduler = Scheduler(self.cache, budget, Preemption(way), self.control)
        self.admitted: list[int] = []
        self._start = self.control.start
        self.control.start = self.start  # type: ignore[method-assign]

    def start(self, branch: Branch) -> None:
        if self.control.is_waiting(branch):
            waited = self.clock.now - branch.request.arrived
            assert waited <= self.control.rule.lane_bound(branch.ticket, self.clock.now) + 1e-6
        self.admitted.append(branch.request.request_id)
        self._start(branch)

    def add(self, number: int, prompt: list[int], session: str | None = None, **options: Any) -> Branch:
        sampling = SamplingParams(max_tokens=options.pop("max_tokens", 8))
        request = make_request(number, prompt, sampling, session=session, **options)
        self.scheduler.add(request)
        return request.branches[0]

    def step(self) -> list[tuple[int, int]]:
        step = self.scheduler.schedule()
        self.scheduler.moves.clear()
        rows = served(step)
        self.clock.now += 1e-3 + self.control.estimate.pace * sum(tokens for _, tokens in rows)
        if rows:
            finish(self.scheduler, step)
        self.cache.check()
        return rows

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.requests():
                return
            self.step()
            self.clock.now += self.scheduler.idle_seconds
        raise AssertionError("requests are left")


def test_the_request_that_lacks_the_fewest_tokens_starts_first() -> None:
    world = Ruled("fewest", lane=1e6, max_num_seqs=1)
    world.add(1, prompt_of(0, 40))
    world.run()
    for number, prompt in ((2, prompt_of(100, 20)), (3, [*prompt_of(0, 40), 7, 8]), (4, prompt_of(200, 12))):
        world.add(number, prompt)
    world.run()
    assert world.admitted == [1, 3, 4, 2]


def test_requests_of_other_priorities_keep_their_position() -> None:
    world = Ruled("fewest", lane=1e6, max_num_seqs=1)
    for number, length, priority in ((1, 9, 0), (2, 30, 0), (3, 40, -1), (4, 5, 1), (5, 6, 0), (6, 60, -1)):
        world.add(number, prompt_of(100 * number, length), priority=priority)
    world.run()
    assert world.admitted == [3, 6, 5, 1, 2, 4]


def test_request_that_waits_for_a_prefix_is_overtaken_and_then_starts_next() -> None:
    """With a CPU pool, blocks are shared once they are computed."""
    world = Ruled("fewest", budget=8, lane=1e6, num_blocks=60, num_cpu_blocks=20)
    prompts = ([*range(14), 50], [*range(14), 51], prompt_of(300, 20), prompt_of(400, 25))
    branches = [world.add(number, prompt) for number, prompt in enumerate(prompts)]
    rows = [world.step() for _ in range(2)]
    assert rows == [[(0, 8)], [(0, 7), (2, 1)]]
    world.run()
    assert world.admitted == [0, 2, 1, 3]
    assert branches[1].request.num_cached_tokens == 12


def test_room_is_kept_for_a_context_that_was_just_used_until_the_lane_is_due() -> None:
    world = Ruled("room", num_blocks=26, lane=1.0)
    world.add(1, prompt_of(0, 60), "talk")
    world.run()
    world.add(2, prompt_of(500, 60), "other")
    assert world.step() == []
    pause = world.scheduler.idle_seconds
    assert 0 < pause < 1
    world.clock.now += pause / 2
    assert world.step() == []
    world.add(3, [*prompt_of(0, 60), 7, 8], "talk")
    assert world.scheduler.idle_seconds == 0
    assert world.step()
    world.run()
    assert world.admitted == [1, 3, 2]
    assert world.control.rule.num_inside > 0


def test_an_engine_that_admits_nobody_now_waits_and_goes_on() -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=26, block_size=4, admission="room", admission_lane=2)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = np.random.default_rng(1).integers(1, VOCAB_SIZE, (2, 60)).tolist()
    engine.add_request(prompts[0], sampling, session="talk")
    while engine.has_unfinished:
        engine.step()
    assert engine.admission is not None
    engine.admission.estimate.note_step(1, 1e3)  # the wait is long enough to be seen
    engine.add_request(prompts[1], sampling, session="other")
    assert engine.step().num_tokens == 0
    assert engine.idle_seconds > 0
    engine.abort_all()
    assert engine.idle_seconds == 0


def test_a_preempted_request_keeps_its_arrival() -> None:
    world = Ruled("fewest", num_blocks=7, budget=32)
    branches = [world.add(number, prompt_of(100 * number, 8)) for number in (1, 2, 3)]
    world.step()
    arrivals = [branch.request.arrived for branch in branches]
    world.step()
    assert world.scheduler.num_preemptions == 1
    assert [branch.request.arrived for branch in branches] == arrivals
    world.add(4, prompt_of(400, 2))
    world.step()
    assert world.control.queue.oldest() == branches[2].ticket
    world.run()


@pytest.mark.parametrize("order", ["fewest", "room"])
@pytest.mark.parametrize("kind", ["plain", "windows", "swap"])
def test_all_requests_end_within_the_bound_of_the_lane(order: str, kind: str) -> None:
    draw, num_preemptions = random.Random(f"{run_seed()} {order} {kind}"), 0
    for _ in range(draws(24, 6)):
        options: dict[str, Any] = {"num_blocks": draw.randint(24, 60), "max_num_seqs": draw.choice((2, 6))}
        if kind == "windows":
            options["groups"] = (LayerGroup(4), LayerGroup(4, sliding_window=draw.choice((3, 9))))
        elif kind == "swap":
            options |= {"num_cpu_blocks": 30, "way": "swap"}
        world = Ruled(order, draw.choice((8, 30)), draw.choice((1.0, 4.0)), **options)
        beginnings = [[draw.randrange(1000) for _ in range(60)] for _ in range(4)]
        for number in range(200):
            if number < 60 and draw.random() < 0.6:
                name = draw.randrange(4)
                prompt = beginnings[name][: draw.randint(1, 60)] + [
                    draw.randrange(9) for _ in range(draw.randint(1, 9))
                ]
                options = {"max_tokens": draw.randint(1, 20), "priority": draw.choice((0, 0, 0, 1, -1))}
                with suppress(NeverFits):
                    world.add(number, prompt, draw.choice((None, f"s{name}")), **options)
            if draw.random() < 0.1 and (requests := world.scheduler.requests()):
                world.scheduler.abort(draw.choice(list(requests)))
            if draw.random() < 0.03:
                world.scheduler.preempt_running()
            if draw.random() < 0.03:
                world.cache.reset_prefix_cache()
            world.step()
            world.clock.now += world.scheduler.idle_seconds if draw.random() < 0.5 else 0.0
        world.run()
        num_preemptions += world.scheduler.num_preemptions
        assert world.cache.num_used_blocks == 0
        assert world.control.queue.tickets() == []
        assert world.control.num_missing_tokens() == 0
    assert num_preemptions > 0


def test_the_pace_is_measured_from_steps_with_prompts() -> None:
    clock = Clock()
    engine = Engine(
        model_on(clock), num_blocks=60, block_size=4, max_num_batched_tokens=100, clock=clock, admission="fewest"
    )
    assert engine.admission is not None
    before = engine.admission.estimate.pace
    engine.generate([prompt_of(0, 99)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert before == 1e-4
    assert engine.admission.estimate.pace == pytest.approx((1e-3 + 99e-4) / 99)


def test_by_arrival_nothing_is_made() -> None:
    assert Engine(tiny_model("llama-gqa"), num_blocks=40, block_size=4).admission is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"admission": "lifo"}, r"admission is 'lifo'; it must be one of arrival, fewest, room"),
        ({"admission": 3}, "admission is 3; it must be a string"),
        ({"admission": "room", "admission_lane": 0.5}, "admission_lane is 0.5; it must be 1 or more"),
        ({"admission": "room", "admission_lane": "x"}, "admission_lane"),
        (
            {"admission": "room", "cache_options": {"tenants": (Tenant("a"),)}},
            "admission is 'room' and cache_options has tenants",
        ),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Engine(tiny_model("llama-gqa"), num_blocks=40, block_size=4, **options)
