"""transformers' scheduler and offloading on a pool, step by step: few blocks, cancellations, forks, faults.

The batch processor, the schedulers and the offloading are transformers' own; numbers stand in place of a model, so
every step can be checked: each request reads its own tokens, and after each the pool is whole.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from blockyard import BlockPool, InvalidArgument
from blockyard_testing.own_policies import MRU
from blockyard_testing.seeds import run_seed
from engines.transformers_blocks import pooled_cache

from ..support.transformers_engine import SmallProcessor, answer

Made = tuple[SmallProcessor, BlockPool]
HEAD = list(range(100, 124))


def made(num_blocks: int, pool_options: dict[str, Any] | None = None, **options: Any) -> Made:
    with pooled_cache(**(pool_options or {})) as pools:
        processor = SmallProcessor(num_blocks, **options)
    return processor, pools[0]


def drained(processor: SmallProcessor, pool: BlockPool, most: int = 2000) -> dict[str, Any]:
    """What all requests answer; the pool is empty then. Many steps without work, and still requests: a deadlock."""
    outputs: dict[str, Any] = {}
    idle = 0
    while processor.scheduler.has_pending_requests() or not processor.input_queue.empty() or idle == 0:
        idle = 0 if processor.step() else idle + 1
        pool.check()
        outputs |= processor.outputs()
        most -= 1
        assert idle < 5, "nothing is computed any more, and requests wait"
        assert most > 0
    require_empty(processor, pool)
    return outputs


def require_empty(processor: SmallProcessor, pool: BlockPool) -> None:
    pool.check()
    assert pool.num_used_blocks == 0, pool.leases()
    assert processor.cache.cache_allocators["full_attention"].block_table == {}


def prompts_of(draw: random.Random, count: int) -> list[list[int]]:
    heads = [[draw.randrange(50) for _ in range(draw.randint(4, 36))] for _ in range(3)]
    return [draw.choice(heads) + [draw.randrange(50) for _ in range(draw.randint(1, 9))] for _ in range(count)]


SETTINGS = [
    {"num_blocks": 200},
    {"num_blocks": 22},
    {"num_blocks": 14},
    {"num_blocks": 14, "scheduler": "prefill_first"},
    {"num_blocks": 14, "cpu_blocks": 12},
    {"num_blocks": 22, "lag": 1},
    {"num_blocks": 22, "lag": 1, "cpu_blocks": 12},
    {"num_blocks": 22, "allow_block_sharing": False},
]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_random_requests_come_and_are_cancelled(settings: dict[str, Any], number: int) -> None:
    """Preempted, offloaded, forked, cancelled in every phase: those that end have the tokens of one alone."""
    draw = random.Random(run_seed() + number)
    processor, pool = made(**settings)
    wanted: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    outputs: dict[str, Any] = {}
    for place, prompt in enumerate(prompts_of(draw, 20)):
        num_new, num_children = draw.randint(1, 10), draw.choice((0, 0, 1, 2))
        processor.add(f"r{place}", prompt, num_new, num_children)
        for name in (f"r{place}", *[f"r{place}__child#{child}" for child in range(num_children)]):
            wanted[name] = answer(prompt, num_new)
        for _ in range(draw.randint(0, 6)):
            processor.step()
            pool.check()
        if draw.random() < 0.4:
            cancelled.add(draw.choice(list(wanted)))
            processor.cancel(list(cancelled)[-1])
        outputs |= processor.outputs()
    outputs |= drained(processor, pool)
    parents = {name.partition("__")[0] for name in cancelled}
    for name, tokens in wanted.items():
        if name in outputs:
            assert (outputs[name].error, outputs[name].generated_tokens) == (None, tokens), name
        else:
            assert name.partition("__")[0] in parents, f"{name} never ended"


def test_a_hit_that_cannot_go_on_is_not_held() -> None:
    """Its blocks stay free for those that run, and it is admitted with its hit when they have ended."""
    processor, pool = made(14, max_batch_tokens=64)
    processor.add("first", [*HEAD, 1], 2)
    drained(processor, pool)
    assert pool.num_cached_blocks == 6
    processor.add("long", list(range(26)), 12)
    processor.step()
    assert pool.num_used_blocks == 7
    processor.add("again", [*HEAD, *range(5)], 2)
    processor.step()
    assert list(processor.scheduler.active_requests) == ["long"]
    assert list(processor.scheduler.waiting_requests) == ["again"]
    assert pool.num_used_blocks == 7
    assert not processor.scheduler.block_new_requests
    outputs = drained(processor, pool)
    assert outputs["again"].generated_tokens == answer([*HEAD, *range(5)], 2)


def test_idle_blocks_count_as_free_and_hits_need_none() -> None:
    """A pool full of what ended: a prompt that it holds is admitted at once, and evicts what it does not hit."""
    processor, pool = made(8, max_batch_tokens=64)
    processor.add("a", list(range(8)), 2)
    drained(processor, pool)
    processor.add("b", HEAD[:20], 5)
    drained(processor, pool)
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (7, 8)
    prompt = [*HEAD[:20], *answer(HEAD[:20], 4), 1, 2, 3, 4, 5]
    processor.add("c", prompt, 1)
    assert processor.step()
    assert (pool.num_evicted_blocks, pool.peak_used_blocks) == (2, 8)
    assert processor.outputs()["c"].generated_tokens == answer(prompt, 1)


def test_a_request_that_is_cancelled_when_all_others_wait_for_it() -> None:
    """transformers admits nothing after a preemption until a request has ended; one that is cancelled has not."""
    processor, pool = made(8, max_batch_tokens=32)
    for number in range(3):
        processor.add(f"r{number}", [number] * 12, 9)
    while not processor.scheduler.block_new_requests:
        assert processor.step()
    running = set(processor.scheduler.active_requests)
    for name in running:
        processor.cancel(name)
    assert set(drained(processor, pool)) == {"r0", "r1", "r2"} - running != set()


def test_a_prompt_without_tokens_fails_alone() -> None:
    """It ended all requests; transformers' own cache answers it from what another one has computed."""
    processor, pool = made(8)
    processor.add("a", [1] * 8, 3)
    processor.add("empty", [], 3)
    processor.add("b", [2] * 8, 3)
    outputs = drained(processor, pool)
    assert outputs["empty"].error == "input_ids is empty; it must have at least 1 token"
    for name, prompt in (("a", [1] * 8), ("b", [2] * 8)):
        assert (outputs[name].error, outputs[name].generated_tokens) == (None, answer(prompt, 3))


@pytest.mark.parametrize("shares", [True, False])
def test_a_scheduler_that_was_made_outside_of_the_context_is_refused(shares: bool) -> None:
    """As where the context was left while a manager's thread had made its cache and not yet its scheduler."""
    processor, pool = made(8, allow_block_sharing=shares)
    processor.scheduler = FIFOScheduler(processor.cache, processor.cb_config.safety_margin, 64)
    processor.add("a", [1] * 8, 3)
    with pytest.raises(InvalidArgument, match="made in pooled_cache and its scheduler was not"):
        processor.step()
    assert pool.num_used_blocks == 0


def test_what_cannot_be_served_fails_alone() -> None:
    processor, pool = made(8)
    processor.add("a", [1] * 8, 3)
    processor.add("long", [1] * 33, 3)
    processor.add("a", [2] * 8, 3)
    outputs: dict[str, str | None] = {}
    processor.step()
    for output in list(processor.output_router.output_queue.queue):
        outputs[output.prompt_ids[0], len(output.prompt_ids)] = output.error
    assert outputs == {
        (1, 33): "input_ids has 33 tokens; the cache has room for 32",
        (2, 8): "request_id is 'a'; another request has it",
    }
    processor.outputs()
    assert drained(processor, pool)["a"].generated_tokens == answer([1] * 8, 3)


class Broken(MRU):
    """Raises when it is asked for the n-th victim."""

    left = 0

    def evict(self) -> int:
        Broken.left -= 1
        if Broken.left < 0:
            raise RuntimeError("no idea")
        return super().evict()


@pytest.mark.parametrize("left", range(0, 24, 2))
def test_an_error_in_the_middle_of_a_step_ends_all_and_holds_nothing(left: int) -> None:
    """A policy that fails: in an allocation, or in the middle of several forks."""
    draw = random.Random(left)
    processor, pool = made(16, {"eviction_policy": Broken})
    Broken.left = left
    for place, prompt in enumerate(prompts_of(draw, 12)):
        processor.add(f"r{place}", prompt, 6, num_children=3)
    with pytest.raises(Exception, match="no idea"):
        drained(processor, pool)
    processor.fail_all_requests(RuntimeError("the step failed"))
    require_empty(processor, pool)


def test_a_failed_forward_pass_holds_nothing() -> None:
    processor, pool = made(16)
    processor.add("a", HEAD, 3)
    assert processor.prepare_next_batch()
    assert pool.num_used_blocks > 0
    processor.fail_all_requests(RuntimeError("out of memory"))
    require_empty(processor, pool)
    assert [output.error for output in processor.outputs().values()] == ["out of memory"]


@pytest.mark.parametrize("windows", ["all", "some"])
def test_sliding_windows_are_refused_by_name(windows: str) -> None:
    layers = {"all": ["sliding_attention"], "some": ["full_attention", "sliding_attention"]}[windows]
    with pooled_cache() as pools, pytest.raises(InvalidArgument, match=r"^the model has sliding_attention layers"):
        SmallProcessor(16, config={"num_hidden_layers": len(layers), "layer_types": layers, "sliding_window": 8})
    assert pools == []
