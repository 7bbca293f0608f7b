"""No request starves behind shorter or more urgent ones, or for lack of blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import CacheConfig, InvalidArgument, KVCacheManager
from blockyard_engine import Engine, SamplingParams
from blockyard_engine.request import Branch, make_request
from blockyard_engine.scheduling.scheduler import STEPS_PER_PRIORITY, Scheduler
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model

from .test_scheduler import finish, make


def add(scheduler: Scheduler, number: int, length: int, max_tokens: int, priority: int = 0) -> Branch:
    prompt = list(range(1000 * number, 1000 * number + length))
    request = make_request(number, prompt, SamplingParams(max_tokens=max_tokens), priority=priority)
    scheduler.add(request)
    return request.branches[0]


def arrive(scheduler: Scheduler, step: int, priority: int = 0) -> None:
    """Add two short requests of different lengths, so that they do not end together."""
    for other in range(2):
        max_tokens = 4 + (2 * step + other) * 7 % 11
        add(scheduler, 10 * step + 10_000 + other, length=6, max_tokens=max_tokens, priority=priority)


def steps_until_done(scheduler: Scheduler, waited_for: Branch, priority_of_others: int) -> int:
    """Return the steps until a branch ends, while two short requests arrive in every step, more than fit."""
    for number in itertools.count(1):
        arrive(scheduler, number, priority_of_others)
        finish(scheduler, scheduler.schedule())
        if waited_for.finish_reason is not None:
            return number
        assert number < 3000
    raise AssertionError


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    scheduler = make(budget=16, num_blocks=21)  # the long one takes 15 of 20 blocks of 4 tokens, and all in the end
    for step in range(20):
        arrive(scheduler, 5000 + step)
        finish(scheduler, scheduler.schedule())
    num_ahead = len(scheduler.requests())
    long = add(scheduler, 1, length=60, max_tokens=20)
    # First those who came before it, each of nine steps or so and three or four at once; then its own 24 or so.
    assert steps_until_done(scheduler, long, priority_of_others=0) <= 9 * num_ahead // 2 + 60
    assert long.request.num_preemptions == 0


def test_urgent_requests_delay_a_patient_one_for_a_bounded_time() -> None:
    scheduler = make(budget=16, num_blocks=21)
    patient = add(scheduler, 1, length=40, max_tokens=30, priority=1)
    steps = steps_until_done(scheduler, patient, priority_of_others=0)
    # A level is worth 256 steps; then what came before it has to be served: two requests a step take two steps each.
    assert STEPS_PER_PRIORITY < steps < 6 * STEPS_PER_PRIORITY


def test_requests_are_served_by_priority_then_arrival() -> None:
    scheduler = make(budget=16, max_num_seqs=1)
    late = [
        add(scheduler, number, length=5, max_tokens=1, priority=priority)
        for number, priority in ((1, 0), (2, 5), (3, -2), (4, 0), (5, -2))
    ]
    order = []
    while scheduler.requests():
        step = scheduler.schedule()
        order += [row.branch for row in step.rows]
        finish(scheduler, step)
    assert [late.index(branch) + 1 for branch in order] == [3, 5, 1, 4, 2]


def test_only_later_branches_are_preempted_and_return_to_their_position() -> None:
    scheduler = make(budget=32, num_blocks=7)  # 6 blocks of 4 tokens
    patient = add(scheduler, 1, length=8, max_tokens=8, priority=3)
    finish(scheduler, scheduler.schedule())
    others = [add(scheduler, number, length=8, max_tokens=8) for number in (2, 3)]
    preempted = []
    while scheduler.requests():
        step = scheduler.schedule()
        preempted += step.preempted
        if step.rows:
            finish(scheduler, step)
    assert patient in preempted
    assert others[0] not in preempted


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_all_requests_finish_when_all_need_more_blocks_than_exist(preemption: str) -> None:
    model = tiny_model("llama-gqa")
    prompts = mixed_prompts((40, 5, 5, 30, 5, 5, 5, 20))
    engine = Engine(
        model,
        num_blocks=20,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=10,
        num_cpu_blocks=12,
        preemption=preemption,
    )
    ids = [
        engine.add_request(prompt, SamplingParams(max_tokens=20), priority=number % 3)
        for number, prompt in enumerate(prompts)
    ]
    results = {}
    for _ in range(1000):
        if not engine.has_unfinished:
            break
        results.update((result.request_id, result.token_ids) for result in engine.step().finished)
    assert [results[number] for number in ids] == reference_tokens(model, prompts, 20)
    assert engine.num_preemptions > 0


# ---------------------------------------------------------------- what can never be served


def test_never_fits_is_known_before_the_prompt_is_queued() -> None:
    config = CacheConfig(num_blocks=21, block_size=4, max_num_seqs=4, max_model_len=64, watermark=0.0)
    limits = Scheduler(KVCacheManager(config), 16).limits
    assert limits.max_new_tokens(10) == 54  # max_model_len
    assert limits.max_new_tokens(64) == limits.max_new_tokens(1000) == 0
    assert limits.max_new_tokens(10, 4) == 54  # branches are preempted one by one; each alone fits
    assert limits.max_new_tokens(10, 5) == 0
    small = CacheConfig(num_blocks=6, block_size=4, max_num_seqs=4, max_model_len=64, watermark=0.0)
    limits = Scheduler(KVCacheManager(small), 16).limits
    assert limits.max_new_tokens(10) == 11  # 5 blocks; the last token is never computed
    assert limits.max_new_tokens(17, 1) == 4
    assert limits.max_new_tokens(17, 2) == 0  # five blocks for the prompt, and one more for the second's first write
    limits.require_fits("a", 10, 11)


def test_bad_numbers_and_priorities_are_named() -> None:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=20, max_num_seqs=4)
    with pytest.raises(InvalidArgument, match="n of prompt is 5; it must be at most max_num_seqs, 4"):
        engine.add_request([1, 2], SamplingParams(n=5))
    for priority, message in ((2**20 + 1, "priority is 1048577"), ("high", "priority is 'high'")):
        bad: Any = priority
        with pytest.raises(InvalidArgument, match=message):
            engine.add_request([1, 2], priority=bad)
    assert engine.max_new_tokens(100) == 205
