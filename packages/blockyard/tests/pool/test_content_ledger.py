"""The pool below layer groups: contents with colliding hashes are distinguished, and memory stays bounded."""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import Any

import pytest
from librt.vecs import vec
from mypy_extensions import i32

import blockyard
from blockyard import CacheSalt, LayerGroup, Span
from blockyard.core.index.prefix_index import PrefixIndex
from blockyard.core.index.room import ID_BITS
from blockyard.core.store.content_ledger import ContentLedger
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt

SEED = 11


def hash_of(pool: ContentLedger, content: int, group: int) -> int:
    pool._entry[0] = content
    pool._entry[1] = group
    return int(pool.index.hash_words_at(pool._entry, 0, pool._root))


def cached(pool: ContentLedger, content: int, group: int) -> int:
    block = pool.acquire_one()
    pool.cache_content(block, content, group)
    return int(block)


def weaken(index: PrefixIndex) -> None:
    """Take the keys away: the hash of an entry, or of tokens below 2**31 beside 0, does not depend on them any more."""
    for place in range(len(index._keys)):
        index._keys[place] = 0


def test_entries_of_one_hash_are_distinguished() -> None:
    pool = ContentLedger(40, SEED, 4)
    weaken(pool.index)
    contents = {group: 5 + 3 * group for group in range(20)}
    assert len({hash_of(pool, content, group) for group, content in contents.items()}) == 1
    blocks = {group: cached(pool, content, group) for group, content in contents.items()}
    pool.check()
    for group, content in contents.items():
        assert pool.find_content(content, group) == blocks[group]
        assert pool.find_content(content, group + 1) == 0
        assert (pool.content_of(blocks[group]), pool.group_of(blocks[group])) == (content, group)
    order = list(contents)
    random.Random(run_seed()).shuffle(order)
    while order:
        gone = order.pop()
        pool.index.remove(blocks[gone])
        pool.check()
        assert pool.find_content(contents[gone], gone) == 0
        assert all(pool.find_content(contents[group], group) == blocks[group] for group in order)


def test_small_content_ids_of_one_tag() -> None:
    """Content ids count up from 1, so these collisions happen in a life of a cache: equal tags, other hashes."""
    pool = ContentLedger(100, SEED, 4)
    home = pool.index._home_shift
    by_slot: dict[int, list[int]] = {}
    for content in range(1, 3000):
        by_slot.setdefault((hash_of(pool, content, 0) >> ID_BITS) >> home, []).append(content)
    crowd = max(by_slot.values(), key=len)[:20]
    assert len(crowd) > 10
    blocks = {content: cached(pool, content, 0) for content in crowd}
    for content in crowd:
        assert pool.find_content(content, 0) == blocks[content]
        assert pool.find_content(content, 1) == 0
    pool.check()


def test_equal_entries_are_duplicates() -> None:
    """The oldest block answers; when it goes, the next one does."""
    pool = ContentLedger(10, SEED, 4)
    blocks = [cached(pool, 7, 1) for _ in range(3)]
    for block in blocks:
        assert pool.find_content(7, 1) == block
        pool.index.remove(block)
    assert pool.find_content(7, 1) == 0


def test_a_manager_under_colliding_pages() -> None:
    """Prompts whose hashes collide: in each group, and on the CPU, the thief hits nothing."""
    victim = [1, 0, 3, 0]
    thief = [7, 0, 9, 0]
    cache = Checked(30, groups=(LayerGroup(4), LayerGroup(4, 6)), num_cpu_blocks=20)
    weaken(cache._parts.token_blocks.index)
    seq = cache.prefilled([*victim, 5])
    index = cache._parts.token_blocks.index
    page = int(cache._parts.sequences.row_blocks(0)[0])
    other = cache.prefilled([*thief, 5])
    assert cache.num_computed_tokens(other) == 5
    assert index.chain_hash[page] == index.chain_hash[int(cache._parts.sequences.row_blocks(1)[0])]
    cache.free([seq, other])
    cache.pool.free_blocks(cache.pool.get_new_blocks(cache.num_free_blocks))
    cache.reserve([], 0)
    rows = []
    for tokens in (victim, thief):
        seq = cache.allocate([*tokens, 6])
        assert cache.num_computed_tokens(seq) == 4
        rows.append([source for source, _ in cache.reserve([seq], 1).swap_ins.tolist()])
    assert not set(rows[0]) & set(rows[1])


def test_leases_on_the_pool_of_a_manager() -> None:
    """The pool of a manager has leases; what needs tokens is asked of the manager, of any kind of cache."""
    cache = Checked(10, num_cpu_blocks=5)
    lease = cache.pool.get_new_blocks(2, holder="mine")
    for call in ("cache_full_blocks", "get_cached_blocks", "get_cached_block", "num_cached_tokens"):
        assert not hasattr(cache.pool, call)
    assert cache.block(1).holders == ["mine"]
    cache.pool.free_blocks(lease)


def life(cache: Checked, draw: random.Random, rounds: int) -> None:
    """Prompts with salts and images that never come again, swapped, forked and evicted."""
    for _ in range(rounds):
        number = draw.randrange(2**20)
        keys: tuple[Any, ...] = (CacheSalt(str(number)), Span(str(number), 1, 3))
        seq = cache.cache.allocate(prompt(number % 1000, 12), holder="someone", extra_keys=keys)
        missing = cache.cache.num_tokens(seq) - cache.cache.num_computed_tokens(seq)
        cache.cache.reserve([seq], missing)
        cache.cache.commit([seq], missing, [5])
        (child,) = cache.cache.fork(seq)
        cache.cache.swap_out([seq, child])
        cache.cache.truncate(child, 11)
        cache.cache.swap_in([child])
        cache.cache.regroup([seq, child], [])


@pytest.mark.skipif(not blockyard.compiled(), reason="interpreted integers are objects, and some are kept")
def test_a_long_life_takes_no_more_memory() -> None:
    cache = Checked(30, groups=(LayerGroup(4), LayerGroup(4, 6)), num_cpu_blocks=20)
    draw = random.Random(1)
    life(cache, draw, 500)
    tracemalloc.start()
    try:
        life(cache, draw, 100)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        life(cache, draw, 2000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    cache.check()
    # 2,000 prompts whose salts alone are 100 kB: what is remembered is bounded by the pool.
    assert grown < 20_000
    assert len(cache._parts.token_blocks.index.roots) <= cache._parts.token_blocks.num_blocks + 1


@pytest.mark.parametrize("seed", [SEED, run_seed()])
def test_parts_of_a_content_are_found_up_to_the_first_that_is_gone(seed: int) -> None:
    choose = random.Random(seed)
    pool = ContentLedger(80, seed, 16)
    pool.make_part_room(5, 1, choose.random() < 0.7)
    there: dict[tuple[int, int], list[int]] = {}
    num_cut = 0
    for _ in range(400):
        content = choose.randrange(1, 6)
        held = sum(len(blocks) for blocks in there.values())
        if held < 60 and (choose.random() < 0.15 or held == 0):
            blocks = vec[i32]([0] * 5)
            pool.acquire(blocks, 0, 5)
            pool.cache_parts(blocks, 0, 5, content, 7)
            for block in there.pop((content, 0), []):  # one first part leads to the others
                assert not pool.is_cached(block)
                pool.release_one(block)
            for part in range(5):
                there.setdefault((content, part), []).append(int(blocks[part]))
            assert len(pool.find_parts(content, 7, 5)) == 5
        else:
            content, part = choose.choice([key for key, blocks in there.items() if blocks])
            block = there[content, part].pop(choose.randrange(len(there[content, part])))
            pool.uncache(block)
            pool.release_one(block)
        pool.check()
        found = [int(block) for block in pool.find_parts(content, 7, 5)]
        missing = [part for part in range(5) if not there.get((content, part))]
        assert len(found) <= min(missing, default=5)
        assert all(block in there[content, part] for part, block in enumerate(found))
        assert len(pool.find_parts(content + 100, 7, 5)) == 0
        num_cut += 0 < len(found) < 5
    assert num_cut > 20
