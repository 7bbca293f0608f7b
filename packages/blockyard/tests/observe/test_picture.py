"""The picture of the pool says of each block what it does."""

from __future__ import annotations

import doctest

import pytest

from blockyard import CacheConfig, InvalidArgument, KVCacheManager, LayerGroup
from blockyard.observe import GroupTokens, PoolSnapshot, draw_pool, picture, snapshot_pool

from ..support.checked import Checked, prompt


def test_each_block_is_drawn_by_its_state() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2))
    first = cache.allocate([1, 2, 3, 4, 5])
    cache.reserve([first], [5])
    cache.commit([first], [5])
    second = cache.allocate([1, 2, 9])
    snapshot = snapshot_pool(cache)
    assert snapshot.states == "██▒▒····"
    assert snapshot.num_held == 4
    cache.free(second)
    cache.free(first)
    # What was full and computed stays cached; the half-full blocks are simply free.
    assert draw_pool(cache, width=5).splitlines() == [
        "░░···",
        "···",
        "█ 0 shared: held and cached",
        "▒ 0 private: held, not cached",
        "░ 2 idle: cached, not held",
        "· 6 free",
    ]
    assert draw_pool(snapshot, width=5).splitlines()[:2] == ["██▒▒·", "···"]


def test_a_large_pool_is_drawn_in_sixteen_lines() -> None:
    snapshot = PoolSnapshot("█" * 700 + "·" * 1000 + "▒" * 348)
    lines = draw_pool(snapshot, width=64).splitlines()
    assert len(lines) == 16 + 1 + 4
    assert "".join(lines[:16]) == "█" * 350 + "·" * 500 + "▒" * 174
    assert lines[16] == "(a character stands for 2 blocks)"
    assert lines[18] == "▒ 348 private: held, not cached"


def test_shared_blocks_say_how_often_and_tokens_are_counted_once() -> None:
    cache = Checked(num_blocks=9)
    seq = cache.prefilled(prompt(1, 6))
    cache.fork(seq, 3)
    assert draw_pool(cache.cache).splitlines() == [
        "█▒······",
        "█ 1 shared: held and cached",
        "▒ 1 private: held, not cached",
        "░ 0 idle: cached, not held",
        "· 6 free",
        "a block is held up to 4 times",
        "6 tokens in 2 blocks of 4, empty slots: 2",
    ]


def test_retiring_blocks_are_drawn_after_the_end() -> None:
    """Eight blocks shrink to three: 4 and 6 are held beyond, 5 is gone between them, 7 and 8 behind them."""
    cache = Checked(num_blocks=9)
    pool = cache.cache.pool
    leases = [pool.get_new_blocks(1) for _ in range(6)]
    pool.free_blocks(leases[4])
    pool.free_blocks(leases[1])
    cache.resize(4)
    assert snapshot_pool(cache.cache).states == "▒·▒▼ ▼"
    assert snapshot_pool(cache.cache).num_held == 4
    assert draw_pool(cache.cache).splitlines() == [
        "▒·▒▼ ▼",
        "█ 0 shared: held and cached",
        "▒ 2 private: held, not cached",
        "░ 0 idle: cached, not held",
        "· 1 free",
        "▼ 2 retiring: held beyond the end of a pool that shrank; removed when freed",
    ]
    for lease in (leases[3], leases[5]):
        pool.free_blocks(lease)
    assert snapshot_pool(cache.cache).states == "▒·▒"


def test_each_layer_group_has_its_tokens_and_the_cpu_pool_its_picture() -> None:
    groups = (LayerGroup(4, name="full"), LayerGroup(4, 5))
    cache = Checked(num_blocks=12, num_cpu_blocks=7, groups=groups)
    first = cache.prefilled(prompt(1, 10))
    second = cache.prefilled(prompt(2, 2))
    # Token 10 attends to 6 and later: the window's first block went back, and is still cached.
    assert cache.block_ids(first, 1).tolist()[0] == 0
    assert snapshot_pool(cache.cache).groups == (GroupTokens("full", 4, 12, 4), GroupTokens("group 1", 4, 8, 3))
    cache.swap_out([first])
    drawn = draw_pool(cache.cache, width=12).splitlines()
    assert drawn[0] == snapshot_pool(cache.cache).states
    assert drawn[5:] == [
        "full: 2 tokens in 1 blocks of 4, empty slots: 2",
        "group 1: 2 tokens in 1 blocks of 4, empty slots: 2",
        "CPU pool:",
        "▒██▒█·",
        "█ 3 shared: held and cached",
        "▒ 2 private: held, not cached",
        "░ 0 idle: cached, not held",
        "· 1 free",
    ]
    cache.free([first, second])
    # What was full and computed stays cached on the CPU as well.
    assert sorted(snapshot_pool(cache.cache).cpu_states) == sorted("░░░···")


def test_tokens_without_blocks_are_not_held() -> None:
    """Four tokens fill the block; the fifth has none yet."""
    cache = Checked()
    cache.prefilled(prompt(1, 4), [7])
    assert snapshot_pool(cache.cache).groups == (GroupTokens("", 4, 4, 1),)
    assert snapshot_pool(cache.cache).groups[0].num_empty_slots == 0


def test_a_width_below_one_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="width is 0; it must be at least 1"):
        draw_pool(PoolSnapshot("·"), width=0)


def test_the_example_in_its_docstring_holds() -> None:
    assert doctest.testmod(picture).failed == 0
