"""The manager: the two-phase life of sequences, each block id and each order worked out by hand.

`Checked` proves all laws after every call. Forks and cuts stand in test_forks, the corners of joining in test_joining.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockyard import (
    CacheSalt,
    InvalidArgument,
    InvariantError,
    LoRA,
    NeverFits,
    OutOfBlocks,
    SeqStatus,
    SequenceNotReady,
)
from blockyard.answers import CacheStats
from blockyard.core.sequences.table import ALERT, QUIET
from blockyard_testing.cached import cached_tokens

from ..support.checked import Checked, prompt
from ..support.snapshot import refused

SCHEDULED, WAITS = SeqStatus.SCHEDULED, SeqStatus.WAITS_FOR_PREFIX


# ---------------------------------------------------------------- a life


def test_sequence_runs_from_prompt_to_free() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 6), holder="request 1")
    assert cache.row(seq) == [1, 2]
    assert cache.state(seq) == (6, 0)
    plan = cache.reserve([seq], 6)
    assert plan.slot_mapping.tolist() == [4, 5, 6, 7, 8, 9]
    assert cache.state(seq) == (6, 0), "reserved is not computed"
    cache.commit([seq], 6, [7])
    assert cache.state(seq) == (7, 6)
    assert cache.tokens(seq) == [*prompt(1, 6), 7]
    for position, token in ((6, 8), (7, 9), (8, 10)):
        plan = cache.reserve([seq], 1)
        assert plan.slot_mapping.tolist() == [4 + position]
        cache.commit([seq], 1, [token])
    assert cache.row(seq) == [1, 2, 3]
    assert cache.state(seq) == (10, 9)
    assert cache.num_cached_blocks == 2, "8 computed tokens fill two blocks; the third is private"
    cache.free(seq)
    assert cache.num_used_blocks == 0
    # 3 held nothing reusable and goes to the front; 2 and 1 are cached and go to the tail, the suffix first.
    assert cache.free_order() == [3, *range(4, 20), 2, 1]


def test_generated_tokens_are_hit_like_prompts() -> None:
    """The next turn of a chat sends question and answer back: all of their full blocks are there."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 6), [7])
    for token in (8, 9, 10):
        cache.compute(seq, [token])
    history = cache.tokens(seq)
    assert history == [*prompt(1, 6), 7, 8, 9, 10]
    cache.free(seq)
    again = cache.allocate([*history, 11, 12])
    assert cache.state(again) == (12, 8)
    assert cache.row(again) == [1, 2, 3]


def test_a_prompt_is_computed_in_chunks() -> None:
    """Blocks become shareable as they are filled; not one token earlier."""
    cache = Checked()
    seq = cache.allocate(prompt(1, 10))
    computed = []
    for chunk in (3, 3, 1, 3):
        plan = cache.reserve([seq], chunk)
        first = 4 + sum(size for size, _ in computed)
        assert plan.slot_mapping.tolist() == list(range(first, first + chunk))
        cache.commit([seq], chunk)
        computed.append((chunk, cached_tokens(cache, prompt(1, 10))))
    assert computed == [(3, 0), (3, 4), (1, 4), (3, 8)]
    assert cache.row(seq) == [1, 2, 3]


def test_less_is_computed_than_was_reserved() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 10))
    cache.reserve([seq], 10)
    cache.commit([seq], 5)
    assert cache.state(seq) == (10, 5)
    assert cached_tokens(cache, prompt(1, 10)) == 4
    assert cache.reserve([seq], 5).slot_mapping.tolist() == [9, 10, 11, 12, 13]


def test_decoding_sequence_needs_no_recheck() -> None:
    """The fast path: once the token that waited has its block, nothing about the sequence is out of the ordinary."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 4), [7])
    alert = cache.cache._parts.sequences.alert
    assert alert[0] == ALERT
    cache.compute(seq, [8])
    assert alert[0] == QUIET
    cache.compute(seq, [9])
    assert alert[0] == QUIET


def test_a_failed_step_leaves_nothing_to_hit() -> None:
    """Nothing is computed, so nothing is shared when the sequence goes, and its blocks hold nothing reusable (I3)."""
    cache = Checked(num_blocks=6)
    seq = cache.allocate(prompt(1, 12))
    cache.reserve([seq], 12)
    cache.commit([seq], 0)
    assert cache.state(seq) == (12, 0)
    assert cached_tokens(cache, prompt(1, 12)) == 0
    cache.free(seq)
    assert cache.num_cached_blocks == 0
    assert cache.free_order() == [1, 2, 3, 4, 5]
    assert cache.state(cache.allocate(prompt(1, 12))) == (12, 0)


def test_a_sequence_freed_in_the_middle_of_a_step_leaves_nothing_behind() -> None:
    cache = Checked(num_blocks=6)
    seq = cache.allocate(prompt(1, 12))
    cache.reserve([seq], 5)
    cache.commit([seq], 5)
    cache.reserve([seq], 7)
    cache.free(seq)
    assert cache.num_cached_blocks == 1, "one block was computed in the first chunk"
    assert cache.free_order() == [2, 3, 4, 5, 1]


def test_a_new_reservation_replaces_the_old_one() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 6))
    cache.reserve([seq], 6)
    assert cache.reserve([seq], 2).slot_mapping.tolist() == [4, 5]
    with pytest.raises(InvalidArgument, match=r"^num_computed\[0\] is 3 for .*; it must be from 0 to the 2 tokens"):
        cache.commit([seq], 3)
    cache.commit([seq], 2)
    with pytest.raises(
        InvalidArgument,
        match=r"from 0 to the 0 tokens reserved; it has no reserved tokens: pass 0 and -1 for a sequence",
    ):
        cache.commit([seq], 1)


def test_append_between_reserve_and_commit_says_what_to_do() -> None:
    """It ends the reservation; the commit that follows computes nothing, and is right after a new one."""
    cache = Checked()
    seq = cache.allocate(prompt(1, 6))
    cache.reserve([seq], 6)
    cache.append([seq], [7])
    with pytest.raises(InvalidArgument, match=r"reserve again if append or commit has ended its reservation"):
        cache.commit([seq], 6)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    assert cache.state(seq) == (7, 7)


def test_a_batch_is_one_call() -> None:
    cache = Checked()
    seqs = [cache.allocate(prompt(number, 4 * number)) for number in (1, 2, 3)]
    plan = cache.reserve(np.array(seqs), np.array([4, 8, 12], dtype=np.int32))
    assert plan.slot_mapping.tolist() == list(range(4, 28))
    cache.commit(np.array(seqs), plan.num_scheduled, np.array([7, -1, 9]))
    assert [cache.state(seq) for seq in seqs] == [(5, 4), (8, 8), (13, 12)]
    assert [cache.tokens(seq)[-1] for seq in seqs] == [7, 207, 9]
    cache.free(seqs[::-1])
    assert cache.num_seqs == 0
    # In the order given: 6, 5, 4 of the third, 3, 2 of the second, 1 of the first.
    assert cache.free_order() == [*range(7, 20), 6, 5, 4, 3, 2, 1]


def test_one_handle_may_stand_for_a_batch() -> None:
    cache = Checked()
    for form in (int, np.int64, np.array):
        seq = cache.allocate(prompt(1, 4))
        assert cache.reserve(form(seq) if form is not np.array else np.array([seq]), np.int64(1)).all_fit
        cache.commit(form(seq) if form is not np.array else np.array([seq]), np.int64(1))
        cache.free(form(seq) if form is not np.array else np.array([seq]))
    assert cache.num_seqs == 0


# ---------------------------------------------------------------- prefix hits


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12)])
def test_the_last_token_is_never_hit(num_tokens: int, hit: int) -> None:
    """A step computes its logits, so at least one token must be left to compute."""
    cache = Checked()
    cache.free(cache.prefilled(prompt(1, 16)))
    assert cache.state(cache.allocate(prompt(1, 16)[:num_tokens])) == (num_tokens, hit)


@pytest.mark.parametrize("block_size", [1, 3, 5])
def test_odd_block_sizes_hit_whole_blocks(block_size: int) -> None:
    cache = Checked(block_size=block_size)
    tokens = prompt(1, 3 * block_size)
    cache.free(cache.prefilled(tokens))
    seq = cache.allocate(tokens)
    assert cache.state(seq) == (3 * block_size, 2 * block_size)
    assert cache.row(seq)[:2] == [1, 2]
    cache.compute(seq, [7])
    assert cache.tokens(seq) == [*tokens, 7]


def test_a_hit_shares_blocks_and_the_rest_is_new() -> None:
    cache = Checked()
    first = cache.prefilled(prompt(1, 10))
    second = cache.allocate(prompt(1, 8) + prompt(2, 4))
    assert cache.row(first) == [1, 2, 3]
    assert cache.row(second) == [1, 2, 4]
    assert cache.ref_counts(second) == [2, 2, 1]
    assert cache.reserve([second], 4).slot_mapping.tolist() == [16, 17, 18, 19]
    cache.commit([second], 4)
    cache.free(first)
    assert cache.free_order() == [3, *range(5, 20)], "blocks 1 and 2 are held by the second"
    cache.free(second)
    assert cache.free_order() == [3, *range(5, 20), 4, 2, 1]


def test_prompts_that_grow_by_a_block_hit_all_before() -> None:
    """Turn after turn of a chat, around and beyond the sixty-four blocks that a lookup takes at once."""
    cache = Checked(num_blocks=200, block_size=1, max_model_len=150)
    hits = []
    for length in (63, 64, 65, 66, 67, 128, 129, 130, 131):
        seq = cache.allocate(list(range(length)))
        hits.append(cache.num_computed_tokens(seq))
        cache.compute(seq)
        cache.free(seq)
    assert hits == [0, 63, 64, 65, 66, 67, 128, 129, 130]


def test_equal_blocks_computed_twice_stay_two() -> None:
    """The last block of a prompt is computed again, because its last token is: the two sequences hold two (I2)."""
    cache = Checked()
    first, second = cache.prefilled(prompt(1, 8)), cache.prefilled(prompt(1, 8))
    assert (cache.row(first), cache.row(second)) == ([1, 2], [1, 3])
    assert cache.num_cached_blocks == 3
    third = cache.allocate(prompt(1, 9))
    assert cache.row(third) == [1, 2, 4], "of two equal blocks the oldest is hit"


def test_hits_are_held_before_new_blocks_are_taken() -> None:
    """The free queue is 4, 2, 1: block 4 and then 2 would be next. But block 1 and 2 are the prompt's own hits."""
    cache = Checked(num_blocks=5)
    cache.free(cache.prefilled(prompt(1, 8)))
    cache.free(cache.prefilled(prompt(2, 4)))
    assert cache.free_order() == [4, 2, 1, 3]
    seq = cache.allocate([*prompt(1, 8), 9, 9, 9, 9, 9])
    assert cache.row(seq) == [1, 2, 4, 3]
    assert cache.stats().num_evicted_blocks == 1


@pytest.mark.parametrize("owner", [(), (LoRA("a"),), (CacheSalt("a"),), (LoRA("a"), CacheSalt("a"))])
def test_other_keys_never_hit(owner: tuple[Any, ...]) -> None:
    cache = Checked(num_blocks=30)
    seq = cache.allocate(prompt(1, 5), extra_keys=owner)
    cache.compute(seq)
    for keys in ((), (LoRA("a"),), (CacheSalt("a"),), (LoRA("a"), CacheSalt("a")), (LoRA("b"),)):
        hit = cache.num_computed_tokens(cache.allocate(prompt(1, 5), extra_keys=keys))
        assert hit == (4 if keys == owner else 0)


def test_a_block_of_generated_tokens_keeps_its_keys() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 3), extra_keys=(LoRA("a"),))
    cache.compute(seq, [7])
    cache.compute(seq, [8])
    tokens = cache.tokens(seq)
    assert cached_tokens(cache, tokens) == 0
    assert cached_tokens(cache, tokens, (LoRA("a"),)) == 4


# ---------------------------------------------------------------- joining


def test_two_equal_prompts_in_one_step_share_their_blocks() -> None:
    """The second computes only what the first does not, in the very same step (I3)."""
    cache = Checked()
    owner, joiner = cache.allocate(prompt(1, 10)), cache.allocate(prompt(1, 10))
    assert (cache.row(owner), cache.row(joiner)) == ([1, 2, 3], [1, 2, 4])
    assert cache.state(joiner) == (10, 8)
    plan = cache.reserve([owner, joiner], [10, 2])
    assert plan.all_fit
    assert plan.slot_mapping.tolist() == [*range(4, 14), 16, 17]
    cache.commit([owner, joiner], plan.num_scheduled, [7, 8])
    assert [cache.state(seq) for seq in (owner, joiner)] == [(11, 10), (11, 10)]
    assert cache.ref_counts(owner) == [2, 2, 1]


def test_a_joiner_waits_until_its_prefix_is_computed() -> None:
    cache = Checked()
    owner, joiner = cache.allocate(prompt(1, 10)), cache.allocate(prompt(1, 10))
    status = cache.reserve([joiner], 2).status.tolist()
    assert status == [WAITS]
    cache.reserve([owner, joiner], [4, 2])
    cache.commit([owner], 4)
    plan = cache.reserve([joiner, owner], [2, 6])
    assert plan.status.tolist() == [WAITS, SCHEDULED], "the owner must come first in the list"
    assert plan.num_scheduled.tolist() == [0, 6]
    with pytest.raises(SequenceNotReady, match=r"^fork: sequence \d+ has computed 8 tokens; compute"):
        cache.fork(joiner)
    plan = cache.reserve([owner, joiner], [6, 2])
    assert plan.status.tolist() == [SCHEDULED, SCHEDULED]
    cache.commit([owner], 6)
    cache.commit([joiner], 2)
    assert cache.state(joiner) == (10, 10)


def test_pool_lookup_returns_computed_blocks_only() -> None:
    """A lease cannot wait for a step, so blocks that are still being computed do not count."""
    cache = Checked()
    seq = cache.allocate(prompt(1, 12))
    assert cache.num_cached_blocks == 3
    assert len(cache.hold_cached(prompt(1, 12))) == 0
    cache.reserve([seq], 8)
    cache.commit([seq], 8)
    assert cache.contents.equal_to(prompt(1, 12)) == []
    lease = cache.hold_cached(prompt(1, 12), holder="reader")
    assert list(lease) == [1, 2]
    assert cache.block(1).holders == ["reader", f"sequence {seq}"]
    cache.pool.free_blocks(lease)


def test_waiter_takes_over_when_its_producer_is_freed() -> None:
    """The producer is freed after one of two shared blocks: the waiter continues after the computed one."""
    cache = Checked()
    owner, joiner = cache.allocate(prompt(1, 10)), cache.allocate(prompt(1, 10))
    cache.reserve([owner], 5)
    cache.commit([owner], 5)
    assert cache.state(joiner) == (10, 8)
    cache.free(owner)
    assert cache.state(joiner) == (10, 4)
    assert cache.row(joiner) == [1, 2, 4]
    assert cache.reserve([joiner], 6).slot_mapping.tolist() == [8, 9, 10, 11, 16, 17]
    cache.commit([joiner], 6)
    assert cached_tokens(cache, prompt(1, 10)) == 8


def test_after_a_failed_step_owner_and_joiner_try_again() -> None:
    cache = Checked()
    owner, joiner = cache.allocate(prompt(1, 9)), cache.allocate(prompt(1, 9))
    cache.reserve([owner, joiner], [9, 1])
    cache.commit([owner, joiner], 0)
    assert cached_tokens(cache, prompt(1, 9)) == 0
    assert cache.reserve([joiner], 1).status.tolist() == [WAITS]
    cache.free([joiner, owner])
    assert cache.num_cached_blocks == 0
    assert cache.state(cache.allocate(prompt(1, 9))) == (9, 0)


# ---------------------------------------------------------------- speculation and the last token


def test_speculated_tokens_are_named_at_the_commit() -> None:
    """One known token and three drafts are computed; two drafts are accepted, and a token after them is sampled."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 5), [50])
    assert cache.state(seq) == (6, 5)
    plan = cache.reserve([seq], 4)
    assert plan.slot_mapping.tolist() == [9, 10, 11, 12]
    assert cache.row(seq) == [1, 2, 3], "drafts get blocks too"
    cache.commit([seq], 3, [[51, 52, 53, -1]])
    assert cache.state(seq) == (9, 8)
    assert cache.tokens(seq) == [*prompt(1, 5), 50, 51, 52, 53]
    assert cached_tokens(cache, cache.tokens(seq)) == 8
    assert cache.reserve([seq], 1).slot_mapping.tolist() == [12], "the rejected draft's slot is written again"


def test_a_batch_accepts_different_numbers_of_drafts() -> None:
    cache = Checked()
    seqs = [cache.prefilled(prompt(number, 4), [7]) for number in (1, 2, 3)]
    cache.reserve(seqs, 4)
    cache.commit(seqs, [4, 1, 0], np.array([[1, 2, 3, 4], [5, -1, -1, -1], [-1, -1, -1, -1]]))
    assert [cache.state(seq) for seq in seqs] == [(9, 8), (6, 5), (5, 4)]
    assert [cache.tokens(seq)[4:] for seq in seqs] == [[7, 1, 2, 3, 4], [7, 5], [7]]
    assert [cached_tokens(cache, cache.tokens(seq)) for seq in seqs] == [8, 4, 4]


def test_all_drafts_accepted_up_to_the_last_slot() -> None:
    """Four tokens fill block 2 to its end, and the sampled one behind them waits for a block."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 4), [7])
    cache.reserve([seq], 4)
    cache.commit([seq], 4, [[1, 2, 3, 4]])
    assert cache.row(seq) == [1, 2]
    assert cache.state(seq) == (9, 8)
    assert cache.tokens(seq) == [*prompt(1, 4), 7, 1, 2, 3, 4]
    assert cache.reserve([seq], 1).slot_mapping.tolist() == [12]
    assert cache.tokens(seq) == [*prompt(1, 4), 7, 1, 2, 3, 4]


def test_the_last_token_waits_at_the_end_of_a_block() -> None:
    """Block 1 is full: the sampled token is known, but has no block before the next reservation gives it one."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 4), [7])
    assert cache.row(seq) == [1]
    assert cache.state(seq) == (5, 4)
    assert cache.tokens(seq) == [*prompt(1, 4), 7]
    with refused(
        cache.cache,
        InvalidArgument,
        match=r"^next_tokens\[0\] has 1 tokens for sequence \d+; only 0 fit until the next",
    ):
        cache.commit([seq], 0, [8])
    assert cache.reserve([seq], 1).slot_mapping.tolist() == [8]
    assert cache.row(seq) == [1, 2]
    cache.commit([seq], 1, [8])
    assert cache.tokens(seq) == [*prompt(1, 4), 7, 8]


def test_tokens_can_be_appended_without_a_step() -> None:
    """As a tool's answer in a chat: three fit block 2, the fourth waits, a fifth is refused."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 5))
    cache.commit([seq], 0, [[1, 2, 3]])
    assert (cache.state(seq), cache.row(seq)) == ((8, 5), [1, 2])
    cache.commit([seq], 0, [4])
    assert cache.tokens(seq) == [*prompt(1, 5), 1, 2, 3, 4]
    with pytest.raises(InvalidArgument, match="0 fit"):
        cache.commit([seq], 0, [5])
    plan = cache.reserve([seq], 4)
    assert plan.slot_mapping.tolist() == [9, 10, 11, 12]
    other = cache.prefilled(prompt(2, 5))
    with pytest.raises(InvalidArgument, match=r"^next_tokens\[1\] has 5 tokens for sequence \d+; only 4 fit"):
        cache.commit([seq, other], 0, [[-1] * 5, [1, 2, 3, 4, 5]])


# ---------------------------------------------------------------- reset, counters, switches


def test_a_reset_while_sequences_run() -> None:
    """After new weights nothing old is hit, and sequences with old keys publish nothing more."""
    cache = Checked()
    old = cache.prefilled(prompt(1, 8), [7])
    idle = cache.prefilled(prompt(2, 8))
    cache.free(idle)
    cache.reset_prefix_cache()
    assert cache.num_cached_blocks == 0
    assert cache.state(cache.allocate([*prompt(2, 8), 9])) == (9, 0)
    new = cache.prefilled([*prompt(1, 8), 9])
    assert cache.row(old) == [1, 2]
    assert not set(cache.row(new)) & set(cache.row(old))
    for token in range(8):
        cache.compute(old, [token])
    assert cache.state(old) == (17, 16)
    tokens = cache.tokens(old)
    assert cached_tokens(cache, tokens) == 8, "what the new one computed, and nothing of the old one"
    cache.free(old)
    assert cache.state(cache.allocate(tokens)) == (17, 8)


def test_after_a_reset_new_sequences_publish_what_they_generate() -> None:
    cache = Checked()
    cache.free(cache.prefilled(prompt(1, 5)))
    cache.reset_prefix_cache()
    seq = cache.prefilled(prompt(1, 3), [7])
    cache.compute(seq, [8])
    assert cached_tokens(cache, [*prompt(1, 3), 7]) == 4


def test_a_reset_in_the_middle_of_a_prompt() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 12))
    cache.reserve([seq], 5)
    cache.commit([seq], 5)
    cache.reserve([seq], 7)
    cache.reset_prefix_cache()
    cache.commit([seq], 7)
    assert cache.state(seq) == (12, 12)
    assert cache.num_cached_blocks == 0
    cache.free(seq)
    assert cache.free_order() == list(range(1, 20))


def test_counters_count_hits_copies_and_evictions() -> None:
    cache = Checked(num_blocks=8)
    assert cache.stats() == CacheStats(0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0)
    assert cache.stats().hit_rate == 0.0
    first = cache.prefilled(prompt(1, 9))
    assert cache.stats() == CacheStats(9, 0, 0, 0, 3, 4, 3, 2, 1, 3, 0, 0, 3, 0)
    second = cache.prefilled([*prompt(1, 8), 9, 9])
    assert cache.stats() == CacheStats(19, 8, 0, 0, 4, 3, 4, 2, 2, 5, 0, 0, 4, 0)
    fork = cache.fork(second)[0]
    assert cache.stats() == CacheStats(19, 8, 0, 0, 4, 3, 4, 2, 3, 7, 0, 0, 4, 0), (
        "a shared block's waste is counted per sequence"
    )
    cache.commit([fork], 0, [5])
    cache.reserve([fork], 1)
    assert cache.stats() == CacheStats(19, 8, 0, 1, 5, 2, 5, 2, 3, 6, 0, 0, 5, 0)
    cache.free([first, second, fork])
    assert cache.stats() == CacheStats(19, 8, 0, 1, 5, 7, 0, 2, 0, 0, 0, 0, 5, 5)
    assert cache.stats().hit_rate == 8 / 19
    last = cache.allocate(prompt(3, 28))
    assert cache.stats() == CacheStats(19, 8, 2, 1, 7, 0, 7, 7, 1, 0, 0, 0, 12, 5), "it has computed nothing yet"
    cache.commit(last, cache.reserve(last).num_scheduled)
    assert cache.stats() == CacheStats(47, 8, 2, 1, 7, 0, 7, 7, 1, 0, 0, 0, 12, 5)
    assert cache.usage == 1.0


def test_refused_prompts_are_not_counted() -> None:
    cache = Checked(num_blocks=3)
    cache.allocate(prompt(1, 5))
    before = cache.stats()
    for call in (lambda: cache.allocate(prompt(2, 4)), lambda: cache.allocate(prompt(2, 40))):
        with pytest.raises((OutOfBlocks, NeverFits)):
            call()
    assert cache.stats() == before


def test_nothing_is_cached_without_prefix_caching() -> None:
    """Nothing is indexed, hit or joined; blocks are reused as soon as they are free; the rest is the same."""
    cache = Checked(num_blocks=8, enable_prefix_caching=False)
    first, second = cache.allocate(prompt(1, 9)), cache.allocate(prompt(1, 9))
    assert (cache.row(first), cache.row(second)) == ([1, 2, 3], [4, 5, 6])
    assert cache.state(second) == (9, 0)
    assert cache.reserve([second, first], 9).all_fit, "nobody waits for anybody"
    cache.commit([second, first], 9, [7, 8])
    assert cache.tokens(first) == [*prompt(1, 9), 8]
    assert cache.num_cached_blocks == 0
    child = cache.fork(first)[0]
    assert cache.reserve([child], 1).copies.tolist() == [[3, 7]]
    cache.free([first, child])
    assert cache.free_order() == [1, 2, 7, 3], "3 with the parent, then the child's 7, 2 and 1, each to the front"
    assert cache.stats().num_hit_tokens == 0


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("num_blocks", 1, "I8: block 2 has ref_cnt 1, but 0 holders"),
        ("num_tokens", 20, "I6: sequence {seq} has 20 tokens in 8 slots"),
        ("num_tokens", 5, "I3: sequence {seq} has computed 6 of 5 tokens"),
        ("num_computed", 7, "I3: sequence {seq} has computed 7 of 6 tokens"),
        ("num_computed", 2, "I3: block 1 of sequence {seq}: computed and owner disagree"),
        ("num_published", 2, "I5: block 2 of sequence {seq} is not indexed after its predecessor"),
        ("root", 7, "I5: block 1 of sequence {seq} is not indexed after its predecessor"),
        ("num_reserved", 3, "I6: sequence {seq} has reserved 3 tokens beyond its 8 slots"),
        ("ready", 4, "I6: sequence {seq} is ready up to 4 tokens, which is not where it ends"),
        ("tail", 1, "I2: sequence {seq} has block 1 for its last one, from token 4 on"),
        ("tail_at", 0, "I2: sequence {seq} has block 2 for its last one, from token 0 on"),
        ("num_waiters", 1, "I3: row 0 counts 1 waiters, there are 0"),
        ("waits_on", 3, "I3: sequence {seq} waits on row 3, which is gone or not on its way"),
        ("handle", 0, "I8: block 1 has ref_cnt 1, but 0 holders"),
    ],
)
def test_check_compares_sequences_with_the_pool(array: str, value: int, message: str) -> None:
    """A sequence in row 0 holds blocks 1 and 2 for six computed tokens; one number of it is changed by hand."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 6))
    getattr(cache.cache._parts.sequences, array)[0] = value
    with pytest.raises(InvariantError, match=f"^{message.format(seq=seq)}$"):
        cache.cache.check()


def test_check_names_blocks_that_are_held_twice_or_by_nobody() -> None:
    cache = Checked()
    cache.prefilled(prompt(1, 6))
    blocks = cache.cache._parts.sequences.blocks
    blocks[1] = 1
    with pytest.raises(InvariantError, match=r"^I2: sequence \d+ holds the null block, or a block twice: \[1, 1\]$"):
        cache.cache.check()
    blocks[1] = 0
    with pytest.raises(InvariantError, match=r"^I2: sequence \d+ holds the null block, or a block twice: \[1, 0\]$"):
        cache.cache.check()
    blocks[1] = 3
    with pytest.raises(InvariantError, match=r"^I8: block 2 has ref_cnt 1, but 0 holders$"):
        cache.cache.check()
    blocks[1], blocks[2] = 2, 3
    with pytest.raises(InvariantError, match=r"^I2: row 0 has a block id behind its 2 blocks$"):
        cache.cache.check()


def test_check_finds_a_block_that_is_written_while_shared() -> None:
    """I7: the last block of a fork and its parent, reserved for writing without a copy."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 5), [7])
    cache.fork(seq)
    cache.cache._parts.sequences.num_reserved[0] = 1
    with pytest.raises(InvariantError, match=rf"^I7: sequence {seq} is about to write block 2, held 2 times$"):
        cache.cache.check()
