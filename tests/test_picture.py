"""The picture of the pool says of each block what it does."""

from __future__ import annotations

import doctest

import pytest

from blockyard import CacheConfig, InvalidArgument, KVCacheManager
from blockyard.observe import PoolSnapshot, draw_pool, picture, snapshot_pool


def test_each_block_is_drawn_by_what_it_does() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2))
    first = cache.allocate([1, 2, 3, 4, 5])
    cache.reserve([first], [5])
    cache.commit([first], [5])
    second = cache.allocate([1, 2, 9])
    snapshot = snapshot_pool(cache)
    assert snapshot.states == "█▒▒▒····"
    assert snapshot.num_held == 4
    cache.free(second)
    cache.free(first)
    # What was full and computed stays cached; the half-full blocks are simply free.
    assert draw_pool(cache, width=5).splitlines() == [
        "░░···",
        "···",
        "█ 0 shared by several sequences",
        "▒ 0 held by one",
        "░ 2 idle: held by none, still cached",
        "· 6 free",
    ]
    assert draw_pool(snapshot, width=5).splitlines()[:2] == ["█▒▒▒·", "···"]


def test_a_large_pool_is_drawn_in_sixteen_lines() -> None:
    snapshot = PoolSnapshot("█" * 700 + "·" * 1000 + "▒" * 348)
    lines = draw_pool(snapshot, width=64).splitlines()
    assert len(lines) == 16 + 1 + 4
    assert "".join(lines[:16]) == "█" * 350 + "·" * 500 + "▒" * 174
    assert lines[16] == "(a character stands for 2 blocks)"
    assert lines[18] == "▒ 348 held by one"


def test_a_width_below_one_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="width is 0; it must be at least 1"):
        draw_pool(PoolSnapshot("·"), width=0)


def test_the_example_in_its_docstring_holds() -> None:
    assert doctest.testmod(picture).failed == 0
