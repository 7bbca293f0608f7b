"""Too few blocks, failed steps, and requests dropped at any time: tokens stay the same and no block leaks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockyard import CacheConfig, InvalidArgument, KVCacheManager
from blockyard_engine import Engine, FinishReason, PromptLookup, SamplingParams, StepReport
from blockyard_engine.engine_options import Preemption
from blockyard_engine.moves import MoveQueue
from blockyard_engine.request import Branch, make_request
from blockyard_engine.scheduling.preemption import Preemptor
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tokens_of

#: Two ways to make room, and what the engine is made with for each.
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"num_cpu_blocks": 60, "preemption": "swap"},
    "swap, little room": {"num_cpu_blocks": 6, "preemption": "swap"},
}
SAMPLED = SamplingParams(max_tokens=24, n=3, temperature=1.0, seed=5)


def require_empty(engine: Engine) -> None:
    engine.cache.check()
    assert engine.cache.running() == {}
    assert engine.cache.num_used_blocks == 0
    assert engine.cache.cpu_pool is None or engine.cache.cpu_pool.num_used_blocks == 0
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def all_tokens(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[list[list[int]]]:
    """Return the tokens of every completion of every prompt; check all invariants after each step."""

    def watch(_: StepReport) -> None:
        engine.cache.check()

    results = engine.generate(prompts, sampling, on_step=watch)
    assert sum(result.num_preemptions for result in results) == engine.num_preemptions
    return [[completion.token_ids for completion in result.completions] for result in results]


# ---------------------------------------------------------------- few blocks, many steps back


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("way", WAYS)
def test_fifty_preemptions_change_no_token(llama: Any, way: str, caching: bool) -> None:
    prompts = mixed_prompts((9, 14, 5, 20, 11, 3, 17, 8, 12, 6, 15, 10), shared=4)
    plenty = all_tokens(Engine(llama, num_blocks=400, block_size=4), prompts, SAMPLED)
    engine = Engine(
        llama,
        num_blocks=16,
        block_size=4,
        max_num_seqs=10,
        max_num_batched_tokens=24,
        enable_prefix_caching=caching,
        **WAYS[way],
    )
    assert all_tokens(engine, prompts, SAMPLED) == plenty
    assert engine.num_preemptions >= 50
    recomputed = engine.cache.stats().num_resumed_tokens
    assert (recomputed > 0) is (way != "swap")  # with room on the CPU, nothing is computed twice
    require_empty(engine)


@pytest.mark.parametrize("num_cpu_blocks", [3, 8, 40])
def test_equal_swapped_out_requests_all_finish(llama: Any, num_cpu_blocks: int) -> None:
    """Their blocks are merged in the CPU pool, but each keeps its row and its blocks in the pool."""
    (prompt,) = mixed_prompts((21,))
    engine = Engine(
        llama,
        num_blocks=12,
        block_size=4,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        num_cpu_blocks=num_cpu_blocks,
        preemption="swap",
    )
    tokens = all_tokens(engine, [prompt] * 8, SamplingParams(max_tokens=20, n=3))
    assert tokens == [reference_tokens(llama, [prompt], 20) * 3] * 8
    assert engine.num_preemptions > 8
    require_empty(engine)


def test_evicted_blocks_in_the_cpu_pool_are_hit(llama: Any) -> None:
    """With a CPU pool, plans move evicted blocks out and hits back in, also without preemption."""
    first, *others = mixed_prompts((40, 40, 40, 40))
    engine = Engine(llama, num_blocks=13, block_size=4, num_cpu_blocks=60)
    for prompt in (first, *others):
        engine.generate([prompt], SamplingParams(max_tokens=4))
    (again,) = engine.generate([first], SamplingParams(max_tokens=4))
    assert again.num_cached_tokens == 36
    assert again.token_ids == reference_tokens(llama, [first], 4)[0]
    require_empty(engine)


def test_resumed_requests_find_their_own_blocks(llama: Any) -> None:
    (prompt,) = mixed_prompts((22,))
    engine = Engine(llama, num_blocks=24, block_size=4)
    engine.add_request(prompt, SamplingParams(max_tokens=12))
    for _ in range(6):
        engine.step()
    engine.preempt_all()  # 28 tokens are known, 27 computed, 24 of them in full blocks
    tokens = [token.token_id for _ in range(6) for token in engine.step().new_tokens]
    stats = engine.cache.stats()
    assert (stats.num_resumed_tokens, stats.num_resumed_hit_tokens) == (28, 24)
    assert tokens == reference_tokens(llama, [prompt], 12)[0][6:]
    require_empty(engine)


# ---------------------------------------------------------------- who is preempted


def running(cache: KVCacheManager, *sizes: tuple[int, int]) -> list[Branch]:
    """Return running, computed branches of (priority, tokens), in order of arrival."""
    branches = []
    for number, (priority, num_tokens) in enumerate(sizes):
        prompt = list(range(100 * number, 100 * number + num_tokens))
        branch = make_request(number, prompt, SamplingParams(), priority=priority).branches[0]
        branch.seq = cache.allocate(prompt)
        cache.reserve([branch.seq], num_tokens)
        cache.commit([branch.seq], num_tokens)
        branches.append(branch)
    return branches


def test_the_victim_is_later_less_urgent_frees_blocks_and_loses_little() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=60, block_size=4, max_num_seqs=8, max_model_len=64))
    preemptor = Preemptor(cache, Preemption.RECOMPUTE, MoveQueue())
    branches = running(cache, (0, 8), (0, 16), (0, 5), (0, 8))
    # 5 tokens in two blocks are the least to compute again for a block.
    assert preemptor.choose_victim(branches, branches[0]) is branches[2]
    assert preemptor.choose_victim(branches, branches[2]) is branches[3]  # never one that goes before
    assert preemptor.choose_victim(branches, branches[3]) is branches[3]
    branches[1].request.priority = 1
    assert preemptor.choose_victim(branches, branches[0]) is branches[1]
    branches[1].request.priority = 0
    cache.fork(branches[2].seq)  # now it owns no block alone: setting it back would free nothing
    assert preemptor.choose_victim(branches, branches[0]) is branches[3]


# ---------------------------------------------------------------- dropped at any moment


def test_a_request_dropped_at_any_point_leaves_nothing_behind(llama: Any) -> None:
    prompts = mixed_prompts((30, 9, 14, 22), shared=8)
    sampling = SamplingParams(max_tokens=9, n=2, temperature=1.0)
    options = {
        "num_blocks": 18,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 12,
        "num_cpu_blocks": 30,
        "preemption": "swap",
    }
    expected = all_tokens(Engine(llama, **options), prompts, sampling)
    num_points = num_aborted = 0
    for victim in range(4):
        for point in range(0, 40, 3):
            engine = Engine(llama, **options)
            ids = [engine.add_request(prompt, sampling) for prompt in prompts]
            results = {}
            for number in range(200):
                if number == point and ids[victim] not in results:
                    dropped = engine.abort_request(ids[victim])
                    reasons = {completion.finish_reason for completion in dropped.completions}
                    assert FinishReason.ABORT in reasons
                    engine.cache.check()
                    num_aborted += 1
                if not engine.has_unfinished:
                    break
                results.update((result.request_id, result) for result in engine.step().finished)
            num_points += 1
            require_empty(engine)
            for number, request_id in enumerate(ids):
                if request_id in results:
                    assert [c.token_ids for c in results[request_id].completions] == expected[number]
    assert num_aborted > num_points // 3


def test_a_callback_may_abort_any_request(llama: Any) -> None:
    engine = Engine(llama, num_blocks=60)
    prompts = mixed_prompts((9, 12))

    def stop_first(report: StepReport) -> None:
        tokens = [token for token in report.new_tokens if token.request_id == 1]
        if tokens and engine.num_running == 2:
            engine.abort_request(1)

    first, second = engine.generate(prompts, SamplingParams(max_tokens=6), on_step=stop_first)
    expected = reference_tokens(llama, prompts, 6)
    assert (first.finish_reason, first.token_ids) == (FinishReason.ABORT, expected[0][:1])
    assert second.token_ids == expected[1]
    require_empty(engine)


# ---------------------------------------------------------------- a model that raises


class Broken(RuntimeError):
    """The error that tests raise inside a model."""


def break_at_call(model: Any, call: int) -> Any:
    """Let the second layer raise at its n-th call, after the first has written its keys and values."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Broken("the model broke")

    return model.model.layers[1].register_forward_pre_hook(hook)


@pytest.mark.parametrize("call", [1, 2, 5, 9, 14, 20])
@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_a_failed_step_loses_no_token_of_kept_requests(llama: Any, way: str, call: int) -> None:
    prompts = mixed_prompts((20, 9, 14, 22), shared=8)
    sampling = SamplingParams(max_tokens=12, n=2, temperature=1.0)
    options = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16, **WAYS[way]}
    engine = Engine(llama, speculation=PromptLookup(), **options)
    ids = [engine.add_request(prompt, sampling) for prompt in prompts]
    results, num_broken = {}, 0
    hook = break_at_call(llama, call)
    try:
        while engine.has_unfinished:
            try:
                report = engine.step(keep_on_error=True)
            except Broken:
                num_broken += 1
                assert (engine.num_running, engine.num_waiting) == (0, 4 - len(results))
                assert engine.cache.num_used_blocks == 0
                assert set(engine.last_step_ids) <= set(ids)
            else:
                results.update((result.request_id, result) for result in report.finished)
            engine.cache.check()
    finally:
        hook.remove()
    assert num_broken == 1
    expected = all_tokens(Engine(llama, num_blocks=100), prompts, sampling)
    assert [[c.token_ids for c in results[number].completions] for number in ids] == expected
    require_empty(engine)


@pytest.mark.parametrize("call", [1, 4, 12])
def test_a_broken_step_drops_all_requests_otherwise(llama: Any, call: int) -> None:
    prompts = mixed_prompts((20, 9, 14, 22), shared=8)
    engine = Engine(llama, num_blocks=16, block_size=4, max_num_batched_tokens=16, **WAYS["swap"])
    hook = break_at_call(llama, call)
    with pytest.raises(Broken):
        engine.generate(prompts, SAMPLED)
    hook.remove()
    require_empty(engine)
    greedy = SamplingParams(max_tokens=8)
    assert tokens_of(engine.generate(prompts, greedy)) == reference_tokens(llama, prompts, 8)


def test_after_failed_moves_nothing_cached_can_be_hit(llama: Any) -> None:
    """The device fails between the decision to move blocks and the move."""
    prompts = mixed_prompts((40, 40, 40, 40))
    engine = Engine(llama, num_blocks=13, block_size=4, num_cpu_blocks=60)
    engine.generate(prompts[:1], SamplingParams(max_tokens=4))
    cpu_data, engine.kv_cache.cpu_data = engine.kv_cache.cpu_data, None
    with pytest.raises(InvalidArgument, match="without a CPU pool"):
        engine.generate(prompts[1:2], SamplingParams(max_tokens=4))
    engine.kv_cache.cpu_data = cpu_data
    require_empty(engine)
    (again,) = engine.generate(prompts[:1], SamplingParams(max_tokens=4))
    assert again.num_cached_tokens == 0
    assert again.token_ids == reference_tokens(llama, prompts[:1], 4)[0]


def test_pending_moves_are_carried_out_after_a_failed_step(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = mixed_prompts((40, 40))
    engine = Engine(llama, num_blocks=13, block_size=4, num_cpu_blocks=60)
    engine.generate(prompts[:1], SamplingParams(max_tokens=4))
    num_saved = engine.cache.cpu_pool.num_cached_blocks if engine.cache.cpu_pool else 0

    def fail(batch: Any, moves: Any) -> None:
        raise Broken("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", fail)  # before it moves anything
        with pytest.raises(Broken):
            engine.generate(prompts[1:], SamplingParams(max_tokens=4))
    require_empty(engine)
    assert engine.cache.cpu_pool is not None
    assert engine.cache.cpu_pool.num_cached_blocks > num_saved
    (again,) = engine.generate(prompts[:1], SamplingParams(max_tokens=4))
    assert again.num_cached_tokens == 36
    assert again.token_ids == reference_tokens(llama, prompts[:1], 4)[0]


@pytest.mark.parametrize("is_moved", [False, True])
def test_moves_that_failed_halfway_are_not_repeated(
    llama: Any, is_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks' contents are unknown then, so none of them may be hit."""
    prompts = mixed_prompts((40, 40))
    engine = Engine(llama, num_blocks=13, block_size=4, num_cpu_blocks=60)
    engine.generate(prompts[:1], SamplingParams(max_tokens=4))
    start_moves = engine.kv_cache.start_moves

    def fail(plan: Any) -> None:
        if is_moved:
            start_moves(plan)
        raise Broken("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(engine.kv_cache, "start_moves", fail)
        with pytest.raises(Broken):
            engine.generate(prompts[1:], SamplingParams(max_tokens=4))
    require_empty(engine)
    (again,) = engine.generate(prompts[:1], SamplingParams(max_tokens=4))
    assert again.num_cached_tokens == 0
    assert again.token_ids == reference_tokens(llama, prompts[:1], 4)[0]


def test_moves_that_broke_in_a_beam_search_do_not_break_the_next_step(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = mixed_prompts((40, 40))
    engine = Engine(llama, num_blocks=20, block_size=4, num_cpu_blocks=60)
    engine.generate(prompts[:1], SamplingParams(max_tokens=4))

    def fail(plan: Any) -> None:
        raise Broken("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(engine.kv_cache, "start_moves", fail)
        with pytest.raises(Broken):
            engine.beam_search(prompts[1], 2, 4)
    require_empty(engine)
    (again,) = engine.generate(prompts[:1], SamplingParams(max_tokens=4))
    assert again.num_cached_tokens == 0
    assert again.token_ids == reference_tokens(llama, prompts[:1], 4)[0]


def test_a_step_with_only_leaves_other_requests_unchanged(llama: Any) -> None:
    engine = Engine(llama, num_blocks=60)
    prompts = mixed_prompts((9, 12, 15))
    first, second, third = (engine.add_request(prompt, SamplingParams(max_tokens=5)) for prompt in prompts)
    report = engine.step(only={second})
    assert (engine.last_step_ids, report.num_tokens, engine.num_waiting) == ((second,), 12, 2)
    report = engine.step()
    assert {token.request_id for token in report.new_tokens} == {first, second, third}
    engine.preempt_all()
    assert (engine.num_running, engine.num_waiting, engine.num_preemptions) == (0, 3, 0)
    assert engine.cache.num_used_blocks == 0
    assert engine.step(only=[]).num_tokens == 0
    results = {}
    while engine.has_unfinished:
        results.update((result.request_id, result.token_ids) for result in engine.step().finished)
    assert [results[number] for number in (first, second, third)] == reference_tokens(llama, prompts, 5)
    engine.add_request(prompts[0])
    engine.abort_all()
    require_empty(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption": "swap"}, "preemption is 'swap' and num_cpu_blocks is 0"),
        ({"preemption": "forget"}, "preemption is 'forget'; it must be 'recompute' or 'swap'"),
        ({"preemption": 3}, "preemption is 3"),
        ({"num_cpu_blocks": 1}, "num_cpu_blocks is 1"),
        ({"speculation": 4}, "speculation is 4; it must be a PromptLookup"),
    ],
)
def test_bad_options_are_named(llama: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Engine(llama, num_blocks=20, **options)
