"""nano-vllm's block manager on a pool: random traffic through its interface, and what it refuses."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockyard import InvalidArgument, OutOfBlocks
from blockyard.errors import MissingExtra
from blockyard_testing.seeds import run_seed
from engines import nano_vllm
from engines.nano_vllm import BlockManager

from ..support.nano_engine import BLOCK_SIZE, SmallScheduler, SmallSequence, drive


def traffic(draw: random.Random, count: int) -> list[SmallSequence]:
    """Prompts of a few families, so that many begin alike."""
    heads = [[draw.randrange(50) for _ in range(draw.randint(1, 20))] for _ in range(3)]
    tails = [[draw.randrange(50) for _ in range(draw.randint(1, 9))] for _ in range(count)]
    return [SmallSequence(draw.choice(heads) + tail, draw.randint(1, 12)) for tail in tails]


def answers(num_blocks: int, seed: int) -> tuple[list[list[int]], int]:
    draw = random.Random(seed)
    sequences = traffic(draw, 12)
    scheduler = SmallScheduler(num_blocks, draw.randint(1, 6), draw.choice((7, 16, 64)))
    computed = drive(scheduler, sequences, BLOCK_SIZE)
    pool = scheduler.block_manager.pool
    pool.check()
    assert pool.num_used_blocks == 0
    assert pool.num_blocks == num_blocks + 1
    return [seq.token_ids for seq in sequences], computed


@pytest.mark.parametrize("number", range(40))
def test_random_traffic_reads_what_was_written(number: int) -> None:
    seed = run_seed() + number
    few, _ = answers(12, seed)
    many, computed = answers(400, seed)
    assert few == many
    assert computed <= sum(len(seq) for seq in traffic(random.Random(seed), 12))


def test_a_prompt_that_was_served_is_found_but_for_its_last_block() -> None:
    manager = BlockManager(8, 4)
    first, second = (SmallSequence(list(range(12)), 4) for _ in range(2))
    assert manager.can_allocate(first) == 0
    manager.allocate(first, 0)
    assert first.block_table == [0, 1, 2]
    first.num_scheduled_tokens = 12
    manager.hash_blocks(first)
    assert manager.can_allocate(second) == 2
    manager.allocate(second, 2)
    assert second.block_table == [0, 1, 3]
    assert second.num_cached_tokens == 8
    manager.deallocate(first)
    manager.deallocate(second)
    assert manager.pool.num_used_blocks == 0


def test_what_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(2, 4)
    seq = SmallSequence(list(range(12)), 4)
    assert manager.can_allocate(seq) == -1
    with pytest.raises(OutOfBlocks):
        manager.allocate(seq, 0)
    assert seq.block_table == []
    assert manager.pool.num_free_blocks == 2
    manager.deallocate(seq)


def test_it_is_installed_before_anything_runs() -> None:
    scheduler = SmallScheduler(20, 4, 64)
    stock = SimpleNamespace(blocks=[None] * 20, block_size=BLOCK_SIZE)
    scheduler.block_manager = cast(Any, stock)
    installed = nano_vllm.install(scheduler, eviction_policy="fifo")
    assert scheduler.block_manager is installed
    assert installed.pool.num_usable_blocks == 20
    scheduler.add(SmallSequence([1, 2, 3, 4, 5], 4))
    scheduler.schedule()
    with pytest.raises(InvalidArgument, match="scheduler has 1 sequences with blocks"):
        nano_vllm.install(scheduler)


class OldManager:
    """nano-vllm's, before it computed prompts in chunks."""

    blocks = (None,) * 20
    block_size = BLOCK_SIZE

    def can_allocate(self, seq: Any) -> bool:
        return True

    def allocate(self, seq: Any) -> None:
        """Give all blocks at once."""


def test_nano_vllm_without_chunked_prefill_is_refused() -> None:
    scheduler = SmallScheduler(20, 4, 64)
    old = scheduler.block_manager = cast(Any, OldManager())
    with pytest.raises(MissingExtra, match=r"needs nano-vllm with chunked prefill: pip .*: allocate\(self, seq\)$"):
        nano_vllm.install(scheduler)
    assert scheduler.block_manager is old


def test_what_is_no_scheduler_is_named() -> None:
    with pytest.raises(InvalidArgument, match="scheduler is a int; it must be nano-vllm's"):
        nano_vllm.install(3)


@pytest.mark.parametrize("number", range(20))
def test_calls_in_any_order_leak_nothing(number: int) -> None:
    """A wrong one is refused and changes nothing: a second `allocate` left the blocks of the first held forever."""
    draw = random.Random(run_seed() + number)
    manager = BlockManager(draw.choice((3, 8, 20)), BLOCK_SIZE)
    seqs = traffic(draw, 5)
    num_refused = 0
    for _ in range(80):
        seq = draw.choice(seqs)
        seq.num_scheduled_tokens = draw.choice((0, 1, 4, 100))
        calls: list[Any] = [
            partial(manager.can_allocate, seq),
            partial(manager.allocate, seq, draw.choice((0, 1, -1, 99, cast(int, None)))),
            partial(manager.deallocate, seq),
            partial(manager.may_append, seq),
            partial(manager.hash_blocks, seq),
        ]
        before = manager.pool.num_free_blocks, [list(each.block_table) for each in seqs]
        try:
            draw.choice(calls)()
        except (InvalidArgument, OutOfBlocks):
            num_refused += 1
            assert before == (manager.pool.num_free_blocks, [list(each.block_table) for each in seqs])
        manager.pool.check()
    for seq in seqs:
        manager.deallocate(seq)
    assert num_refused > 0
    assert manager.pool.num_used_blocks == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((0, 4), "num_blocks is 0"), (("x", 4), "num_blocks is 'x'"), ((4, 0), "block_size is 0")],
)
def test_bad_sizes_are_named(arguments: tuple[Any, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        BlockManager(*arguments)
