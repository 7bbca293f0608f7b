"""Caching goes on where a lease stands: only the new tokens are read, and what comes before is a block, not a hash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockyard import BlockPool, CacheSalt, DoubleFree, InvalidArgument, LoRA, Span, StaleBlocks

from ..support.checked import prompt
from ..support.pools import cached
from ..support.snapshot import refused, snapshot

SIZE = 4
TOKENS = prompt(1, 40)


def found(pool: BlockPool, tokens: Any, keys: Any = ()) -> list[int]:
    pool.check()
    return pool.find_cached_blocks(tokens, extra_keys=keys).block_ids.tolist()


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8, 40])
def test_chunk_by_chunk_is_the_same_as_at_once(chunk: int) -> None:
    """The caller gives what is not cached yet; what fills no block is given again."""
    pool = BlockPool(12, SIZE)
    lease = pool.get_new_blocks(10)
    for end in range(chunk, 41, chunk):
        num_cached = pool.cache_next_blocks(
            lease, TOKENS[lease.num_cached_blocks * SIZE : end] or TOKENS[end - 1 : end], lease.num_cached_blocks
        )
        assert num_cached == lease.num_cached_blocks == end // SIZE
        assert found(pool, TOKENS) == list(range(1, end // SIZE + 1))


def test_it_goes_on_behind_a_hit() -> None:
    pool = BlockPool(12, SIZE)
    pool.free_blocks(cached(pool, TOKENS[:12]))
    lease = pool.hold(pool.find_cached_blocks(TOKENS[:20]), extend_by=2)
    assert pool.cache_next_blocks(lease, TOKENS[12:20], lease.num_cached_blocks) == 5
    assert found(pool, TOKENS) == list(lease) == [1, 2, 3, 4, 5]
    held = pool.get_cached_blocks(TOKENS)
    assert held.num_cached_blocks == 5
    pool.extend(held, 1)
    assert pool.cache_next_blocks(held, TOKENS[20:24], held.num_cached_blocks) == 6
    assert found(pool, TOKENS) == [1, 2, 3, 4, 5, 6]


def test_it_goes_on_behind_cache_full_blocks_and_that_behind_it() -> None:
    pool = BlockPool(12, SIZE)
    lease = cached(pool, TOKENS[:8])
    pool.extend(lease, 2)
    assert lease.num_cached_blocks == 2
    pool.cache_next_blocks(lease, TOKENS[8:12], lease.num_cached_blocks)
    pool.cache_full_blocks(lease, TOKENS[:16], num_cached_blocks=3)
    assert lease.num_cached_blocks == 4
    assert found(pool, TOKENS) == [1, 2, 3, 4]


def test_it_goes_on_behind_one_block_in_the_middle() -> None:
    """`get_cached_block` leases one block of a prompt; what comes next hangs on that block."""
    pool = BlockPool(12, SIZE)
    cached(pool, TOKENS[:12])
    lease = pool.get_cached_block(TOKENS[:12])
    assert lease is not None
    assert (lease.first_block, lease.num_cached_blocks) == (2, 1)
    pool.extend(lease, 1)
    assert pool.cache_next_blocks(lease, TOKENS[12:16], lease.num_cached_blocks) == 2
    assert found(pool, TOKENS) == [1, 2, 3, 4]
    with pytest.raises(InvalidArgument, match="lease begins with block 2 of its prompt"):
        pool.cache_full_blocks(lease, TOKENS[:8])


def test_the_parent_is_the_block_itself_and_not_its_content_elsewhere() -> None:
    """Two leases hold equal blocks; both go on, each behind its own, and the contents are shared."""
    pool = BlockPool(12, SIZE)
    one, two = cached(pool, TOKENS[:8]), cached(pool, TOKENS[:8])
    for lease in (one, two):
        pool.extend(lease, 1)
        pool.cache_next_blocks(lease, TOKENS[8:12], lease.num_cached_blocks)
    assert found(pool, TOKENS) == [1, 2, 5]
    assert pool.cached_block_ids(TOKENS[:12]) == [5, 6]
    pool.free_blocks(one)
    assert pool.cached_block_ids(TOKENS[:12]) == [5, 6]


def test_keys_count_at_the_beginning() -> None:
    pool = BlockPool(12, SIZE)
    lease = pool.get_new_blocks(3)
    keys = (LoRA("adapter"), CacheSalt("tenant"))
    pool.cache_next_blocks(lease, TOKENS[:4], lease.num_cached_blocks, extra_keys=keys)
    pool.cache_next_blocks(lease, TOKENS[4:12], lease.num_cached_blocks, extra_keys=keys)
    assert found(pool, TOKENS) == []
    assert found(pool, TOKENS, keys) == [1, 2, 3]


@pytest.mark.parametrize("cuts", [[40], [4, 40], [8, 16, 40], [12, 20, 24, 40], list(range(4, 41, 4))])
def test_spans_are_the_same_however_the_prompt_is_cut(cuts: list[int]) -> None:
    """Images reach over the ends of chunks on both sides; all of them are given with every chunk."""
    keys = (Span("cat", 6, 8), Span("dog", 13, 10), Span("bird", 30, 1))
    pool = BlockPool(22, SIZE)
    whole, parts = cached_under(pool, keys), pool.get_new_blocks(10)
    at = 0
    for end in cuts:
        pool.cache_next_blocks(parts, TOKENS[at:end], parts.num_cached_blocks, extra_keys=keys)
        at = end
    assert found(pool, TOKENS, keys) == list(whole)
    for end in range(4, 41, 4):
        assert pool.cached_block_ids(TOKENS[:end], extra_keys=keys) == [whole[end // 4 - 1], parts[end // 4 - 1]]
    assert found(pool, TOKENS) == [whole[0]]


def cached_under(pool: BlockPool, keys: Any) -> Any:
    lease = pool.get_new_blocks(10)
    pool.cache_full_blocks(lease, TOKENS, extra_keys=keys)
    return lease


# ---------------------------------------------------------------- placeholders


@pytest.mark.parametrize("make", [list, np.array, lambda tokens: np.array(tokens, dtype=np.int32)])
@pytest.mark.parametrize("pad", [0, 60, 300])
def test_placeholders_stand_under_spans_alone(make: Any, pad: int) -> None:
    """A list, an array that is read token by token, and one that is read as it lies."""
    tokens = [5, 5, -1, -7, -1, -1, 6, 6, *range(pad)]
    pool = BlockPool(100, SIZE)
    keys = (Span("cat", 2, 4),)
    lease = pool.get_new_blocks(len(tokens) // SIZE)
    for less in ((), (Span("cat", 2, 3),), (Span("cat", 3, 3),)):
        before = snapshot(pool)
        with pytest.raises(InvalidArgument, match=r"^token_ids\[\d\] is -\d, and no Span of extra_keys stands at"):
            pool.cache_next_blocks(lease, make(tokens), lease.num_cached_blocks, extra_keys=less)
        with pytest.raises(InvalidArgument, match="and no Span"):
            pool.find_cached_blocks(make(tokens), extra_keys=less)
        assert snapshot(pool) == before
    pool.cache_next_blocks(lease, make(tokens), lease.num_cached_blocks, extra_keys=keys)
    assert found(pool, make(tokens), keys) == list(lease)
    assert found(pool, [5, 5, -1, -1, -1, -1, 6, 6], keys) == [1, 2], "all placeholders are one"
    for token in (0, 1, 2**31 - 1):
        real = [max(item, token) if item < 0 else item for item in tokens]
        assert found(pool, real, keys) == []
        assert found(pool, real) == []
    assert pool.block(1).token_ids == [5, 5, -1, -1]


@pytest.mark.parametrize("place", [0, 1, 159, 160, 319])
@pytest.mark.parametrize("num_cached", [0, 160, 320])
def test_what_is_no_token_in_a_long_array_is_refused_wherever_it_stands(place: int, num_cached: int) -> None:
    """A lookup looks at what is behind its hit alone; within it nothing equals such a number, no placeholder either."""
    pool = BlockPool(200, SIZE)
    tokens = np.arange(320, dtype=np.int32)
    if num_cached > 0:
        pool.cache_full_blocks(pool.get_new_blocks(num_cached // SIZE), tokens[:num_cached])
    bad = tokens.copy()
    bad[place] = -1
    pool.cache_next_blocks(pool.get_new_blocks(80), bad, 0, extra_keys=(Span("cat", place, 1),))
    message = rf"^token_ids\[{place}\] is -1, and no Span of extra_keys stands at position {place}; a token is"
    before = snapshot(pool)
    for ask in (
        pool.find_cached_blocks,
        pool.get_cached_blocks,
        pool.get_cached_block,
        pool.num_cached_tokens,
        pool.cached_block_ids,
        pool.retain,
    ):
        with pytest.raises(InvalidArgument, match=message):
            ask(bad)
        assert snapshot(pool) == before
    assert pool.num_cached_tokens(tokens) == max(num_cached, place // SIZE * SIZE)


def test_a_placeholder_is_found_at_its_place_in_the_prompt() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, prompt(1, 4))
    pool.extend(lease, 1)
    with pytest.raises(InvalidArgument, match=r"token_ids\[1\] is -1, and no Span .* at position 5;"):
        pool.cache_next_blocks(lease, [1, -1, 2, 3], lease.num_cached_blocks, extra_keys=(Span("cat", 1, 1),))
    assert pool.cache_next_blocks(lease, [1, -1, 2, 3], lease.num_cached_blocks, extra_keys=(Span("cat", 5, 1),)) == 2


@pytest.mark.parametrize("token", [2**31, 2**63, -(2**70), 1.5, None, True])
def test_what_is_no_token_is_refused_among_placeholders_too(token: Any) -> None:
    pool = BlockPool(10, SIZE)
    if token == -(2**70):
        assert pool.find_cached_blocks([token] * 4, extra_keys=(Span("cat", 0, 4),)).num_tokens == 0
        return
    with pytest.raises(InvalidArgument, match=r"^token_ids"):
        pool.find_cached_blocks([-1, token, 1, 1], extra_keys=(Span("cat", 0, 4),))


# ---------------------------------------------------------------- what was lost, and caught


def test_going_back_changes_nothing_where_all_is_there() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:12])
    before = snapshot(pool)
    for start in range(4):
        if start < 3:
            assert pool.cache_next_blocks(lease, TOKENS[4 * start : 12], start) == 3
    assert {key for key in before if snapshot(pool)[key] != before[key]} == set()


def test_after_a_reset_the_lease_says_so() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:8])
    pool.extend(lease, 1)
    pool.reset()
    with refused(
        pool, StaleBlocks, match=r"had cached 2 blocks; block 1 at position 0 is no longer cached.*=0"
    ) as error:
        pool.cache_next_blocks(lease, TOKENS[8:12], lease.num_cached_blocks)
    assert error.value.num_still_cached == 0
    assert pool.cache_next_blocks(lease, TOKENS[:12], 0) == 3
    assert found(pool, TOKENS) == [1, 2, 3]


def test_a_block_that_is_written_into_is_not_gone_on_from() -> None:
    """Its content is no more; what hung on it is linked anew once it is cached again."""
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:12])
    pool.extend(lease, 1)
    pool.copy_on_write(lease, 1)
    assert found(pool, TOKENS) == [1]
    with pytest.raises(StaleBlocks) as error:
        pool.cache_next_blocks(lease, TOKENS[12:16], lease.num_cached_blocks)
    assert error.value.num_still_cached == 1
    assert pool.cache_next_blocks(lease, TOKENS[4:8], 1) == 2
    assert found(pool, TOKENS) == [1, 2], "block 3 still hangs on what is gone"
    assert pool.cache_next_blocks(lease, TOKENS[8:16], lease.num_cached_blocks) == 4
    assert found(pool, TOKENS) == [1, 2, 3, 4]


def test_other_tokens_than_a_block_caches_are_refused() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:8])
    with refused(pool, InvalidArgument, match="token_ids differ from what block 2 at position 1 caches"):
        pool.cache_next_blocks(lease, [9, 9, 9, 9], 1)


def test_a_block_that_others_hold_is_given_no_content() -> None:
    pool = BlockPool(10, SIZE)
    lease = pool.get_new_blocks(2)
    other = pool.touch(lease, holder="other", start=1)
    with refused(pool, InvalidArgument, match="block 2 at position 1, which is held 2 times"):
        pool.cache_next_blocks(lease, TOKENS[:8], lease.num_cached_blocks)
    pool.free_blocks(other)
    assert pool.cache_next_blocks(lease, TOKENS[:8], lease.num_cached_blocks) == 2


def test_a_part_that_begins_behind_what_is_not_cached_is_not_gone_on_from() -> None:
    pool = BlockPool(10, SIZE)
    lease = pool.get_new_blocks(3)
    part = pool.touch(lease, holder="part", start=2)
    pool.free_blocks(lease)
    with pytest.raises(InvalidArgument, match="lease 2 does not know the content before block 2 of the prompt"):
        pool.cache_next_blocks(part, TOKENS[8:12], part.num_cached_blocks)
    pool.check()


def test_a_part_that_begins_behind_a_cached_block_goes_on() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:8])
    pool.extend(lease, 1)
    part = pool.touch(lease, holder="part", start=2)
    pool.free_blocks(lease)
    assert pool.cache_next_blocks(part, TOKENS[8:12], part.num_cached_blocks) == 1
    assert found(pool, TOKENS) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"token_ids": TOKENS[:12]}, "token_ids fill 3 blocks after the first 1; the lease has 3"),
        ({"token_ids": [-1]}, r"token_ids\[0\] is -1"),
        ({"num_cached_blocks": 2}, "num_cached_blocks is 2; only the first 1 blocks of the lease are cached"),
        ({"num_cached_blocks": -1}, "num_cached_blocks is -1"),
        ({"num_cached_blocks": 0.0}, "num_cached_blocks is 0.0"),
        ({"extra_keys": "salt"}, "extra_keys is 'salt'"),
        ({"lease": None}, "lease is None"),
    ],
)
def test_bad_arguments_change_nothing(arguments: dict[str, Any], text: str) -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:4])
    pool.extend(lease, 2)
    with refused(pool, InvalidArgument, match=f"^{text}"):
        pool.cache_next_blocks(**{"lease": lease, "token_ids": TOKENS[4:8], "num_cached_blocks": 1, **arguments})


def test_a_prompt_given_twice_is_not_cached_as_its_own_continuation() -> None:
    """The position says what the tokens are: the same prompt again from its start changes nothing."""
    pool = BlockPool(12, SIZE)
    lease = pool.get_new_blocks(6)
    assert pool.cache_next_blocks(lease, TOKENS[:8], 0) == 2
    before = snapshot(pool)
    assert pool.cache_next_blocks(lease, TOKENS[:8], 0) == 2
    assert snapshot(pool) == before
    assert found(pool, TOKENS[:8] * 2) == [1, 2]
    assert pool.cache_next_blocks(lease, TOKENS[:16], 0) == 4, "what is new in it goes on"
    assert found(pool, TOKENS) == [1, 2, 3, 4]


def test_a_position_is_required() -> None:
    pool = BlockPool(12, SIZE)
    lease = pool.get_new_blocks(2)
    with pytest.raises(TypeError, match="num_cached_blocks"):
        pool.cache_next_blocks(lease, TOKENS[:8])  # type: ignore[call-arg]
    with refused(
        pool, InvalidArgument, match="^num_cached_blocks is 1; only the first 0 blocks of the lease are cached"
    ):
        pool.cache_next_blocks(lease, TOKENS[4:8], 1)


def test_a_position_behind_a_lost_block_is_stale() -> None:
    pool = BlockPool(12, SIZE)
    lease = cached(pool, TOKENS[:12])
    pool.extend(lease, 1)
    pool.uncache([2])
    for start in (2, 3):
        with refused(pool, StaleBlocks, match=r"continue from there \(num_cached_blocks=1\)") as error:
            pool.cache_next_blocks(lease, TOKENS[start * SIZE : 16], start)
        assert error.value.num_still_cached == 1
    assert pool.cache_next_blocks(lease, TOKENS[4:16], 1) == 4
    assert found(pool, TOKENS) == [1, 2, 3, 4]


def test_a_freed_lease_is_refused() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:4])
    pool.free_blocks(lease)
    with pytest.raises(DoubleFree):
        pool.cache_next_blocks(lease, TOKENS[4:8], lease.num_cached_blocks)


def test_caching_off_caches_nothing() -> None:
    pool = BlockPool(10, SIZE, enable_prefix_caching=False)
    lease = pool.get_new_blocks(2)
    assert pool.cache_next_blocks(lease, TOKENS[:8], lease.num_cached_blocks) == 0
    assert pool.num_cached_blocks == 0


# ---------------------------------------------------------------- extend


def test_extend_returns_the_new_ids_as_a_copy() -> None:
    pool = BlockPool(40, SIZE)
    lease = pool.get_new_blocks(1)
    seen = [1]
    for count in (2, 0, 1, 1, 7, 3):
        new = pool.extend(lease, count)
        assert new.dtype == np.int32
        seen += new.tolist()
        assert lease.block_ids.tolist() == list(lease) == seen
        assert (len(lease), lease[-1]) == (len(seen), seen[-1])
    with pytest.raises(IndexError):
        lease[len(seen)]
    pool.free_blocks(lease)
    assert pool.num_used_blocks == 0
    pool.check()


def test_a_view_of_the_blocks_stays_as_it_was_when_the_lease_grows() -> None:
    pool = BlockPool(40, SIZE)
    lease = pool.get_new_blocks(2)
    pool.extend(lease, 1)
    view = lease.block_ids
    pool.extend(lease, 1)
    pool.extend(lease, 20)
    assert view.tolist() == [1, 2, 3]


def test_no_tokens_cache_nothing() -> None:
    pool = BlockPool(10, 4)
    lease = pool.get_new_blocks(2)
    assert pool.cache_next_blocks(lease, [], lease.num_cached_blocks) == 0
    assert pool.cache_next_blocks(lease, [1, 2, 3, 4], lease.num_cached_blocks) == 1
    assert pool.cache_next_blocks(lease, np.array([], dtype=np.int32), lease.num_cached_blocks) == 1
    assert pool.cache_next_blocks(lease, (), lease.num_cached_blocks) == 1
    pool.check()
