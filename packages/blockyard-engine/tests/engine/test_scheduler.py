"""The scheduler without a model: order, chunks, sharing, preemption, and that nothing ever stalls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import KVCacheManager, LayerGroup, NeverFits
from blockyard.config import cache_config
from blockyard_engine import SamplingParams
from blockyard_engine.decoding.sampler import Choice
from blockyard_engine.request import Branch, make_request
from blockyard_engine.scheduling.scheduler import Scheduler
from blockyard_engine.scheduling.step import ScheduledStep
from blockyard_testing.seeds import run_seed


def make(budget: int, **changes: Any) -> Scheduler:
    sizes = {"num_blocks": 33, "block_size": 4, "max_num_seqs": 4, "max_model_len": 200, "watermark": 0.0}
    return Scheduler(KVCacheManager(cache_config(**{**sizes, **changes})), budget)


def add(scheduler: Scheduler, number: int, prompt: list[int], max_tokens: int = 8, priority: int = 0) -> Branch:
    request = make_request(number, prompt, SamplingParams(max_tokens=max_tokens), priority=priority)
    scheduler.add(request)
    return request.branches[0]


def finish(scheduler: Scheduler, step: ScheduledStep) -> None:
    """End a step as the engine does, with a token made of the request and its length."""
    known, ended = [], []
    for row in step.rows:
        known.append([])
        if row.samples:
            chosen = 1000 + 100 * row.branch.request.request_id + len(row.branch.token_ids)
            row.branch.take(Choice(chosen))
            if row.branch.finish_reason is None:
                known[-1].append(chosen)
            else:
                ended.append(row.branch)
    scheduler.commit(step, known)
    scheduler.retire(ended)


def served(step: ScheduledStep) -> list[tuple[int, int]]:
    """Return (request, tokens) of each row."""
    return [(row.branch.request.request_id, row.num_tokens) for row in step.rows]


def prompt_of(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_decodes_come_first_then_prompts_in_order_cut_where_the_budget_ends() -> None:
    scheduler = make(budget=10)
    add(scheduler, 1, prompt_of(0, 6))
    step = scheduler.schedule()
    assert served(step) == [(1, 6)]
    finish(scheduler, step)
    add(scheduler, 2, prompt_of(100, 14))
    add(scheduler, 3, prompt_of(200, 3))
    expected = [
        [(1, 1), (2, 9)],  # the budget ends within the second prompt
        [(1, 1), (2, 5), (3, 3)],
        [(1, 1), (2, 1), (3, 1)],
    ]
    for rows in expected:
        step = scheduler.schedule()
        assert served(step) == rows
        finish(scheduler, step)


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    scheduler = make(budget=4)
    request = add(scheduler, 1, prompt_of(0, 10))
    sampled = []
    for _ in range(3):
        step = scheduler.schedule()
        sampled += [row.samples for row in step.rows]
        finish(scheduler, step)
    assert sampled == [False, False, True]
    assert request.num_generated == 1


def test_a_prefix_is_computed_once_for_all_who_share_it() -> None:
    scheduler = make(budget=64)
    requests = [add(scheduler, number, [*range(12), 50 + number]) for number in range(3)]
    step = scheduler.schedule()
    assert served(step) == [(0, 13), (1, 1), (2, 1)]
    finish(scheduler, step)
    assert [branch.request.num_cached_tokens for branch in requests] == [0, 12, 12]


WITHOUT_JOINING: list[dict[str, Any]] = [
    {"num_cpu_blocks": 20},
    {"groups": (LayerGroup(4), LayerGroup(4, sliding_window=6))},
]


@pytest.mark.parametrize("changes", WITHOUT_JOINING, ids=["cpu pool", "groups"])
def test_equal_prompts_wait_if_blocks_are_shared_only_once_computed(changes: dict[str, Any]) -> None:
    scheduler = make(budget=8, num_blocks=60, **changes)
    requests = [add(scheduler, number, [*range(14), 50 + number]) for number in range(3)]
    other = add(scheduler, 3, prompt_of(300, 6))
    steps = []
    for _ in range(4):
        step = scheduler.schedule()
        steps.append(served(step))
        finish(scheduler, step)
    # Twelve tokens are whole blocks. Who waits is passed by who does not.
    assert steps == [[(0, 8)], [(0, 7), (3, 1)], [(0, 1), (1, 3), (3, 4)], [(0, 1), (1, 1), (3, 1), (2, 3)]]
    assert [branch.request.num_cached_tokens for branch in requests] == [0, 12, 12]
    assert other.num_generated == 1


@pytest.mark.parametrize("changes", WITHOUT_JOINING, ids=["cpu pool", "groups"])
def test_no_request_waits_for_an_abandoned_prefix(changes: dict[str, Any]) -> None:
    scheduler = make(budget=4, num_blocks=60, **changes)
    first = add(scheduler, 0, [*range(14), 50])
    second = add(scheduler, 1, [*range(14), 51])
    finish(scheduler, scheduler.schedule())
    assert scheduler.running == [first]
    scheduler.abort(0)
    step = scheduler.schedule()
    assert served(step) == [(1, 4)]
    finish(scheduler, step)
    assert second.request.num_cached_tokens == 4


def test_a_step_with_only_waits_for_no_other_request() -> None:
    scheduler = make(budget=8, num_cpu_blocks=20)
    for number in range(2):
        add(scheduler, number, [*range(14), 50 + number])
    finish(scheduler, scheduler.schedule(only={0}))
    assert served(scheduler.schedule(only={1})) == [(1, 7)]


def test_a_sequence_that_waits_for_a_prefix_leaves_its_budget_to_others() -> None:
    scheduler = make(budget=8)
    first = add(scheduler, 1, prompt_of(0, 21))
    add(scheduler, 2, [*prompt_of(0, 20), 99, 98, 97])
    add(scheduler, 3, prompt_of(300, 6))
    steps = []
    for _ in range(4):
        step = scheduler.schedule()
        steps.append(served(step))
        finish(scheduler, step)
    # The third chunk of the first prompt is 5 tokens long: the second request joins in the same step.
    assert steps[:3] == [[(1, 8)], [(1, 8)], [(1, 5), (2, 3)]]
    assert steps[3] == [(1, 1), (2, 1), (3, 6)]
    assert first.num_generated == 2


def test_if_the_producer_of_a_shared_prefix_is_freed_a_waiter_computes_it() -> None:
    scheduler = make(budget=8)
    first = add(scheduler, 1, prompt_of(0, 21))
    finish(scheduler, scheduler.schedule())
    heirs = [add(scheduler, number, [*prompt_of(0, 20), 90 + number]) for number in (2, 3)]
    finish(scheduler, scheduler.schedule())  # the first goes on; the others may be in by now, and wait
    assert scheduler.abort(1) is first.request
    for _ in range(40):
        step = scheduler.schedule()
        if not step.rows:
            break
        finish(scheduler, step)
    assert [heir.num_generated for heir in heirs] == [8, 8]
    assert not scheduler.requests()


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make(budget=32, num_blocks=7)  # 6 blocks of 4 tokens
    requests = [add(scheduler, number, prompt_of(100 * number, 8)) for number in (1, 2, 3)]
    late = add(scheduler, 4, prompt_of(400, 2))
    finish(scheduler, scheduler.schedule())
    assert scheduler.running == requests
    step = scheduler.schedule()  # the ninth token of each needs a third block
    assert [branch.request.request_id for branch in step.preempted] == [3]
    assert served(step) == [(1, 1), (2, 1)]
    assert scheduler.waiting == [requests[2], late]
    assert requests[2].request.num_preemptions == scheduler.num_preemptions == 1
    finish(scheduler, step)
    while scheduler.requests():
        finish(scheduler, scheduler.schedule())
    # What was chosen before it was preempted is kept.
    assert requests[2].token_ids == [*prompt_of(300, 8), *range(1308, 1316)]
    assert requests[2].request.num_cached_tokens == 0  # its own blocks, found again, are no prefix hit of the request


def test_a_request_that_an_empty_cache_could_not_carry_is_refused() -> None:
    scheduler = make(budget=32, num_blocks=7)
    add(scheduler, 1, prompt_of(0, 20), max_tokens=5)
    with pytest.raises(NeverFits, match=r"request 2 has 20 tokens and may generate 6: 7 blocks of 4; .* sequence 6"):
        add(scheduler, 2, prompt_of(0, 20), max_tokens=6)
    with pytest.raises(NeverFits, match="201 together; max_model_len is 200"):
        add(scheduler, 3, prompt_of(0, 200), max_tokens=1)
    assert len(scheduler.requests()) == 1


@pytest.mark.parametrize("round_", range(6))
def test_no_step_is_idle_while_there_is_work(round_: int) -> None:
    """Random prompts with shared prefixes, tiny budgets and pools, aborts and failed steps."""
    seed = run_seed() + round_
    rng = np.random.default_rng(seed)
    caching = bool(round_ % 3)
    scheduler = make(
        budget=int(rng.integers(5, 12)), num_blocks=int(rng.integers(14, 30)), enable_prefix_caching=caching
    )
    cache = scheduler._cache
    lengths: dict[int, tuple[Branch, int]] = {}
    for number in range(400):
        if rng.random() < 0.35:
            prompt = rng.integers(0, 2, 8).repeat(4)[: rng.integers(1, 32)].tolist()
            max_tokens = int(rng.integers(1, 16))
            try:
                lengths[number] = (add(scheduler, number, prompt, max_tokens), len(prompt) + max_tokens)
            except NeverFits:
                continue
        if rng.random() < 0.1 and lengths:
            dropped = int(rng.choice(list(lengths)))
            scheduler.abort(dropped)
            del lengths[dropped]
        had_work = bool(scheduler.requests())
        step = scheduler.schedule()
        assert bool(step.rows or step.preempted) is had_work, f"seed {seed}"
        assert step.num_scheduled.sum() <= scheduler.max_num_batched_tokens
        if rng.random() < 0.05:
            scheduler.abort_all()  # as the engine does when the step breaks
            lengths.clear()
            assert cache.num_used_blocks == 0
        elif step.rows:
            finish(scheduler, step)
        cache.check()
    for _ in range(10_000):
        step = scheduler.schedule()
        if not step.rows and not step.preempted:
            break
        if step.rows:
            finish(scheduler, step)
    assert all(len(request.token_ids) == length for request, length in lengths.values()), f"seed {seed}"
    assert cache.num_used_blocks == 0
