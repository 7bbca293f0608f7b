"""Swapping sequences out and in: exact plans, what sequences share moved once, and all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blockyard import BlockyardError, InvalidArgument, LayerGroup, OutOfBlocks, SequenceNotReady, UnknownSequence
from blockyard.steps import SwapPlan

from ..support.checked import Checked, prompt
from ..support.snapshot import snapshot


def swapping(num_blocks: int = 20, num_cpu_blocks: int = 10, **settings: Any) -> Checked:
    return Checked(num_blocks, num_cpu_blocks=num_cpu_blocks, **settings)


def outs(plan: SwapPlan) -> list[list[int]]:
    assert plan.swap_ins.tolist() == []
    return plan.swap_outs.tolist()


def ins(plan: SwapPlan) -> list[list[int]]:
    assert plan.swap_outs.tolist() == []
    return plan.swap_ins.tolist()


# ---------------------------------------------------------------- exact plans


def test_out_and_in_again() -> None:
    """Last block first, so that the CPU pool evicts a suffix before its prefix. The cached blocks never left."""
    cache = swapping()
    seq = cache.prefilled(prompt(1, 10), [5])
    assert cache.row(seq) == [1, 2, 3]
    plan = cache.swap_out(seq)
    assert outs(plan) == [[3, 1], [2, 2], [1, 3]]
    assert plan.swap_out_groups.tolist() == [0, 0, 0]
    assert cache.row(seq) == [0, 0, 0]
    assert cache.is_swapped_out(seq)
    assert (cache.num_used_blocks, cache.cpu_pool.num_used_blocks) == (0, 3)
    plan = cache.swap_in(seq)
    # Blocks 1 and 2 are full, cached and idle still; block 3, which no key names, is at the head of the free queue.
    assert ins(plan) == [[1, 3]]
    assert plan.swap_in_groups.tolist() == [0]
    assert cache.row(seq) == [1, 2, 3]
    assert not cache.is_swapped_out(seq)
    assert (cache.num_used_blocks, cache.cpu_pool.num_used_blocks) == (3, 0)
    assert cache.tokens(seq) == [*prompt(1, 10), 5]
    cache.compute(seq)


def test_what_was_evicted_meanwhile_is_moved_back() -> None:
    cache = swapping(num_blocks=5)
    seq = cache.prefilled(prompt(1, 10))
    cache.swap_out(seq)
    other = cache.prefilled(prompt(2, 16))  # takes all four blocks
    cache.free(other)
    plan = cache.swap_in(seq)
    assert [source for source, _ in plan.swap_ins.tolist()] == [3, 2, 1]
    assert [target for _, target in plan.swap_ins.tolist()] == cache.row(seq)
    # Two of the blocks are cached on the CPU still; the blocks that this very call evicts are saved there first.
    assert [target not in (1, 2, 3) for _, target in plan.swap_outs.tolist()] == [True] * len(plan.swap_outs)


def test_what_came_back_is_cached_again() -> None:
    cache = swapping(num_blocks=5)
    seq = cache.prefilled(prompt(1, 10))
    cache.swap_out(seq)
    cache.free(cache.prefilled(prompt(2, 16)))
    cache.swap_in(seq)
    other = cache.allocate([*prompt(1, 8), 3])
    assert cache.num_computed_tokens(other) == 8
    assert cache.row(other)[:2] == cache.row(seq)[:2]


def test_a_shared_block_moves_once() -> None:
    """Two forks that are swapped together share blocks on the CPU as in the pool, and share them again when back."""
    cache = swapping()
    first = cache.prefilled(prompt(1, 10))
    (second,) = cache.fork(first)
    plan = cache.swap_out([first, second])
    assert outs(plan) == [[3, 1], [2, 2], [1, 3]]
    assert cache.cpu_pool.ref_counts()[:4].tolist() == [0, 2, 2, 2]
    assert ins(cache.swap_in([second, first])) == [[1, 3]]
    assert cache.row(first) == cache.row(second) == [1, 2, 3]
    assert cache.ref_counts(first) == [2, 2, 2]


def test_a_fork_that_stays_keeps_the_blocks() -> None:
    """The other fork still holds the blocks.

    When the swapped one returns, full blocks are found by content; the partial block, which has no content id, gets a
    new block.
    """
    cache = swapping()
    first = cache.prefilled(prompt(1, 10))
    (second,) = cache.fork(first)
    assert outs(cache.swap_out(second)) == [[3, 1], [2, 2], [1, 3]]
    assert cache.ref_counts(first) == [1, 1, 1]
    assert ins(cache.swap_in(second)) == [[1, 4]]
    assert cache.row(second) == [1, 2, 4]


def test_a_content_on_the_cpu_is_not_moved_twice() -> None:
    """Two sequences computed equal blocks at once: the second finds the first's full block on the CPU."""
    cache = swapping()
    first, second = cache.allocate(prompt(1, 6)), cache.allocate(prompt(1, 6))
    cache.compute(first)
    cache.compute(second)
    assert set(cache.row(first)).isdisjoint(cache.row(second))
    assert outs(cache.swap_out(first)) == [[2, 1], [1, 2]]
    assert outs(cache.swap_out(second)) == [[4, 3]]
    assert cache.cpu_pool.ref_counts()[:4].tolist() == [0, 1, 2, 1]


def test_equal_blocks_find_one_idle_block_on_the_cpu() -> None:
    """The CPU pool has two blocks; both sequences come to the idle one that holds their content, which is enough."""
    cache = swapping(num_cpu_blocks=2)
    cache.swap_out(seq := cache.prefilled(prompt(1, 4)))
    cache.free(seq)
    first, second = cache.allocate(prompt(1, 4)), cache.allocate(prompt(1, 4))
    cache.compute(first)
    cache.compute(second)
    assert outs(cache.swap_out([first, second])) == []
    assert cache.cpu_pool.ref_counts().tolist() == [0, 2]
    assert ins(cache.swap_in([first, second])) == []
    assert cache.row(first) == cache.row(second)


def test_an_idle_find_on_the_cpu_is_not_taken_for_another_block() -> None:
    """The find is the oldest idle block there, so the first that a new block would take, if it were not held first."""
    cache = swapping(num_cpu_blocks=3)
    for number in (1, 2):
        cache.swap_out(seq := cache.prefilled(prompt(number, 4)))
        cache.free(seq)
    seq = cache.prefilled(prompt(1, 6))
    partial = cache.row(seq)[1]
    assert outs(cache.swap_out(seq)) == [[partial, 2]]
    assert cache.cpu_pool.ref_counts().tolist() == [0, 1, 1]


def test_an_idle_find_in_the_pool_is_not_taken_for_another_block() -> None:
    """The same on the way back: the batch's first sequence takes new blocks, the second finds its old one idle."""
    cache = swapping(num_blocks=4)
    first, second = cache.prefilled(prompt(1, 7)), cache.prefilled(prompt(2, 4))
    cache.swap_out(first)
    found = cache.row(second)[0]
    cache.swap_out(second)
    cache.free(cache.prefilled(prompt(3, 8)))
    assert cache.free_order()[0] == found
    moved = ins_of(cache.swap_in([first, second]))
    assert [source for source, _ in moved] == [2, 1]
    assert sorted(target for _, target in moved) == sorted(cache.row(first))
    assert cache.row(second) == [found]


def test_an_idle_find_counts_as_a_block_that_is_taken() -> None:
    """Of two CPU blocks one is held; the other is found, and so it is not free for the partial block."""
    cache = swapping(num_cpu_blocks=3)
    cache.swap_out(seq := cache.prefilled(prompt(1, 4)))
    cache.free(seq)
    cache.swap_out(cache.prefilled(prompt(2, 2)))
    seq = cache.prefilled(prompt(1, 6))
    before = snapshot(cache.cache)
    with pytest.raises(OutOfBlocks) as caught:
        cache.swap_out(seq)
    assert (caught.value.num_needed, caught.value.num_free) == (2, 1)
    assert snapshot(cache.cache) == before


def ins_of(plan: SwapPlan) -> list[list[int]]:
    """What comes back, where what is evicted for it may be saved in the same plan."""
    return plan.swap_ins.tolist()


def test_tokens_not_computed_are_not_moved() -> None:
    """With five tokens of a four-block prompt computed, two blocks are moved; the others are allocated again later."""
    cache = swapping()
    seq = cache.allocate(prompt(1, 16))
    cache.compute_some(seq, 5)
    assert outs(cache.swap_out(seq)) == [[2, 1], [1, 2]]
    assert cache.row(seq) == [0, 0]
    assert cache.num_used_blocks == 0
    cache.swap_in(seq)
    assert len(cache.row(seq)) == 2
    cache.compute(seq)
    assert cache.tokens(seq) == prompt(1, 16)
    assert len(cache.row(seq)) == 4


def test_a_prompt_not_begun_leaves_nothing() -> None:
    cache = swapping()
    seq = cache.allocate(prompt(1, 16))
    assert outs(cache.swap_out(seq)) == []
    assert cache.cpu_pool.num_used_blocks == 0
    assert ins(cache.swap_in(seq)) == []
    cache.compute(seq)


def test_each_group_moves_its_blocks() -> None:
    """Window 4 holds blocks 2 and 3 of 13 tokens; the full group all four."""
    cache = swapping(groups=(LayerGroup(4), LayerGroup(4, 4)))
    seq = cache.prefilled(prompt(1, 13))
    plan = cache.swap_out(seq)
    assert plan.swap_out_groups.tolist() == [0, 0, 0, 0, 1, 1]
    assert cache.block_ids(seq, 1).tolist() == [0, 0, 0, 0]
    cache.swap_in(seq)
    assert [block != 0 for block in cache.block_ids(seq, 1)] == [False, False, True, True]
    cache.compute_some(cache.allocate(prompt(2, 4)), 4)


def test_a_sequence_on_the_cpu_can_be_cut_forked_appended_to_and_freed() -> None:
    cache = swapping()
    seq = cache.prefilled(prompt(1, 10))
    cache.swap_out(seq)
    cache.append([seq], [5])
    (child,) = cache.fork(seq)
    assert cache.is_swapped_out(child)
    assert cache.cpu_pool.ref_counts()[:4].tolist() == [0, 2, 2, 2]
    cache.truncate(child, 7)
    assert cache.cpu_pool.ref_counts()[:4].tolist() == [0, 1, 2, 2]
    cache.append([child], [6])
    assert cache.tokens(seq) == [*prompt(1, 10), 5]
    assert cache.tokens(child) == [*prompt(1, 7), 6]
    first, second = cache.regroup([child, seq], [0, 0])
    assert cache.tokens(first) == cache.tokens(second) == [*prompt(1, 7), 6]
    cache.swap_in([first, second])
    cache.compute(first)
    cache.compute(second)
    assert cache.row(first)[0] == cache.row(second)[0]
    assert cache.row(first)[1] != cache.row(second)[1]  # both wrote their eighth token
    cache.swap_out([first])
    cache.free([first, second])
    assert (cache.num_used_blocks, cache.cpu_pool.num_used_blocks) == (0, 0)


def test_no_sequences_are_nothing_to_do() -> None:
    cache = swapping()
    assert outs(cache.swap_out([])) == []
    assert ins(cache.swap_in([])) == []


def test_equal_blocks_merged_by_swapping_do_not_use_up_the_pages() -> None:
    """Swapping merges equal blocks, the sequences' pages stay apart: admission has to count both."""
    cache = swapping(num_blocks=4, num_cpu_blocks=3, max_num_seqs=64, max_model_len=8)
    seqs = []
    while cache.can_allocate([1, 2, 3, 4]).name == "OK" and len(seqs) < 64:
        seqs.append(cache.prefilled([1, 2, 3, 4]))
        cache.swap_out(seqs[-1])
        cache.swap_in(seqs[-1])
        assert cache.num_used_blocks == 1
    assert len(seqs) > 3
    with pytest.raises(OutOfBlocks):
        cache.allocate([1, 2, 3, 4])
    cache.free(seqs)
    assert cache.num_used_blocks == 0


# ---------------------------------------------------------------- all or nothing


class Shop:
    """Sequences in all states: two out, one in, one reserved, one new; both pools almost full."""

    def __init__(self) -> None:
        self.cache = swapping(num_blocks=9, num_cpu_blocks=6)
        self.out = self.cache.prefilled(prompt(1, 6), [5])
        (self.sibling,) = self.cache.fork(self.out)
        self.cache.swap_out([self.out, self.sibling])  # 2 CPU blocks
        self.running = self.cache.prefilled(prompt(2, 14), [5])  # 4 blocks
        self.reserved = self.cache.prefilled(prompt(3, 3), [5])  # 1 block
        assert self.cache.reserve([self.reserved], 1).all_fit
        self.dead = self.cache.prefilled(prompt(4, 2))
        self.cache.free(self.dead)
        self.new = self.cache.allocate(prompt(5, 10))  # 3 blocks: none is free now

    def refuses(self, error: type[BlockyardError], call: Callable[[], object], part: str) -> BlockyardError:
        before = snapshot(self.cache.cache)
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        assert part in str(caught.value)
        assert snapshot(self.cache.cache) == before
        return caught.value


def test_a_refused_call_changes_nothing() -> None:
    shop = Shop()
    cache, out, running = shop.cache, shop.out, shop.running
    refuse_bad_seqs(shop, cache.swap_in, out)
    refuse_bad_seqs(shop, cache.swap_out, running)
    shop.refuses(SequenceNotReady, lambda: cache.swap_out([running, out]), "swapped out already")
    shop.refuses(SequenceNotReady, lambda: cache.swap_in([out, running]), "not swapped out")
    shop.refuses(SequenceNotReady, lambda: cache.swap_out([running, shop.reserved]), "reserved tokens")


def refuse_bad_seqs(shop: Shop, call: Callable[[object], object], seq: int) -> None:
    """`call` takes `seq`, but not with one that is dead, in flight or the same, and nothing that is no handle."""
    shop.refuses(UnknownSequence, lambda: call([seq, shop.dead]), "freed already")
    shop.refuses(InvalidArgument, lambda: call([seq, seq]), "twice")
    shop.refuses(SequenceNotReady, lambda: call([seq, shop.reserved]), "swap")
    before = snapshot(shop.cache.cache)
    for hostile in (None, "1", 1.5, [1.5], [True], True, {1: 2}, [2**70], [[1]], [None], -1, [0]):
        with pytest.raises((InvalidArgument, UnknownSequence)):
            call(hostile)
        assert snapshot(shop.cache.cache) == before, hostile


def test_a_swapped_sequence_in_a_batch_refuses_the_whole_batch() -> None:
    shop = Shop()
    cache, out, running = shop.cache, shop.out, shop.running
    shop.refuses(SequenceNotReady, lambda: cache.reserve([running, out], 1), "swap it in first")
    shop.refuses(SequenceNotReady, lambda: cache.can_append([running, out], 1), "swap it in first")
    shop.refuses(InvalidArgument, lambda: cache.commit([shop.reserved, out], 1), "num_computed[1]")
    shop.refuses(InvalidArgument, lambda: cache.append([running, out], [[1, 1], [1, 1]]), "next_tokens[1]")
    shop.refuses(InvalidArgument, lambda: cache.truncate(out, 8), "num_tokens")
    shop.refuses(InvalidArgument, lambda: cache.regroup([out], [0, 1]), "parents[1]")
    shop.refuses(InvalidArgument, lambda: cache.fork(out, 0), "num_forks")
    shop.refuses(UnknownSequence, lambda: cache.free([out, shop.dead]), "freed already")


def test_too_few_cpu_blocks() -> None:
    """Three of five are free, `running` has four blocks; with the batch's last sequence short the first stays too."""
    shop = Shop()
    cache = shop.cache
    error = shop.refuses(OutOfBlocks, lambda: cache.swap_out([shop.running]), "seqs need 4 CPU blocks; 3 of 5 are free")
    assert (error.num_needed, error.num_free) == (4, 3)  # type: ignore[attr-defined]
    shop.refuses(OutOfBlocks, lambda: cache.swap_out([shop.new, shop.running]), "4 CPU blocks")
    cache.swap_out([shop.new])
    cache.free(shop.out)
    shop.refuses(OutOfBlocks, lambda: cache.swap_out([shop.running]), "3 of 5 are free")
    cache.free(shop.sibling)
    cache.swap_out([shop.running])


def test_too_few_blocks_on_the_way_back() -> None:
    """Nothing is free. Both siblings hold the same two blocks, so either alone needs as many as both."""
    shop = Shop()
    cache = shop.cache
    for seqs in ([shop.out], [shop.sibling], [shop.out, shop.sibling]):
        error = shop.refuses(OutOfBlocks, lambda seqs=seqs: cache.swap_in(seqs), "seqs need 2 blocks; 0 of 8 are free")
        assert (error.num_needed, error.num_free) == (2, 0)  # type: ignore[attr-defined]
    cache.free(shop.new)
    cache.swap_in([shop.out, shop.sibling])
    assert cache.row(shop.out) == cache.row(shop.sibling)


def test_without_a_cpu_pool() -> None:
    cache = Checked()
    seq = cache.prefilled(prompt(1, 4))
    before = snapshot(cache.cache)
    for call in (cache.swap_out, cache.swap_in):
        with pytest.raises(InvalidArgument, match="num_cpu_blocks is 0"):
            call([seq])
    assert snapshot(cache.cache) == before
    assert cache.cpu_pool is None
    assert not cache.is_swapped_out(seq)


def test_blocks_to_load_stay_on_the_cpu() -> None:
    """If a sequence hit the CPU pool and is swapped out before its first step, the blocks it did not load stay "
    "there."""
    cache = swapping(num_blocks=5)
    seq = cache.prefilled(prompt(1, 8))
    cache.swap_out(seq)
    cache.free(seq)
    lease = cache.pool.get_new_blocks(4)  # the pool forgets; the CPU pool had it already
    cache.pool.free_blocks(lease)
    again = cache.allocate([*prompt(1, 8), 5])
    assert cache.num_computed_tokens(again) == 8
    assert cache.cpu_pool.num_used_blocks == 2
    assert outs(cache.swap_out(again)) == []
    assert cache.num_used_blocks == 0
    assert sorted(source for source, _ in ins(cache.swap_in(again))) == [1, 2]
    cache.compute(again)
    assert cache.cpu_pool.num_used_blocks == 0


def test_the_questions_say_what_the_calls_do() -> None:
    """At random: `can_swap_out` and `can_swap_in` are true exactly where the calls go through, and change nothing."""
    rng = np.random.default_rng(3)
    cache = swapping(num_blocks=14, num_cpu_blocks=6)
    seqs: list[int] = []
    answers: set[tuple[str, bool]] = set()
    for step in range(600):
        action = rng.integers(5)
        if action == 0 and len(seqs) < 6:
            handle = cache.try_allocate(prompt(int(rng.integers(4)), int(rng.integers(1, 13))))
            if handle:
                seqs.append(handle)
                cache.try_compute(handle)
        elif seqs and action == 1:
            cache.free(seqs.pop(int(rng.integers(len(seqs)))))
        elif seqs and action == 2 and not cache.is_swapped_out(seqs[0]):
            cache.reserve(seqs[0], 1)
        elif seqs:
            chosen = [seq for seq in seqs if rng.integers(2)] or seqs[:1]
            for call in ("swap_out", "swap_in"):
                before = snapshot(cache.cache)
                told = getattr(cache, f"can_{call}")(chosen)
                assert snapshot(cache.cache) == before
                try:
                    getattr(cache, call)(chosen)
                    went = True
                except (OutOfBlocks, SequenceNotReady):
                    went = False
                assert told == went, (step, call)
                answers.add((call, went))
    assert len(answers) == 4


def test_the_questions_need_a_cpu_pool_and_live_handles() -> None:
    plain, cache = Checked(), swapping()
    seq = plain.prefilled(prompt(1, 5))
    for ask in (plain.can_swap_out, plain.can_swap_in):
        with pytest.raises(InvalidArgument, match="needs a CPU pool; num_cpu_blocks is 0: give CPUPoolConfig"):
            ask(seq)
    gone = cache.allocate(prompt(1, 5))
    cache.free(gone)
    for ask in (cache.can_swap_out, cache.can_swap_in):
        with pytest.raises(UnknownSequence):
            ask([gone])
