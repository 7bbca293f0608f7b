"""Sequences that join blocks still being computed: the corners, each as a short program.

Manager and reference model run side by side (`Pair`), so every line below is also compared whole.
"""

from __future__ import annotations

import pytest

from blockyard import CacheConfig, InvalidArgument, KVCacheManager, SeqStatus

from ..support.model_pair import Pair
from ..support.reference import SCHEDULED, WAITS_FOR_PREFIX
from ..support.reference import Sequence as ModelSequence


def crowd(block_size: int = 1) -> Pair:
    return Pair(40, block_size, max_num_seqs=8, max_model_len=20 * block_size)


def given(pair: Pair, tokens: list[int]) -> ModelSequence:
    seq = pair.allocate(tokens)
    assert seq is not None
    return seq


def statuses(pair: Pair, seqs: list[ModelSequence], num_new: list[int]) -> list[str]:
    step = pair.reserve(seqs, num_new)
    assert step is not None
    return step.status


def compute(pair: Pair, seq: ModelSequence, num: int, new: list[int] | None = None) -> None:
    """Reserve and commit `num` tokens of one sequence."""
    assert statuses(pair, [seq], [num]) == [SCHEDULED]
    pair.commit([seq], [num], [new or []])


def test_waiter_runs_with_its_producer_or_later() -> None:
    pair = crowd()
    owner = given(pair, [1, 2, 3])
    joiner = given(pair, [1, 2, 3, 4])
    assert joiner.num_computed == 3
    assert statuses(pair, [joiner, owner], [1, 3]) == [WAITS_FOR_PREFIX, SCHEDULED]
    assert statuses(pair, [joiner], [1]) == [WAITS_FOR_PREFIX]
    assert statuses(pair, [owner, joiner], [2, 1]) == [SCHEDULED, WAITS_FOR_PREFIX]
    assert statuses(pair, [owner, joiner], [3, 1]) == [SCHEDULED, SCHEDULED]
    pair.commit([owner, joiner], [3, 1])
    assert pair.cache.pool.ref_counts()[1:5].tolist() == [2, 2, 2, 1]


def test_a_step_of_both_counts_only_with_the_prefix() -> None:
    """The owner came less far than promised: nothing of the joiner counts, in whatever order they stand (I3)."""
    pair = crowd()
    owner, joiner = given(pair, [1, 2, 3]), given(pair, [1, 2, 3, 4])
    assert statuses(pair, [owner, joiner], [3, 1]) == [SCHEDULED, SCHEDULED]
    pair.commit([joiner, owner], [1, 2])
    pair.commit([owner, joiner], [2, 1])
    pair.commit([joiner], [1])
    assert (owner.num_computed, joiner.num_computed, joiner.num_reserved) == (0, 3, 1)
    pair.commit([joiner, owner], [1, 3])
    assert (owner.num_computed, joiner.num_computed) == (3, 4)


def test_a_failed_step_leaves_nothing_to_hit() -> None:
    pair = crowd()
    owner = given(pair, [1, 2, 3])
    assert statuses(pair, [owner], [3]) == [SCHEDULED]
    pair.commit([owner], [0])
    pair.free([owner])
    assert given(pair, [1, 2, 3, 4]).num_computed == 0


def test_waiter_takes_over_from_a_freed_producer() -> None:
    """Of three waiters, the one with most shared blocks computes on, and the others wait for it."""
    pair = crowd()
    owner = given(pair, [1, 2, 3, 4, 5])
    short, longest, equal = given(pair, [1, 2, 9]), given(pair, [1, 2, 3, 9]), given(pair, [1, 2, 3, 8])
    compute(pair, owner, 1)
    pair.free([owner])
    assert [seq.num_computed for seq in (short, longest, equal)] == [2, 1, 3]
    assert statuses(pair, [short, equal, longest], [1, 1, 3]) == [WAITS_FOR_PREFIX, WAITS_FOR_PREFIX, SCHEDULED]
    assert statuses(pair, [longest, short, equal], [2, 1, 1]) == [SCHEDULED, SCHEDULED, SCHEDULED]
    pair.commit([longest, short, equal], [2, 1, 1])
    assert given(pair, [1, 2, 3, 4, 5, 6]).num_computed == 3


def test_freed_owner_ends_the_reservations_of_its_joiners_and_of_nobody_else() -> None:
    """All four had slots in one step when the producer was aborted: its waiters would follow uncomputed tokens."""
    pair = crowd()
    owner, heir, other = given(pair, [1, 2, 3]), given(pair, [1, 2, 3, 4]), given(pair, [1, 2, 5])
    stranger = given(pair, [8, 9])
    assert statuses(pair, [owner, heir, other, stranger], [3, 1, 1, 2]) == [SCHEDULED] * 4
    pair.free([owner])
    pair.commit([heir, other, stranger], [1, 1, 2], [[7], [7], [7]])
    assert pair.num_left_out == 2
    assert (heir.num_reserved, other.num_reserved, heir.num_computed, other.num_computed) == (0, 0, 0, 2)
    assert (stranger.num_computed, len(stranger.tokens), len(heir.tokens)) == (2, 3, 4)
    pair.commit([heir], [1])  # refused: it was said already
    assert statuses(pair, [heir, other], [4, 1]) == [SCHEDULED] * 2
    pair.commit([heir, other], [4, 1])


def test_joiner_of_a_joiner_loses_its_reservation_too() -> None:
    """C waits on B, and B on A, all in one step; A is freed."""
    pair = crowd()
    a, b, c = given(pair, [1, 2]), given(pair, [1, 2, 3, 4]), given(pair, [1, 2, 3, 4, 5])
    stranger = given(pair, [8, 9])
    assert statuses(pair, [a, b, c, stranger], [2, 2, 1, 2]) == [SCHEDULED] * 4
    pair.free([a])
    pair.commit([b, c, stranger], [2, 1, 2], [[], [6], [7]])
    assert pair.num_left_out == 2
    assert stranger.num_computed == 2
    assert statuses(pair, [b, c], [4, 1]) == [SCHEDULED] * 2
    pair.commit([b, c], [4, 1], [[], [6]])


def test_commit_that_names_a_freed_sequences_joiner_with_nothing_computed_appends() -> None:
    pair = crowd()
    owner, heir = given(pair, [1, 2, 3]), given(pair, [1, 2, 3, 4])
    assert statuses(pair, [owner, heir], [3, 1]) == [SCHEDULED] * 2
    pair.free([owner])
    pair.commit([heir], [0], [[5]])
    assert (pair.num_left_out, heir.tokens) == (0, [1, 2, 3, 4, 5])


def test_commit_returns_whose_reservation_ended_and_errors_name_the_cause() -> None:
    cache = KVCacheManager(CacheConfig(20, 4, max_num_seqs=4, max_model_len=32))
    owner, heir, other = cache.allocate([1, 2, 3, 4, 5]), cache.allocate([1, 2, 3, 4, 6]), cache.allocate([9, 9])
    plan = cache.reserve([owner, heir, other])
    cache.free(owner)
    with pytest.raises(InvalidArgument, match=f"reservation of 1 tokens ended when sequence {owner}, whose prefix"):
        cache.commit([heir, other], [2, 2], [7, 7])
    assert cache.commit([heir, other], plan.num_scheduled[1:], [7, 7]) == (heir,)
    assert cache.num_computed_tokens([heir, other]).tolist() == [0, 2]
    assert cache.num_tokens([heir, other]).tolist() == [5, 3]
    plan = cache.reserve([heir])
    assert cache.commit([heir], plan.num_scheduled, [7]) == ()
    with pytest.raises(InvalidArgument) as caught:
        cache.commit([heir], 1)
    assert "freed" not in str(caught.value)
    cache.check()


def test_heir_inherits_the_wait_of_its_producer() -> None:
    """C waits on B, B on A. B goes: C must wait on A, and then for the tokens that B needed."""
    pair = crowd()
    a, b = given(pair, [1, 2]), given(pair, [1, 2, 3, 4])
    c = given(pair, [1, 2, 3, 4, 5])
    pair.free([b])
    assert c.num_computed == 2
    assert statuses(pair, [c], [1]) == [WAITS_FOR_PREFIX]
    assert statuses(pair, [a, c], [2, 3]) == [SCHEDULED] * 2
    pair.commit([a, c], [2, 3])
    assert c.num_computed == 5


def test_computed_prefix_stays_computed() -> None:
    """The producer computes the shared blocks, and is truncated before the waiter is served."""
    pair = crowd(block_size=2)
    owner, joiner = given(pair, [1, 2, 3, 4, 5]), given(pair, [1, 2, 3, 4, 6])
    compute(pair, owner, 5)
    pair.truncate(owner, 1)
    assert statuses(pair, [joiner], [1]) == [SCHEDULED]
    compute(pair, owner, 1 - owner.num_computed or 1)
    pair.commit([joiner], [1])
    pair.free([owner])
    assert joiner.num_computed == 5


def test_a_joiner_may_be_cut_below_what_it_joined() -> None:
    pair = crowd(block_size=2)
    owner, joiner = given(pair, [1, 2, 3]), given(pair, [1, 2, 4])
    assert statuses(pair, [owner, joiner], [3, 1]) == [SCHEDULED] * 2
    pair.commit([owner, joiner], [3, 1])
    pair.truncate(joiner, 1)
    compute(pair, joiner, 1, [7])


def test_reused_row_is_not_waited_for() -> None:
    pair = crowd()
    owner, joiner = given(pair, [1, 2]), given(pair, [1, 2, 3])
    compute(pair, owner, 2)
    pair.free([owner])
    newcomer = given(pair, [7, 8])
    assert newcomer.row == 0
    compute(pair, joiner, 1)
    pair.free([newcomer])
    assert joiner.num_computed == 3


def test_a_reset_leaves_joiners_with_their_owner() -> None:
    pair = crowd()
    owner, joiner = given(pair, [1, 2, 3]), given(pair, [1, 2, 3, 4])
    pair.reset()
    assert given(pair, [1, 2, 3]).num_computed == 0
    assert statuses(pair, [joiner], [1]) == [WAITS_FOR_PREFIX]
    step = pair.reserve([owner, joiner], [3, 1])
    assert step is not None
    assert step.copies == []
    assert step.tables[0] == step.tables[1][:3]
    pair.commit([owner, joiner], [3, 1])


def test_after_a_reset_an_owner_still_has_an_heir() -> None:
    pair = crowd()
    owner, joiner = given(pair, [1, 2, 3]), given(pair, [1, 2, 3, 4])
    pair.reset()
    compute(pair, owner, 1)
    pair.free([owner])
    assert joiner.num_computed == 1
    compute(pair, joiner, 3, [5])
    pair.free([joiner])
    assert pair.cache.num_cached_blocks == 0


def test_a_joiner_cannot_be_forked_or_cut_while_it_waits() -> None:
    """All its blocks are another sequence's, and its children would not know that they wait."""
    pair = crowd(block_size=2)
    owner, joiner = given(pair, [1, 2, 3]), given(pair, [1, 2, 4])
    assert pair.fork(joiner, 1) == []
    pair.truncate(joiner, 2)
    assert len(joiner.tokens) == 3
    compute(pair, owner, 3)
    assert len(pair.fork(joiner, 1)) == 1


def pending_then_computed(pair: Pair) -> tuple[ModelSequence, ModelSequence]:
    """A, whose block 3 is to be computed, and X, which computed a duplicate of it and block 4 behind it."""
    a, x = given(pair, [1, 2, 3, 4]), given(pair, [1, 2, 3, 4])
    compute(pair, a, 3)
    compute(pair, x, 1, [5])
    compute(pair, x, 1)
    return a, x


def test_computed_blocks_after_a_pending_one_are_not_shared() -> None:
    """The joiner, left alone, would have to write into them (I7)."""
    pair = crowd()
    pending_then_computed(pair)
    assert given(pair, [1, 2, 3, 4, 5, 6]).num_computed == 4


def test_an_heir_falls_back_to_its_own_first_uncomputed_block() -> None:
    """Y computes its own duplicate of a block that D took, computed, from X. When Y goes, D must not rewrite X's."""
    pair = crowd()
    a, x = pending_then_computed(pair)
    y = given(pair, [1, 2, 3, 4, 5, 6, 7])
    compute(pair, a, 1)
    d = given(pair, [1, 2, 3, 4, 5, 6, 8])
    assert d.blocks[4] == x.blocks[4] != y.blocks[4]
    assert d.num_computed == 6
    pair.free([y])
    assert d.num_computed == 5
    compute(pair, d, 2)


def test_a_joiner_takes_only_what_one_owner_holds() -> None:
    """Block 2 is W's to compute and block 3 Z's, which has a duplicate of block 2: Z being done says nothing of W."""
    pair = crowd()
    a, b = given(pair, [1]), given(pair, [1, 2])
    x = given(pair, [1])
    compute(pair, x, 1, [2])
    pair.free([b])
    compute(pair, x, 1)
    w, z = given(pair, [1, 2, 3, 8]), given(pair, [1, 2, 3, 4, 9])
    compute(pair, a, 1)
    d = given(pair, [1, 2, 3, 4, 5])
    assert d.blocks[0] == a.blocks[0]
    compute(pair, z, 5 - z.num_computed)
    assert z.blocks[2] != w.blocks[2]
    assert statuses(pair, [d], [5 - d.num_computed]) == [WAITS_FOR_PREFIX if d.waits_on else SCHEDULED]
    compute(pair, w, 4 - w.num_computed)
    compute(pair, d, 5 - d.num_computed)


def test_a_token_waits_for_its_block_through_a_smaller_step() -> None:
    """A token was appended past the row's blocks; a chunk that ends before it must not lose it."""
    pair = Pair(8, 1, max_num_seqs=2, max_model_len=5)
    seq = given(pair, [1])
    pair.commit([seq], [0], [[2]])
    compute(pair, seq, 1)
    compute(pair, seq, 1, [3])
    assert pair.cache.token_ids(pair.handle_of[seq]).tolist() == [1, 2, 3]


@pytest.mark.parametrize("policy", ["arc", "lfu", "density"])
def test_a_sequence_that_waits_for_one_behind_it_in_the_step_hides_no_eviction(policy: str) -> None:
    """It gets nothing, so the blocks that a later sequence takes must not be attributed to it."""
    cache = KVCacheManager(CacheConfig(12, 1, max_model_len=26, watermark=0.0, eviction_policy=policy))
    idle = cache.allocate([50, 51])
    cache.reserve([idle])
    cache.commit([idle], 2)
    cache.free(idle)
    owner = cache.allocate([1, 2, 3, 4, 5, 6])
    cache.reserve([owner], 2)
    cache.commit([owner], 2)
    joiner = cache.allocate([1, 2, 3, 4, 9])
    assert cache.num_free_blocks == 4
    plan = cache.reserve([joiner, owner], [3, 7])
    assert plan.status.tolist() == [SeqStatus.WAITS_FOR_PREFIX, SeqStatus.SCHEDULED]
    cache.check()
