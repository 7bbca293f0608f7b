"""The pool used alone: who is allocated, evicted, revived and hit, each order asserted whole."""

from __future__ import annotations

import numpy as np
import pytest

from blockyard import BlockPool, CacheSalt, DoubleFree, InvalidArgument, LoRA, OutOfBlocks

from ..support.checked import prompt
from ..support.pools import cached, order
from ..support.snapshot import refused, snapshot

# ---------------------------------------------------------------- allocation and eviction order


def test_blocks_come_in_ascending_order_at_first() -> None:
    pool = BlockPool(6, 4)
    assert order(pool) == [1, 2, 3, 4, 5]
    assert list(pool.get_new_blocks(2)) == [1, 2]
    assert list(pool.get_new_blocks(0)) == []
    assert list(pool.get_new_blocks(3)) == [3, 4, 5]
    assert order(pool) == []


def test_uncached_blocks_are_reused_first_and_as_they_were() -> None:
    """They hold nothing reusable, so they go to the front; last first, so they come out in their old order."""
    pool = BlockPool(8, 4)
    first, second = pool.get_new_blocks(2), pool.get_new_blocks(3)
    pool.free_blocks(first)
    assert order(pool) == [1, 2, 6, 7]
    pool.free_blocks(second)
    assert order(pool) == [3, 4, 5, 1, 2, 6, 7]


def test_cached_blocks_are_evicted_last_and_from_their_tail() -> None:
    """A suffix is useless without its prefix, so it goes first: blocks 1, 2, 3 are queued as 3, 2, 1."""
    pool = BlockPool(8, 4)
    pool.free_blocks(cached(pool, prompt(1, 12)))
    assert order(pool) == [4, 5, 6, 7, 3, 2, 1]
    pool.get_new_blocks(5)
    assert pool.num_cached_tokens(prompt(1, 12)) == 8, "block 3 was evicted, blocks 1 and 2 were not"
    pool.get_new_blocks(1)
    assert pool.num_cached_tokens(prompt(1, 12)) == 4
    pool.get_new_blocks(1)
    assert pool.num_cached_tokens(prompt(1, 12)) == 0
    assert pool.num_evicted_blocks == 3


def test_a_partly_filled_last_block_goes_to_the_front() -> None:
    """Ten tokens fill two blocks of four and a half: the half is never cached, so it is the next to be reused."""
    pool = BlockPool(6, 4)
    pool.free_blocks(cached(pool, prompt(1, 10)))
    assert order(pool) == [3, 4, 5, 2, 1]
    assert pool.num_cached_blocks == 2


def test_prompts_are_evicted_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(8, 4)
    leases = [cached(pool, prompt(number, 8)) for number in (1, 2, 3)]
    for lease in (leases[1], leases[2], leases[0]):
        pool.free_blocks(lease)
    assert order(pool) == [7, 4, 3, 6, 5, 2, 1]


def test_a_hit_revives_blocks_from_the_middle_and_makes_them_the_most_recent() -> None:
    pool = BlockPool(8, 4)
    for number in (1, 2, 3):
        pool.free_blocks(cached(pool, prompt(number, 8)))
    # Blocks 1 and 2 came first, then 3 and 4, then 5 and 6, because 7 new ones were there: none was reused.
    assert order(pool) == [7, 2, 1, 4, 3, 6, 5]
    hit = pool.get_cached_blocks(prompt(2, 8))
    assert list(hit) == [3, 4]
    assert order(pool) == [7, 2, 1, 6, 5], "the others keep their order"
    pool.free_blocks(hit)
    assert order(pool) == [7, 2, 1, 6, 5, 4, 3]


def test_a_hit_on_half_a_prompt_revives_that_half() -> None:
    pool = BlockPool(6, 4)
    pool.free_blocks(cached(pool, prompt(1, 16)))
    assert order(pool) == [5, 4, 3, 2, 1]
    hit = pool.get_cached_blocks(prompt(1, 8) + prompt(9, 8))
    assert list(hit) == [1, 2]
    assert order(pool) == [5, 4, 3]
    pool.free_blocks(hit)
    assert order(pool) == [5, 4, 3, 2, 1]


def test_an_eviction_drops_the_index_entry() -> None:
    """Block 1 is given out again: its old tokens hit nothing, its new ones hit it."""
    pool = BlockPool(2, 4)
    pool.free_blocks(cached(pool, prompt(1, 4)))
    assert pool.num_cached_tokens(prompt(1, 4)) == 4
    lease = pool.get_new_blocks(1)
    assert list(lease) == [1]
    assert pool.num_cached_tokens(prompt(1, 4)) == 0
    assert pool.get_cached_block(prompt(1, 4)) is None
    assert (pool.num_cached_blocks, pool.num_evicted_blocks) == (0, 1)
    pool.cache_full_blocks(lease, prompt(2, 4))
    assert list(pool.get_cached_blocks(prompt(2, 4))) == [1]


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(5, 4)
    held = cached(pool, prompt(1, 8))
    for _ in range(3):
        pool.free_blocks(pool.get_new_blocks(2))
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(3)
    assert pool.num_cached_tokens(prompt(1, 8)) == 8
    pool.free_blocks(held)
    assert order(pool) == [3, 4, 2, 1]


def test_evicting_a_prefix_before_its_suffix_loses_both() -> None:
    """Block 2 is held alone, by `get_cached_block`; block 1 before it is evicted. The suffix hangs on nothing now, and
    does not come back when the prefix is computed again elsewhere."""
    pool = BlockPool(4, 4)
    lease = cached(pool, prompt(1, 8))
    suffix = pool.get_cached_block(prompt(1, 8))
    assert suffix is not None
    assert list(suffix) == [2]
    pool.free_blocks(lease)
    assert order(pool) == [3, 1]
    other = pool.get_new_blocks(2)
    pool.free_blocks(other)
    again = cached(pool, prompt(1, 4))
    assert list(again) == [3]
    assert pool.num_cached_tokens(prompt(1, 8)) == 4
    assert pool.num_cached_blocks == 2
    pool.check()


# ---------------------------------------------------------------- hits are leases


def test_a_hit_is_counted_before_it_is_returned() -> None:
    """So nothing can evict it between the lookup and its use (I8); vLLM needs a separate touch for that."""
    pool = BlockPool(4, 4)
    pool.free_blocks(cached(pool, prompt(1, 12)))
    hit = pool.get_cached_blocks(prompt(1, 12), holder="reader")
    assert pool.ref_counts().tolist() == [0, 1, 1, 1]
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(1)
    pool.free_blocks(hit)
    assert pool.ref_counts().tolist() == [0, 0, 0, 0]


def test_a_single_block_is_found_by_all_tokens_up_to_its_end() -> None:
    pool = BlockPool(6, 4)
    cached(pool, prompt(1, 12))
    middle = pool.get_cached_block(prompt(1, 8), holder="reader")
    assert middle is not None
    assert list(middle) == [2]
    assert pool.ref_counts().tolist() == [0, 1, 2, 1, 0, 0]
    partial = pool.get_cached_block(prompt(1, 11))
    assert partial is not None
    assert list(partial) == [2], "the last full block of eleven tokens is the second"
    assert pool.get_cached_block(prompt(1, 3)) is None
    assert pool.get_cached_block(prompt(1, 12) + prompt(2, 4)) is None
    assert pool.get_cached_block([9, *prompt(1, 8)[1:]]) is None, "one other token at the start is another prefix"
    pool.check()


def test_a_look_up_that_finds_nothing_gives_an_empty_lease() -> None:
    pool = BlockPool(4, 4)
    lease = pool.get_cached_blocks(prompt(1, 8), holder="nobody")
    assert (len(lease), list(lease), lease.block_ids.tolist()) == (0, [], [])
    assert order(pool) == [1, 2, 3]
    pool.free_blocks(lease)
    with pytest.raises(DoubleFree):
        pool.free_blocks(lease)


def test_a_question_holds_nothing() -> None:
    pool = BlockPool(4, 4)
    pool.free_blocks(cached(pool, prompt(1, 8)))
    before = order(pool)
    assert pool.num_cached_tokens(prompt(1, 11)) == 8
    assert order(pool) == before
    assert pool.leases() == []


def test_touch_holds_once_more_for_another() -> None:
    pool = BlockPool(6, 4)
    first = cached(pool, prompt(1, 8), "first")
    second = pool.touch(first, holder="second")
    assert list(second) == list(first) == [1, 2]
    assert pool.ref_counts().tolist() == [0, 2, 2, 0, 0, 0]
    assert pool.num_used_blocks == 2, "a block held twice is used once"
    pool.free_blocks(first)
    assert order(pool) == [3, 4, 5]
    pool.free_blocks(second)
    assert order(pool) == [3, 4, 5, 2, 1]


def test_the_last_holder_decides_where_a_block_goes() -> None:
    """Uncached while both hold it, cached by the time the last one lets go: it is worth keeping."""
    pool = BlockPool(4, 4)
    first = pool.get_new_blocks(1)
    second = pool.touch(first)
    pool.free_blocks(first)
    pool.cache_full_blocks(second, prompt(1, 4))
    pool.free_blocks(second)
    assert order(pool) == [2, 3, 1]


def test_a_lease_reads_like_a_list() -> None:
    pool = BlockPool(6, 4)
    pool.get_new_blocks(1)
    lease = pool.get_new_blocks(3, holder="me")
    assert (len(lease), lease[0], lease[2], lease[-1]) == (3, 2, 4, 4)
    with pytest.raises(IndexError):
        lease[3]
    assert lease.block_ids.tolist() == [2, 3, 4]
    assert lease.block_ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        lease.block_ids[0] = 1
    assert repr(lease) == "<BlockLease 2 of 'me': blocks [2, 3, 4]>"
    assert lease.holder == "me"


def test_the_leak_report_is_the_leases_still_out() -> None:
    pool = BlockPool(8, 4)
    a, b, c = (pool.get_new_blocks(1, holder=name) for name in "abc")
    pool.free_blocks(b)
    assert [lease.holder for lease in pool.leases()] == ["a", "c"]
    assert pool.block(1).holders == ["a"]
    assert pool.block(2).holders == []
    pool.free_blocks(a)
    pool.free_blocks(c)
    assert pool.leases() == []
    assert order(pool) == [3, 1, 2, 4, 5, 6, 7]


# ---------------------------------------------------------------- duplicates


def test_equal_content_gets_different_blocks() -> None:
    """Nothing is renumbered or merged (I2): whoever computed it keeps its blocks, and the index knows both."""
    pool = BlockPool(8, 4)
    first, second = cached(pool, prompt(1, 8)), cached(pool, prompt(1, 8))
    assert (list(first), list(second)) == ([1, 2], [3, 4])
    assert pool.num_cached_blocks == 4
    assert pool.block(1).block_hash == pool.block(3).block_hash
    assert list(pool.get_cached_blocks(prompt(1, 8))) == [1, 2], "the oldest of each content is hit"


def test_the_next_oldest_takes_the_place_of_an_evicted_duplicate() -> None:
    pool = BlockPool(5, 4)
    for lease in [cached(pool, prompt(1, 4)) for _ in range(3)]:
        pool.free_blocks(lease)
    assert order(pool) == [4, 1, 2, 3]
    pool.get_new_blocks(2)
    assert (pool.num_evicted_blocks, order(pool)) == (1, [2, 3])
    hit = pool.get_cached_blocks(prompt(1, 4))
    assert list(hit) == [2]
    pool.free_blocks(hit)
    assert order(pool) == [3, 2], "the hit made it the most recent; it stays the oldest duplicate"
    pool.get_new_blocks(1)
    assert pool.num_evicted_blocks == 2
    assert list(pool.get_cached_blocks(prompt(1, 4))) == [2]


def test_duplicates_are_evicted_one_by_one_and_the_child_stays_reachable() -> None:
    """Block 2 hangs on the content of block 1, not on block 1: with the duplicate 3 in its place it is still hit."""
    pool = BlockPool(6, 4)
    whole = cached(pool, prompt(1, 8))
    duplicate = cached(pool, prompt(1, 4))
    child = pool.get_cached_block(prompt(1, 8))
    assert child is not None
    pool.free_blocks(whole)
    assert order(pool) == [4, 5, 1]
    pool.get_new_blocks(3)
    assert pool.num_evicted_blocks == 1
    hit = pool.get_cached_blocks(prompt(1, 8))
    assert list(hit) == [3, 2] == [*duplicate, *child]
    pool.check()


def test_three_duplicates_serve_in_the_order_of_their_age() -> None:
    pool = BlockPool(6, 4)
    leases = [cached(pool, prompt(1, 4)) for _ in range(3)]
    served = []
    for lease in leases:
        found = pool.get_cached_block(prompt(1, 4))
        assert found is not None
        served.append(found[0])
        pool.free_blocks(found)
        pool.free_blocks(lease)
        pool.get_new_blocks(pool.num_free_blocks)
        pool.check()
    assert served == [1, 2, 3]
    assert pool.get_cached_block(prompt(1, 4)) is None
    assert pool.num_evicted_blocks == 3


# ---------------------------------------------------------------- caching


def test_a_block_is_cached_once_it_is_full_and_not_before() -> None:
    pool = BlockPool(5, 4)
    lease = pool.get_new_blocks(3)
    tokens = prompt(1, 12)
    cached_tokens = []
    num_cached = 0
    for length in range(1, 13):
        pool.cache_full_blocks(lease, tokens[:length], num_cached_blocks=num_cached)
        num_cached = length // 4
        cached_tokens.append(pool.num_cached_tokens(tokens))
    assert cached_tokens == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12]
    assert list(pool.get_cached_blocks(tokens)) == [1, 2, 3]


def test_blocks_of_a_hit_go_on_under_the_same_content() -> None:
    """A lease that grows block by block is one chain with whatever equal prompt was cached in one go."""
    pool = BlockPool(9, 2)
    grown, whole = pool.get_new_blocks(3), pool.get_new_blocks(4)
    pool.cache_full_blocks(grown, [1, 2])
    pool.cache_full_blocks(grown, [1, 2, 3, 4, 5, 6], num_cached_blocks=1)
    pool.cache_full_blocks(whole, [1, 2, 3, 4, 5, 6, 7, 8])
    assert list(pool.get_cached_blocks([1, 2, 3, 4, 5, 6, 7, 8])) == [1, 2, 3, 7]
    pool.check()


def test_a_hit_is_extended_and_published_as_one_prompt() -> None:
    """How a pool is used alone: hit, then new blocks behind it in the same lease, then all of it is one chain."""
    pool = BlockPool(8, 4)
    pool.free_blocks(cached(pool, prompt(1, 8)))
    lease = pool.get_cached_blocks(prompt(1, 8) + prompt(2, 8), holder="reader")
    pool.extend(lease, 2)
    assert list(lease) == [1, 2, 3, 4]
    assert [held.holder for held in pool.leases()] == ["reader"]
    assert order(pool) == [5, 6, 7]
    pool.cache_full_blocks(lease, prompt(1, 8) + prompt(2, 8), num_cached_blocks=2)
    assert list(pool.get_cached_blocks(prompt(1, 8) + prompt(2, 8))) == [1, 2, 3, 4]
    pool.free_blocks(lease)
    with pytest.raises(DoubleFree, match=r"'reader' on blocks \[1, 2, 3, 4\]"):
        pool.extend(lease, 1)


def test_a_lease_is_extended_alone() -> None:
    """Another holder of the same blocks keeps exactly those; and what does not fit changes nothing."""
    pool = BlockPool(5, 4)
    first = pool.get_new_blocks(1, holder="first")
    second = pool.touch(first, holder="second")
    pool.extend(first, 2)
    assert (list(first), list(second)) == ([1, 2, 3], [1])
    assert pool.ref_counts().tolist() == [0, 2, 1, 1, 0]
    with refused(pool, OutOfBlocks, match=r"^num_blocks is 2; only 1 of 4 blocks are free$"):
        pool.extend(first, 2)
    pool.extend(first, 0)
    pool.free_blocks(second)
    pool.free_blocks(first)
    assert order(pool) == [1, 2, 3, 4]


def test_wrong_tokens_for_leading_blocks_are_refused() -> None:
    """What follows would be indexed under a prefix that it was not computed after (I5)."""
    pool = BlockPool(6, 4)
    lease = cached(pool, prompt(1, 8))
    other = cached(pool, prompt(2, 8))
    longer = pool.touch(lease)
    assert list(longer) == [1, 2]
    for wrong, position in (
        ([9, *prompt(1, 8)[1:]], 0),
        ([*prompt(1, 4), 9, *prompt(1, 8)[5:]], 1),
        (prompt(2, 8), 0),
        ([*prompt(1, 4), *prompt(2, 8)[4:]], 1),
    ):
        before = snapshot(pool)
        message = f"^token_ids differ from what block {position + 1} at position {position} caches$"
        with pytest.raises(InvalidArgument, match=message):
            pool.cache_full_blocks(lease, wrong, num_cached_blocks=2)
        assert snapshot(pool) == before
    before = snapshot(pool)
    with pytest.raises(InvalidArgument, match="differ from what block 1 at position 0"):
        pool.cache_full_blocks(lease, prompt(1, 8), num_cached_blocks=2, extra_keys=(LoRA("a"),))
    assert snapshot(pool) == before, "the same tokens under other keys are other tokens"
    pool.cache_full_blocks(other, prompt(2, 8), num_cached_blocks=2)


def test_the_number_of_cached_blocks_must_be_right() -> None:
    pool = BlockPool(6, 4)
    lease = pool.get_new_blocks(2)
    pool.cache_full_blocks(lease, prompt(1, 4))
    for num_cached, block, position, state in ((0, 1, 0, "already"), (2, 2, 1, "not")):
        message = f"^num_cached_blocks is {num_cached}, but block {block} at position {position} is {state} cached$"
        with refused(pool, InvalidArgument, match=message):
            pool.cache_full_blocks(lease, prompt(1, 8), num_cached_blocks=num_cached)
    with pytest.raises(InvalidArgument, match=r"^token_ids fill 3 blocks; the lease has 2$"):
        pool.cache_full_blocks(lease, prompt(1, 12), num_cached_blocks=1)
    pool.cache_full_blocks(lease, prompt(1, 8), num_cached_blocks=1)
    assert pool.num_cached_tokens(prompt(1, 8)) == 8


def test_extra_keys_part_equal_prompts() -> None:
    pool = BlockPool(8, 4)
    for keys in ((LoRA("a"),), (CacheSalt("a"),), ()):
        pool.cache_full_blocks(pool.get_new_blocks(1), prompt(1, 4), extra_keys=keys)
    assert list(pool.get_cached_blocks(prompt(1, 4), extra_keys=(CacheSalt("a"),))) == [2]
    assert list(pool.get_cached_blocks(prompt(1, 4))) == [3]
    found = pool.get_cached_block(prompt(1, 4), extra_keys=(LoRA("a"),))
    assert found is not None
    assert list(found) == [1]
    assert pool.num_cached_tokens(prompt(1, 4), extra_keys=(LoRA("b"),)) == 0


def test_without_prefix_caching_nothing_is_indexed_and_all_goes_to_the_front() -> None:
    pool = BlockPool(6, 4, enable_prefix_caching=False)
    lease = cached(pool, prompt(1, 8))
    assert (pool.num_cached_blocks, pool.num_cached_tokens(prompt(1, 8))) == (0, 0)
    assert len(pool.get_cached_blocks(prompt(1, 8))) == 0
    pool.free_blocks(lease)
    assert order(pool) == [1, 2, 3, 4, 5]


def test_a_reset_forgets_all_at_once_and_takes_nothing_away() -> None:
    pool = BlockPool(8, 4)
    held, idle = cached(pool, prompt(1, 8), "held"), cached(pool, prompt(2, 8))
    pool.free_blocks(idle)
    assert order(pool) == [5, 6, 7, 4, 3]
    pool.reset()
    assert order(pool) == [5, 6, 7, 4, 3], "idle blocks keep their places"
    assert (pool.num_cached_blocks, pool.num_evicted_blocks) == (0, 0)
    assert pool.num_cached_tokens(prompt(1, 8)) == pool.num_cached_tokens(prompt(2, 8)) == 0
    assert [lease.holder for lease in pool.leases()] == ["held"]
    pool.free_blocks(held)
    assert order(pool) == [1, 2, 5, 6, 7, 4, 3], "they hold nothing reusable any more"
    pool.free_blocks(cached(pool, prompt(1, 8)))
    assert pool.num_cached_tokens(prompt(1, 8)) == 8


@pytest.mark.parametrize("num_blocks", [2, 3, 5, 8])
def test_after_a_reset_a_full_pool_fits_the_index_again(num_blocks: int) -> None:
    """Its table keeps its size: at most half full, so that every probe ends."""
    pool = BlockPool(num_blocks, 1)
    slots = len(pool._ledger.index._slots)
    assert slots >= 2 * num_blocks
    for _ in range(3):
        tokens = list(range(num_blocks - 1))
        pool.free_blocks(cached(pool, tokens))
        assert pool.num_cached_tokens(tokens) == num_blocks - 1
        pool.reset()
        assert pool.num_cached_tokens(tokens) == 0
        assert len(pool._ledger.index._slots) == slots
        assert len(order(pool)) == num_blocks - 1
