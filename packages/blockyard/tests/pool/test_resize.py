"""Growing and shrinking a pool while sequences run."""

from __future__ import annotations

import random

import pytest

from blockyard import (
    Admission,
    BlockPool,
    CacheConfig,
    InvalidArgument,
    KVCacheManager,
    LayerGroup,
    NeverFits,
    ObserveConfig,
    OverBudget,
)
from blockyard.answers import Resize
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt
from ..support.pools import cached
from ..support.snapshot import snapshot

POLICIES = ["lru", "fifo", "lfu", "s3fifo", "arc", "score", "density"]


def test_growing_is_done_at_once_and_the_new_blocks_are_the_next_to_be_taken() -> None:
    cache = Checked(num_blocks=4, block_size=4)
    first = cache.prefilled(prompt(1, 12))
    assert cache.row(first) == [1, 2, 3]
    assert cache.can_allocate(prompt(2, 12)) is Admission.LATER
    assert cache.resize(9) is Resize.APPLIED
    assert (cache.pool.num_blocks, cache.num_free_blocks, cache.num_used_blocks) == (9, 5, 3)
    # The lowest new id first: a KV tensor that grew is filled from its front.
    assert cache.free_order() == [4, 5, 6, 7, 8]
    second = cache.prefilled(prompt(2, 12))
    assert cache.row(second) == [4, 5, 6]
    assert cache.row(first) == [1, 2, 3]


def test_new_blocks_go_before_cached_ones() -> None:
    cache = Checked(num_blocks=4, block_size=4)
    cache.free(cache.prefilled(prompt(1, 8)))
    assert cache.free_order() == [3, 2, 1]
    cache.resize(6)
    assert cache.free_order() == [4, 5, 3, 2, 1]
    cache.allocate(prompt(2, 12))
    assert cache.stats().num_evicted_blocks == 0


def test_a_prompt_that_never_fitted_fits_a_pool_that_grew() -> None:
    cache = Checked(num_blocks=4, block_size=4)
    assert cache.can_allocate(prompt(1, 16)) is Admission.NEVER
    cache.resize(5)
    assert cache.can_allocate(prompt(1, 16)) is Admission.OK
    assert cache.num_tokens(cache.prefilled(prompt(1, 16))) == 16


def test_hits_survive_growing_and_the_growing_of_the_table_behind_them() -> None:
    cache = Checked(num_blocks=8, block_size=4)
    cache.free(cache.prefilled(prompt(1, 21)))
    for num_blocks in (9, 17, 100, 1000):
        assert cache.resize(num_blocks) is Resize.APPLIED
        seq = cache.allocate(prompt(1, 21))
        assert cache.num_computed_tokens(seq) == 20
        cache.free(seq)


def test_shrinking_over_idle_blocks_is_applied_and_evicts_what_they_cache() -> None:
    cache = Checked(num_blocks=10, block_size=4)
    low = cache.prefilled(prompt(1, 12))
    high = cache.prefilled(prompt(2, 12))
    assert (cache.row(low), cache.row(high)) == ([1, 2, 3], [4, 5, 6])
    cache.free([low, high])
    assert cache.resize(6) is Resize.APPLIED
    assert (cache.pool.num_blocks, cache.pool.num_usable_blocks, cache.pool.num_retiring_blocks) == (6, 5, 0)
    # Blocks 6 to 9 went; only 6 was cached.
    assert cache.stats().num_evicted_blocks == 1
    assert cache.num_cached_blocks == 5
    assert cache.num_computed_tokens(cache.allocate(prompt(1, 12))) == 8
    assert cache.num_computed_tokens(cache.allocate(prompt(2, 8))) == 4


def test_shrinking_over_held_blocks_is_deferred_until_they_are_freed() -> None:
    cache = Checked(num_blocks=10, block_size=4)
    low, high = cache.prefilled(prompt(1, 12)), cache.prefilled(prompt(2, 16))
    assert cache.row(high) == [4, 5, 6, 7]
    assert cache.resize(6) is Resize.DEFERRED
    assert cache.row(high) == [4, 5, 6, 7]
    # 1 to 3 and 4, 5 are within the end; 6 and 7 are to go; 8 and 9 went at once.
    assert cache.pool.num_retiring_blocks == 2
    assert (cache.num_free_blocks, cache.num_used_blocks, cache.pool.num_usable_blocks) == (0, 7, 7)
    assert cache.tokens(high) == prompt(2, 16)
    cache.free(low)
    assert cache.pool.num_retiring_blocks == 2
    assert sorted(cache.free_order()) == [1, 2, 3]
    cache.free(high)
    assert cache.pool.num_retiring_blocks == 0
    assert sorted(cache.free_order()) == [1, 2, 3, 4, 5]
    assert (cache.num_used_blocks, cache.pool.num_usable_blocks) == (0, 5)
    # What a retired block cached is gone with it; what stands before it still hits.
    assert cache.num_computed_tokens(cache.allocate(prompt(2, 17))) == 8


def test_shared_blocks_retire_with_their_last_holder() -> None:
    cache = Checked(num_blocks=10, block_size=4)
    seq = cache.prefilled(prompt(1, 16))
    fork = cache.fork(seq)[0]
    assert cache.resize(3) is Resize.DEFERRED
    cache.free(seq)
    assert cache.pool.num_retiring_blocks == 2
    assert cache.row(fork) == [1, 2, 3, 4]
    cache.free(fork)
    assert cache.pool.num_retiring_blocks == 0


def test_a_new_prompt_shares_retiring_blocks_and_keeps_them_from_going() -> None:
    cache = Checked(num_blocks=6, block_size=4)
    lease = cache.cache.pool.get_new_blocks(2)
    seq = cache.prefilled(prompt(1, 12))
    assert cache.row(seq) == [3, 4, 5]
    cache.cache.pool.free_blocks(lease)
    assert cache.resize(4) is Resize.DEFERRED
    assert cache.pool.num_retiring_blocks == 2
    other = cache.allocate([*prompt(1, 12), 7])
    assert cache.row(other)[:3] == [3, 4, 5]
    assert cache.row(other)[3] in (1, 2)
    cache.free(seq)
    assert cache.pool.num_retiring_blocks == 2
    cache.free(other)
    assert cache.pool.num_retiring_blocks == 0


def test_growing_again_while_blocks_retire_takes_the_held_ones_back() -> None:
    cache = Checked(num_blocks=10, block_size=4)
    seq = cache.prefilled(prompt(1, 24))
    assert cache.resize(3) is Resize.DEFERRED
    assert cache.pool.num_retiring_blocks == 4
    assert cache.resize(5) is Resize.DEFERRED
    assert cache.pool.num_retiring_blocks == 2
    assert cache.resize(9) is Resize.APPLIED
    assert cache.row(seq) == [1, 2, 3, 4, 5, 6]
    # 7 and 8 had gone for good with the first change, and are free again.
    assert cache.free_order() == [7, 8]
    cache.free(seq)
    assert sorted(cache.free_order()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert cache.num_cached_blocks == 6


def test_the_same_size_again_answers_whether_anything_still_retires() -> None:
    cache = Checked(num_blocks=6, block_size=4)
    assert cache.resize(6) is Resize.APPLIED
    seq = cache.prefilled(prompt(1, 16))
    assert cache.resize(4) is Resize.DEFERRED
    assert cache.resize(4) is Resize.DEFERRED
    cache.free(seq)
    assert cache.resize(4) is Resize.APPLIED


def test_a_sequence_on_retiring_blocks_runs_on_within_the_smaller_pool() -> None:
    cache = Checked(num_blocks=8, block_size=4)
    low = cache.prefilled(prompt(1, 12))
    high = cache.prefilled(prompt(2, 8), [7])
    assert cache.row(high) == [4, 5]
    cache.free(low)
    assert cache.resize(4) is Resize.DEFERRED
    for token in range(8):
        cache.compute(high, [token])
    # Its third block comes from below the end, and so does the fourth.
    assert cache.row(high)[:2] == [4, 5]
    assert set(cache.row(high)[2:]) <= {1, 2, 3}
    assert cache.tokens(high) == [*prompt(2, 8), 7, *range(8)]


def test_a_fork_copies_its_retiring_block_into_the_smaller_pool() -> None:
    cache = Checked(num_blocks=8, block_size=4)
    low = cache.prefilled(prompt(1, 12))
    seq = cache.prefilled(prompt(2, 6), [7])
    assert cache.row(seq) == [4, 5]
    cache.free(low)
    cache.resize(4)
    child = cache.fork(seq)[0]
    plan = cache.reserve([seq], 1)
    assert plan.copies.tolist() == [[5, cache.row(seq)[1]]]
    assert cache.row(seq)[1] < 4
    assert cache.row(child) == [4, 5]
    assert cache.pool.num_retiring_blocks == 2


def test_the_peak_counts_blocks_that_retire() -> None:
    """Three cached blocks lie idle at the front, two held ones at the back: after the cut, all five are held."""
    cache = Checked(num_blocks=8, block_size=4)
    cache.free(cache.prefilled(prompt(1, 12)))
    high = cache.prefilled(prompt(2, 8))
    assert cache.row(high) == [4, 5]
    assert cache.resize(4) is Resize.DEFERRED
    cache.prefilled(prompt(3, 12))
    assert (cache.num_used_blocks, cache.stats().peak_used_blocks) == (5, 5)


def test_prompt_that_needs_retiring_blocks_never_fits() -> None:
    """Five blocks are there while one retires, but only four will be given out: waiting for a fifth is in vain."""
    cache = Checked(num_blocks=6, block_size=4)
    seq = cache.prefilled(prompt(1, 20))
    cache.resize(5)
    assert cache.can_allocate(prompt(2, 16)) is Admission.LATER
    assert cache.can_allocate(prompt(2, 20)) is Admission.NEVER
    with pytest.raises(NeverFits):
        cache.allocate(prompt(2, 20))
    # What shares the blocks that retire fits nevertheless, while they are held.
    cache.resize(7)
    cache.resize(6)
    assert cache.can_allocate(prompt(1, 20)) is Admission.LATER
    cache.free(seq)
    assert cache.can_allocate(prompt(2, 20)) is Admission.OK


def test_the_watermark_follows_the_size() -> None:
    cache = Checked(num_blocks=9, block_size=4, watermark=0.25)
    assert cache.can_allocate(prompt(1, 24)) is Admission.OK  # 8 blocks, 2 of them kept free
    assert cache.can_allocate(prompt(1, 28)) is Admission.NEVER
    cache.resize(17)
    assert cache.can_allocate(prompt(1, 48)) is Admission.OK  # 16 blocks, 4 kept free
    assert cache.can_allocate(prompt(1, 52)) is Admission.NEVER
    cache.resize(4)
    assert cache.can_allocate(prompt(1, 8)) is Admission.OK  # 3 blocks, 1 kept free
    assert cache.can_allocate(prompt(1, 12)) is Admission.NEVER


# ---------------------------------------------------------------- leases, policies, retention


def test_a_pool_alone_shrinks_around_its_leases() -> None:
    pool = BlockPool(8, 4)
    low, high = pool.get_new_blocks(3), pool.get_new_blocks(3)
    assert list(high) == [4, 5, 6]
    assert pool.resize(5) is Resize.DEFERRED
    assert (pool.num_retiring_blocks, pool.num_free_blocks) == (2, 0)
    assert pool.ref_counts().tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    both = pool.touch(high)
    pool.free_blocks(high)
    assert pool.num_retiring_blocks == 2
    pool.free_blocks(both)
    assert pool.num_retiring_blocks == 0
    # Blocks that cache nothing go to the front, and the last released is the first to be taken.
    assert pool.free_block_ids().tolist() == [4]
    pool.free_blocks(low)
    assert pool.free_block_ids().tolist() == [1, 2, 3, 4]
    pool.check()


def test_duplicate_within_the_pool_takes_over_from_a_removed_block() -> None:
    pool = BlockPool(8, 4)
    keep = pool.get_new_blocks(2)
    first = cached(pool, prompt(1, 4))
    pool.free_blocks(keep)
    second = cached(pool, prompt(1, 4))
    assert (list(first), list(second)) == ([3], [1])
    pool.free_blocks(first)
    pool.free_blocks(second)
    assert pool.cached_block_ids(prompt(1, 4)) == [3, 1]
    pool.resize(3)
    assert pool.cached_block_ids(prompt(1, 4)) == [1]
    pool.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_notified_of_removed_and_added_blocks(policy: str) -> None:
    """`check` compares what the policy knows with what is idle after every call."""
    cache = Checked(num_blocks=12, block_size=4, eviction_policy=policy)
    cache.free([cache.prefilled(prompt(number, 12)) for number in (1, 2, 3)])
    assert cache.num_cached_blocks == 9
    cache.resize(5)
    assert cache.num_cached_blocks == 4
    held = cache.prefilled(prompt(4, 16))
    assert sorted(cache.row(held)) == [1, 2, 3, 4]
    cache.resize(3)
    cache.free(held)
    assert cache.num_cached_blocks == 2
    cache.resize(30)
    seqs = [cache.prefilled(prompt(number, 24)) for number in (5, 6, 7, 8)]
    assert cache.stats().num_evicted_blocks == 5 + 4 + 2
    cache.free(seqs)
    assert cache.num_cached_blocks == 26


def test_removed_blocks_are_no_longer_retained() -> None:
    """The budget of retained blocks is released, by idle blocks at once and by held ones when they retire."""
    cache = Checked(num_blocks=9, block_size=4, retention_blocks=4)
    cache.free(cache.prefilled(prompt(1, 16)))
    held = cache.prefilled(prompt(2, 16))
    assert cache.row(held) == [5, 6, 7, 8]
    assert cache.retain(prompt(2, 16)) == 4
    with pytest.raises(OverBudget):
        cache.retain(prompt(1, 4))
    assert cache.resize(7) is Resize.DEFERRED
    cache.free(held)
    # Blocks 7 and 8 are gone: two more may be retained, and not three.
    with pytest.raises(OverBudget):
        cache.retain(prompt(1, 12))
    assert cache.retain(prompt(1, 8)) == 2
    assert cache.resize(3) is Resize.APPLIED
    assert cache.retain(prompt(1, 8)) == 2
    cache.resize(9)
    cache.free(cache.prefilled(prompt(3, 8)))
    assert cache.retain(prompt(3, 8)) == 2


# ---------------------------------------------------------------- layer groups and the CPU pool


def test_groups_grow_shrink_and_go_on() -> None:
    cache = Checked(num_blocks=12, groups=(LayerGroup(4), LayerGroup(4, 5)))
    seq = cache.prefilled(prompt(1, 16), [7])
    before = [cache.block_ids(seq, group).tolist() for group in (0, 1)]
    held = {block for row in before for block in row if block}
    assert cache.resize(3) is Resize.DEFERRED
    assert cache.pool.num_retiring_blocks == sum(block >= 3 for block in held)
    assert [cache.block_ids(seq, group).tolist() for group in (0, 1)] == before
    assert cache.resize(40) is Resize.APPLIED
    for token in range(20):
        cache.compute(seq, [token])
    assert cache.tokens(seq) == [*prompt(1, 16), 7, *range(20)]
    other = cache.prefilled([*prompt(1, 16), 9])
    assert cache.num_tokens(other) == 17
    cache.free([seq, other])
    assert cache.num_used_blocks == 0


def test_a_pool_of_groups_that_grew_admits_as_many_sequences_as_one_made_so_large() -> None:
    """The pages grow with the blocks: none of the new blocks is out of reach."""
    grown = Checked(num_blocks=4, groups=(LayerGroup(4),), num_cpu_blocks=2, max_num_seqs=30)
    grown.resize(61)
    made = Checked(num_blocks=61, groups=(LayerGroup(4),), num_cpu_blocks=2, max_num_seqs=30)
    for cache in (grown, made):
        for number in range(20):
            cache.prefilled(prompt(number, 12))
        assert cache.num_free_blocks == 0
        assert cache.can_allocate([1]) is Admission.LATER


def test_what_shrinking_evicts_is_saved_on_the_cpu_by_the_next_plan() -> None:
    """So the tensors may be cut after the plan that follows, and not before: it reads blocks beyond the end."""
    cache = Checked(num_blocks=8, num_cpu_blocks=8, block_size=4)
    cache.free(cache.prefilled(prompt(1, 16)))
    assert cache.resize(3) is Resize.APPLIED
    plan = cache.reserve([], 0)
    assert sorted(plan.swap_outs[:, 0].tolist()) == [3, 4]
    assert cache.reserve([], 0).swap_outs.tolist() == []
    # And the hit brings them back.
    cache.resize(8)
    seq = cache.allocate([*prompt(1, 16), 7])
    assert cache.num_computed_tokens(seq) == 16
    assert len(cache.reserve([seq], 1).swap_ins) == 2


def test_a_swapped_sequence_comes_back_into_the_smaller_pool() -> None:
    cache = Checked(num_blocks=10, num_cpu_blocks=10, block_size=4)
    cache.prefilled(prompt(2, 12))
    seq = cache.prefilled(prompt(1, 12), [7])
    assert cache.row(seq) == [4, 5, 6]
    cache.swap_out([seq])
    cache.reserve([], 0)
    assert cache.resize(7) is Resize.APPLIED
    cache.swap_in([seq])
    assert set(cache.row(seq)) <= {1, 2, 3, 4, 5, 6}
    assert cache.tokens(seq) == [*prompt(1, 12), 7]


# ---------------------------------------------------------------- at random


def test_at_random_the_held_blocks_never_move_and_all_comes_back() -> None:
    generator = random.Random(run_seed())
    for _ in range(30):
        cache = Checked(generator.randint(2, 20), 4, eviction_policy=generator.choice(POLICIES))
        seqs: list[int] = []
        for _ in range(40):
            rows = {seq: cache.row(seq) for seq in seqs}
            answer = cache.resize(generator.randint(2, 30))
            assert {seq: cache.row(seq) for seq in seqs} == rows
            beyond = {block for row in rows.values() for block in row if block >= cache.pool.num_blocks}
            assert cache.pool.num_retiring_blocks == len(beyond)
            assert answer is (Resize.DEFERRED if beyond else Resize.APPLIED)
            tokens = prompt(generator.randrange(4), generator.randint(1, 30))
            if cache.can_allocate(tokens) is Admission.OK:
                seq = cache.prefilled(tokens)
                seqs.append(seq)
                new = cache.row(seq)[-1]
                assert new < cache.pool.num_blocks
            if seqs and generator.random() < 0.5:
                cache.free(seqs.pop(generator.randrange(len(seqs))))
        cache.free(seqs)
        assert cache.pool.num_retiring_blocks == 0
        assert cache.num_free_blocks == cache.pool.num_blocks - 1


def test_refused_sizes_change_nothing() -> None:
    cache = KVCacheManager(CacheConfig(6, 4, max_num_seqs=2, max_model_len=16, observe=ObserveConfig(history_size=4)))
    cache.allocate(prompt(1, 9))
    before = snapshot(cache)
    for bad, said in [
        (1, "num_blocks is 1; it must be from 2"),
        (0, "num_blocks is 0"),
        (-3, "num_blocks is -3"),
        (2**27 + 1, "num_blocks is 134217729"),
        (True, "num_blocks is True"),
        (7.0, "num_blocks is 7.0"),
        ("7", "num_blocks is '7'"),
        (None, "num_blocks is None"),
    ]:
        with pytest.raises(InvalidArgument, match=said):
            cache.resize(bad)
        assert snapshot(cache) == before
    cache.check()
