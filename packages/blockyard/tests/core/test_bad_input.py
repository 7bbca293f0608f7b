"""Bad input: each case is an error of the tree that names the argument, its value and the limit, and changes nothing.

"Nothing" is every attribute of the manager and of all that it is made of (`snapshot`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blockyard import (
    BlockPool,
    BlockyardError,
    CacheConfig,
    CacheSalt,
    CapacityError,
    DoubleFree,
    ForeignBlock,
    InvalidArgument,
    KVCacheManager,
    LoRA,
    NeverFits,
    OutOfBlocks,
    OutOfRows,
    SeqStatus,
    SequenceNotReady,
    UnknownSequence,
)
from blockyard.errors import LogicError, StalePlan

from ..support.busy_manager import BLOCK_SIZE, MODEL_LEN, NUM_ROWS, Scene
from ..support.snapshot import refused, snapshot


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_snapshot_shows_changes_of_a_call(scene: Scene) -> None:
    before = snapshot(scene.cache)
    scene.cache.commit([scene.decoding], 0)
    assert snapshot(scene.cache) != before
    assert any(path.endswith("identity") for path in before)
    assert any(path.endswith("ref_cnt") for path in before)


# ---------------------------------------------------------------- capacity


def test_out_of_blocks(scene: Scene) -> None:
    prompt = list(range(100, 100 + 7 * BLOCK_SIZE))
    cache = scene.cache
    assert cache.num_free_blocks == 6
    error = scene.refused(OutOfBlocks, lambda: cache.allocate(prompt), "token_ids", 7, 6)
    assert isinstance(error, CapacityError)
    assert isinstance(error, OutOfBlocks)
    assert (error.num_needed, error.num_free) == (7, 6)
    assert cache.can_allocate(prompt).name == "LATER"
    assert cache.can_allocate(prompt[: 6 * BLOCK_SIZE]).name == "OK"


def test_idle_hits_count_as_needed(scene: Scene) -> None:
    prompt = [9] * BLOCK_SIZE + list(range(100, 100 + 6 * BLOCK_SIZE))
    scene.refused(OutOfBlocks, lambda: scene.cache.allocate(prompt), "token_ids", 7)


def test_admission_leaves_the_watermark_free() -> None:
    cache = KVCacheManager(CacheConfig(11, 1, watermark=0.3))
    assert cache.can_allocate([1] * 7).name == "OK"
    with pytest.raises(NeverFits, match=r"token_ids needs 8 blocks; the pool has 10.* 3"):
        cache.allocate([1] * 8)
    cache.allocate([1] * 5)
    with pytest.raises(OutOfBlocks, match=r"3 free blocks.* 5 are free.* 3"):
        cache.allocate([2] * 3)


def test_never_fits_the_model(scene: Scene) -> None:
    prompt = [1] * (MODEL_LEN + 1)
    scene.refused(
        NeverFits, lambda: scene.cache.allocate(prompt), "token_ids", MODEL_LEN + 1, "max_model_len", MODEL_LEN
    )
    assert scene.cache.can_allocate(prompt).name == "NEVER"


def test_never_fits_the_pool() -> None:
    cache = KVCacheManager(CacheConfig(5, 4, max_model_len=1000, watermark=0.0))
    assert cache.can_allocate([1] * 16).name == "OK"
    assert cache.can_allocate([1] * 17).name == "NEVER"
    with pytest.raises(NeverFits, match=r"token_ids needs 5 blocks; the pool has 4"):
        cache.allocate([1] * 17)


def test_out_of_rows(scene: Scene) -> None:
    cache = scene.cache
    cache.allocate([50])
    assert cache.can_allocate([51]).name == "LATER"
    scene.refused(OutOfRows, lambda: cache.allocate([51]), 1, 0, "max_num_seqs", NUM_ROWS)
    scene.refused(OutOfRows, lambda: cache.fork(scene.decoding, 2), 2, 0, "max_num_seqs", NUM_ROWS)


def test_a_refused_request_forgets_no_other_tenant() -> None:
    """Asking under many salts must not push anybody's content out of the index."""
    cache = KVCacheManager(CacheConfig(4, 1, watermark=0.0))
    seq = cache.allocate([1, 2])
    cache.reserve([seq], 2)
    cache.commit([seq], 2)
    cache.free(seq)
    for number in range(20):
        assert cache.can_allocate([1, 2], extra_keys=(CacheSalt(str(number)),)).name == "OK"
        with pytest.raises(NeverFits):
            cache.allocate([1, 2, 3, 4], extra_keys=(CacheSalt(str(number)),))
    assert cache.num_computed_tokens(cache.allocate([1, 2, 3])) == 2


# ---------------------------------------------------------------- handles


def calls_with_handle(cache: KVCacheManager, handle: Any) -> list[Callable[[], object]]:
    return [
        lambda: cache.free(handle),
        lambda: cache.free([handle]),
        lambda: cache.reserve([handle], 1),
        lambda: cache.commit([handle], 0),
        lambda: cache.fork(handle),
        lambda: cache.truncate(handle, 1),
        lambda: cache.num_tokens(handle),
        lambda: cache.num_computed_tokens(handle),
        lambda: cache.token_ids(handle),
        lambda: cache.block_ids(handle),
    ]


@pytest.mark.parametrize("call", range(10))
def test_handle_of_a_finished_sequence_is_unknown(scene: Scene, call: int) -> None:
    error = scene.refused(UnknownSequence, calls_with_handle(scene.cache, scene.dead)[call], scene.dead, "freed")
    assert isinstance(error, LogicError)
    assert "'decoding'" in str(error), "the error names who holds the row now"


@pytest.mark.parametrize("handle", [0, 1, -1, -(2**20), 2**20 - 1, 7 << 20, 2**61, 2**62, 2**63, 2**70, -(2**70)])
@pytest.mark.parametrize("call", range(10))
def test_invented_handle_is_unknown(scene: Scene, call: int, handle: int) -> None:
    before = snapshot(scene.cache)
    # Beyond 64 bits, numpy says no more of a list than that its items are objects.
    named = str(handle) if abs(handle) < 2**64 else "object|" + str(handle)
    with pytest.raises((UnknownSequence, InvalidArgument), match=named):
        calls_with_handle(scene.cache, handle)[call]()
    assert snapshot(scene.cache) == before


@pytest.mark.parametrize("handle", [None, "1", 1.0, True, b"1", [1.5], {}, object(), np.array([[1]]), np.array([1.0])])
@pytest.mark.parametrize("call", range(10))
def test_values_that_are_no_handles_are_refused(scene: Scene, call: int, handle: Any) -> None:
    scene.refused(InvalidArgument, calls_with_handle(scene.cache, handle)[call])


def test_a_double_free(scene: Scene) -> None:
    cache = scene.cache
    cache.free(scene.waiting)
    scene.refused(UnknownSequence, lambda: cache.free(scene.waiting), scene.waiting, "freed")


def test_a_batch_with_one_bad_handle_does_nothing(scene: Scene) -> None:
    cache = scene.cache
    good = [scene.decoding, scene.reserved]
    for batch in ([*good, scene.dead], [scene.dead, *good], [good[0], scene.dead, good[1]]):
        scene.refused(UnknownSequence, lambda batch=batch: cache.free(batch), scene.dead)
        scene.refused(UnknownSequence, lambda batch=batch: cache.reserve(batch, 1), scene.dead)
        scene.refused(UnknownSequence, lambda batch=batch: cache.commit(batch, 0), scene.dead)


def test_handle_given_twice_is_refused(scene: Scene) -> None:
    cache, twice = scene.cache, [scene.decoding, scene.reserved, scene.decoding]
    for call in (lambda: cache.free(twice), lambda: cache.reserve(twice, 1), lambda: cache.commit(twice, 0)):
        scene.refused(InvalidArgument, call, "seqs", "2", scene.decoding)


def test_handle_of_another_manager_is_unknown() -> None:
    """Serials are not shared; a handle of another manager is refused unless both gave out the same number."""
    one, other = Scene(), Scene()
    for _ in range(3):
        one.cache.free(one.cache.allocate([1]))
    stranger = one.cache.allocate([5])
    other.refused(UnknownSequence, lambda: other.cache.free(stranger), stranger)


# ---------------------------------------------------------------- a step


@pytest.mark.parametrize("count", [-1, MODEL_LEN, 2**31, 2**40, 2**61])
def test_new_tokens_outside_their_limits(scene: Scene, count: int) -> None:
    cache = scene.cache
    scene.refused(
        InvalidArgument, lambda: cache.reserve([scene.decoding], count), "num_new_tokens[0]", count, 35, "max_model_len"
    )
    scene.refused(
        InvalidArgument,
        lambda: cache.reserve([scene.reserved, scene.decoding], np.array([1, count])),
        "num_new_tokens[1]",
        count,
    )


@pytest.mark.parametrize("count", [2**62, 2**63, -(2**63), 2**70, 1.0, "1", [None], True, [1, 2], [[1]], [1.0], [True]])
def test_new_tokens_of_a_wrong_type_or_shape(scene: Scene, count: Any) -> None:
    scene.refused(InvalidArgument, lambda: scene.cache.reserve([scene.decoding], count), "num_new_tokens")


def test_more_computed_than_reserved(scene: Scene) -> None:
    cache = scene.cache
    scene.refused(InvalidArgument, lambda: cache.commit([scene.reserved], 4), "num_computed[0]", 4, 3, "'reserved'")
    scene.refused(InvalidArgument, lambda: cache.commit([scene.decoding], 1), "num_computed[0]", 1, 0)
    scene.refused(InvalidArgument, lambda: cache.commit([scene.reserved], -1), "num_computed[0]", -1, 3)
    scene.refused(InvalidArgument, lambda: cache.commit([scene.decoding, scene.reserved], [0, 2**63 - 1]), 2**63 - 1)


@pytest.mark.parametrize("count", [2**62, 2**63, 2**70, 1.0, "1", None, True, [1, 2], [[1]], [1.0], []])
def test_computed_of_a_wrong_type_or_shape(scene: Scene, count: Any) -> None:
    scene.refused(InvalidArgument, lambda: scene.cache.commit([scene.reserved], count), "num_computed")


@pytest.mark.parametrize("token", [-2, -(2**40), 2**31, 2**40])
def test_next_tokens_outside_their_limits(scene: Scene, token: int) -> None:
    call = lambda: scene.cache.commit([scene.decoding], 0, [token])  # noqa: E731
    scene.refused(InvalidArgument, call, "next_tokens[0]", token, 2**31 - 1)


@pytest.mark.parametrize("tokens", [1.0, "1", [1, 2], [[1], [2]], [1.0], [None], [True], [], [[[1]]], [2**64], ["a"]])
def test_next_tokens_of_a_wrong_type_or_shape(scene: Scene, tokens: Any) -> None:
    scene.refused(InvalidArgument, lambda: scene.cache.commit([scene.decoding], 0, tokens), "next_tokens")


def test_next_tokens_after_none(scene: Scene) -> None:
    scene.refused(InvalidArgument, lambda: scene.cache.commit([scene.decoding], 0, [[-1, 5]]), "next_tokens[0]", -1)


def test_more_next_tokens_than_slots_are_refused(scene: Scene) -> None:
    """Six tokens in two blocks of four: two places, and one token may wait for its block."""
    cache = scene.cache
    scene.refused(
        InvalidArgument, lambda: cache.commit([scene.decoding], 0, [[1, 2, 3, 4]]), "next_tokens[0]", 4, 3, "'decoding'"
    )
    cache.commit([scene.decoding], 0, [[1, 2, 3]])
    scene.refused(InvalidArgument, lambda: cache.commit([scene.decoding], 0, [1]), "next_tokens[0]", 1, 0)


def test_a_sequence_grows_to_the_models_length_and_no_further(scene: Scene) -> None:
    cache, seq = scene.cache, scene.decoding
    cache.free([scene.reserved, scene.waiting])
    while cache.num_tokens(seq) < MODEL_LEN:
        assert cache.reserve([seq], 1).all_fit
        cache.commit([seq], 1, [1])
    cache.reserve([seq], 1)
    scene.refused(InvalidArgument, lambda: cache.commit([seq], 1, [1]), "next_tokens[0]", "max_model_len", MODEL_LEN)
    cache.commit([seq], 1)
    scene.refused(InvalidArgument, lambda: cache.reserve([seq], 1), "num_new_tokens[0]", "max_model_len", MODEL_LEN)


def test_speculated_tokens_must_be_named(scene: Scene) -> None:
    cache = scene.cache
    cache.reserve([scene.decoding], 3)
    scene.refused(InvalidArgument, lambda: cache.commit([scene.decoding], 3, [7]), "num_computed[0]", 8, 7)
    cache.commit([scene.decoding], 3, [[7, 8, 9]])


def test_waiter_commits_only_after_its_prefix(scene: Scene) -> None:
    cache = scene.cache
    assert cache.reserve([scene.waiting], 1).status.tolist() == [2]
    assert cache.reserve([scene.reserved, scene.waiting], [9, 1]).all_fit
    scene.refused(SequenceNotReady, lambda: cache.commit([scene.waiting], 1), "num_computed[0]", 1, 8, 0)
    scene.refused(
        SequenceNotReady, lambda: cache.commit([scene.waiting, scene.reserved], [1, 7]), "num_computed[0]", 8, 7
    )
    cache.commit([scene.waiting, scene.reserved], [1, 9])


def test_plan_is_stale_after_a_change(scene: Scene) -> None:
    plan = scene.cache.reserve([scene.decoding], 1)
    assert plan.block_tables.tolist() == [[1, 3]] or plan.block_tables.shape == (1, 2)
    scene.cache.commit([scene.decoding], 1)
    for name in ("block_tables", "indices"):
        scene.refused(StalePlan, lambda name=name: getattr(plan, name))


# ---------------------------------------------------------------- forks and cuts


@pytest.mark.parametrize("count", [0, -1, NUM_ROWS + 1, 2**40, 2**70, 1.0, "1", None, True, [1]])
def test_forks_outside_their_limits(scene: Scene, count: Any) -> None:
    scene.refused(InvalidArgument, lambda: scene.cache.fork(scene.decoding, count), "num_forks", 1, NUM_ROWS)


@pytest.mark.parametrize("length", [0, -1, 7, 2**40, 2**70, 1.0, "1", None, True, [1]])
def test_cuts_outside_their_limits(scene: Scene, length: Any) -> None:
    scene.refused(InvalidArgument, lambda: scene.cache.truncate(scene.decoding, length), "num_tokens", 1, 6)


@pytest.mark.parametrize("name", ["reserved", "waiting"])
def test_uncomputed_sequences_cannot_be_forked_or_truncated(scene: Scene, name: str) -> None:
    seq = getattr(scene, name)
    scene.refused(SequenceNotReady, lambda: scene.cache.fork(seq), "fork", f"'{name}'")
    scene.refused(SequenceNotReady, lambda: scene.cache.truncate(seq, 1), "truncate", f"'{name}'")


# ---------------------------------------------------------------- names and keys


@pytest.mark.parametrize("holder", [None, 1, b"x", ["x"]])
def test_holders_must_be_strings(scene: Scene, holder: Any) -> None:
    scene.refused(InvalidArgument, lambda: scene.cache.allocate([1], holder=holder), "holder")


@pytest.mark.parametrize(
    "keys", ["a", ("a",), None, 1, (1,), {"lora": "a"}, (LoRA("a"), LoRA("b")), (CacheSalt("a"), None), LoRA("a")]
)
def test_invalid_extra_keys_are_refused(scene: Scene, keys: Any) -> None:
    scene.refused(InvalidArgument, lambda: scene.cache.allocate([1], extra_keys=keys), "extra_keys")
    scene.refused(InvalidArgument, lambda: scene.cache.can_allocate([1], extra_keys=keys), "extra_keys")


@pytest.mark.parametrize("name", [None, 1, ["a"], b"a"])
def test_names_of_extra_keys(name: Any) -> None:
    with pytest.raises(InvalidArgument, match="name is"):
        LoRA(name)
    with pytest.raises(InvalidArgument, match="value is"):
        CacheSalt(name)


@pytest.mark.parametrize("config", [None, 8, {"num_blocks": 8}])
def test_manager_needs_a_config(config: Any) -> None:
    with pytest.raises(InvalidArgument, match="config is"):
        KVCacheManager(config)


# ---------------------------------------------------------------- the pool alone


@pytest.mark.parametrize("value", [0, -1, 2**27 + 1, 2**70, 8.0, "8", None, True, [8]])
def test_sizes_of_a_pool(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"num_blocks is {re.escape(repr(value))}.*1 to {2**27}"):
        BlockPool(value)


@pytest.mark.parametrize("value", [0, -1, 4097, 2**70, 8.0, "8", None, True])
def test_block_sizes_of_a_pool(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"block_size is {re.escape(repr(value))}.*1 to 4096"):
        BlockPool(8, value)


def refused_by_pool(pool: BlockPool, error: type[BlockyardError], call: Callable[[], object], match: str) -> None:
    with refused(pool, error, match=match):
        call()


def test_a_pool_refuses_and_keeps_its_state() -> None:
    pool, other = BlockPool(8, 4), BlockPool(8, 4)
    lease = pool.get_new_blocks(2, holder="first")
    gone = pool.get_new_blocks(1, holder="second")
    pool.free_blocks(gone)
    foreign = other.get_new_blocks(1, holder="third")

    def refuses(error: type[BlockyardError], call: Callable[[], object], match: str) -> None:
        refused_by_pool(pool, error, call, match)

    refuses(OutOfBlocks, lambda: pool.get_new_blocks(6), r"num_blocks is 6; only 5 of 7 blocks are free")
    refuses(InvalidArgument, lambda: pool.get_new_blocks(-1), r"num_blocks is -1")
    refuses(InvalidArgument, lambda: pool.get_new_blocks(1.0), r"num_blocks is 1.0")  # type: ignore[arg-type]
    refuses(InvalidArgument, lambda: pool.get_new_blocks(1, holder=5), r"holder is 5")  # type: ignore[arg-type]
    for call in (pool.free_blocks, pool.touch):
        refuses(DoubleFree, lambda call=call: call(gone), r"'second' on blocks \[3\]")
        refuses(ForeignBlock, lambda call=call: call(foreign), r"'third'")
        for what in (None, 1, [1], "lease"):
            refuses(InvalidArgument, lambda call=call, what=what: call(what), r"lease is")
    refuses(InvalidArgument, lambda: pool.cache_full_blocks(lease, [1] * 12), r"token_ids fill 3 blocks.* 2")
    refuses(
        InvalidArgument, lambda: pool.cache_full_blocks(lease, [1] * 8, num_cached_blocks=1), r"num_cached_blocks is 1"
    )
    refuses(
        InvalidArgument,
        lambda: pool.cache_full_blocks(lease, [1] * 8, num_cached_blocks=-1),
        r"num_cached_blocks is -1",
    )
    refuses(
        InvalidArgument, lambda: pool.cache_full_blocks(lease, [1] * 8, num_cached_blocks=3), r"num_cached_blocks is 3"
    )
    refuses(InvalidArgument, lambda: pool.cache_full_blocks(lease, []), r"token_ids is empty")
    pool.cache_full_blocks(lease, [1] * 8)
    refuses(InvalidArgument, lambda: pool.cache_full_blocks(lease, [1] * 8), r"already cached")
    refuses(InvalidArgument, lambda: pool.cache_full_blocks(lease, [2] * 8, num_cached_blocks=2), r"token_ids differ")
    refuses(InvalidArgument, lambda: pool.get_cached_blocks([-1]), r"token_ids\[0\] is -1")
    refuses(InvalidArgument, lambda: pool.get_cached_block([]), r"token_ids is empty")
    for number in (-1, 8, 2**70, 1.5, None):
        refuses(InvalidArgument, lambda number=number: pool.block(number), r"block_id is")


def test_a_stale_lease_after_its_block_was_reused() -> None:
    """The block has a new holder by the time of the second free: the free is caught all the same (I8)."""
    pool = BlockPool(2, 4)
    first = pool.get_new_blocks(1, holder="first")
    pool.free_blocks(first)
    second = pool.get_new_blocks(1, holder="second")
    assert list(first) == list(second)
    refused_by_pool(pool, DoubleFree, lambda: pool.free_blocks(first), r"'first' on blocks \[1\] was already freed")
    assert pool.ref_counts().tolist() == [0, 1]


@pytest.mark.parametrize("value", [1.5, np.float64(2), np.array(3.0)])
def test_one_number_that_is_no_integer_is_shown(scene: Scene, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^num_new_tokens is .*; integers are needed$"):
        scene.cache.reserve([scene.decoding], value)


def test_a_token_for_a_sequence_that_was_not_scheduled_says_what_to_give_it() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=3, block_size=4, max_num_seqs=4, max_model_len=32, watermark=0.0))
    first, second = cache.allocate([1, 2, 3, 4]), cache.allocate([5, 6, 7, 8])
    cache.commit([first, second], cache.reserve([first, second]).num_scheduled, [7, 7])
    plan = cache.reserve([first, second], 1)
    assert plan.status.tolist() == [SeqStatus.NO_BLOCKS, SeqStatus.NO_BLOCKS]
    for counts, tokens in (([1, 0], [-1, -1]), ([0, 0], [9, -1])):
        with pytest.raises(
            InvalidArgument, match=r"pass 0 and -1 for a sequence that is not SCHEDULED in plan\.status"
        ):
            cache.commit([first, second], counts, tokens)
    cache.commit([first, second], plan.num_scheduled, -1)
    cache.check()
