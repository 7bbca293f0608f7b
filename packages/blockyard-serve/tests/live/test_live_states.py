"""The page shows every block and sequence as the cache reports it, in any state of the cache."""

from __future__ import annotations

from collections import Counter

import pytest

from blockyard import BlockPool, CacheConfig, CacheSalt, HintConfig, KVCacheManager, LayerGroup
from blockyard.tenants import Tenant
from blockyard_serve.live.call_queue import EngineStatus
from blockyard_serve.live.cells import (
    MAX_SHARED_CELLS,
    MAX_SINGLE_CELLS,
    NAMES,
    SHARED_CELL_BYTES,
    block_states,
    cells_of,
    pool_states,
)
from blockyard_serve.live.frames import MAX_PATH, MAX_ROWS, MAX_TENANTS, Frame
from blockyard_serve.live.snapshot import take_snapshot
from blockyard_testing.live_caches import KINDS, at_work, live_cache, state_of
from blockyard_testing.seeds import run_seed


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_each_block(kind: str) -> None:
    cache, seen = live_cache(kind), Counter[str]()
    for _ in at_work(cache, run_seed(), 300):
        states = block_states(take_snapshot(cache, EngineStatus()))
        found = [NAMES[state] for state in states]
        assert found == [state_of(cache, block_id) for block_id in range(1, cache.pool.num_blocks)]
        seen.update(found)
    wanted = {"free", "private", "shared", "idle"} | ({"pending"} if kind == "plain" else set())
    assert wanted <= set(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_the_running_sequences(kind: str) -> None:
    cache = live_cache(kind)
    for _ in at_work(cache, run_seed() + 1, 200):
        frame = Frame.of(take_snapshot(cache, EngineStatus(names={"request 7": "mine"})), 1)
        assert {row.handle: row.holder for row in frame.rows.values()} == cache.running()
        for handle, row in frame.rows.items():
            groups = range(len(cache.config.layer_groups))
            blocks = [block for group in groups for block in cache.block_ids(handle, group).tolist() if block]
            assert [cell + 1 for cell in row.path] == blocks
            assert (row.num_tokens, row.num_computed) == (cache.num_tokens(handle), cache.num_computed_tokens(handle))
            assert row.is_swapped == cache.is_swapped_out(handle)
            assert row.name == ("mine" if row.holder == "request 7" else "")


def test_counts_are_in_the_cells_and_the_totals() -> None:
    cache = live_cache("plain")
    for _ in at_work(cache, run_seed() + 2, 100):
        frame = Frame.of(take_snapshot(cache, EngineStatus()), 1)
        assert [byte >> 3 for byte in frame.cells.content] == cache.pool.ref_counts()[1:].tolist()
        assert [byte & 7 for byte in frame.cells.content] == frame.states.tolist()
        held = sum(frame.totals[name] for name in ("private", "shared", "pending"))
        assert held == cache.num_used_blocks
        assert frame.totals["idle"] + frame.totals["free"] == cache.num_free_blocks
        assert frame.totals["hit"] == cache.stats().num_hit_tokens


def test_a_snapshot_does_not_follow_the_cache() -> None:
    cache = live_cache("plain")
    seq = cache.allocate(list(range(20)), holder="one")
    snapshot = take_snapshot(cache, EngineStatus())
    before = Frame.of(snapshot, 1)
    cache.free(seq)
    assert Frame.of(snapshot, 1).is_like(before)
    assert not Frame.of(take_snapshot(cache, EngineStatus()), 2).is_like(before)


def test_blocks_beyond_a_pool_that_shrank_are_retiring() -> None:
    cache = live_cache("plain")
    cache.allocate(list(range(100, 116)))
    seq = cache.allocate(list(range(20)))
    cache.resize(7)
    frame = Frame.of(take_snapshot(cache, EngineStatus()), 1)
    held = max(cache.block_ids(seq).tolist())
    assert frame.cells.num_blocks == held, "up to the last that is held"
    assert [NAMES[state] for state in frame.states[6:held]] == ["retiring"] * (held - 6)
    assert frame.totals["retiring"] == cache.pool.num_retiring_blocks


@pytest.mark.parametrize("num_blocks", [MAX_SINGLE_CELLS + 2, MAX_SINGLE_CELLS + 3, 10_001])
def test_fractions_in_a_cell_match_its_blocks(num_blocks: int) -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=4, max_num_seqs=64, max_model_len=2048))
    seqs = [cache.allocate(list(range(first, first + 1000))) for first in range(0, 5000, 1000)]
    cache.commit(seqs, cache.reserve(seqs).num_scheduled)
    cache.free(seqs[1])
    cache.fork(seqs[2], 3)
    cache.allocate(list(range(7000, 8000)))
    snapshot = take_snapshot(cache, EngineStatus())
    states, counts = block_states(snapshot), snapshot.pool.ref_counts[1:]
    cells = cells_of(states, counts)
    assert cells.scale * MAX_SHARED_CELLS >= cells.num_blocks == num_blocks - 1
    assert len(cells.content) <= MAX_SHARED_CELLS * SHARED_CELL_BYTES
    for number in range(len(cells.content) // SHARED_CELL_BYTES):
        part = slice(number * cells.scale, (number + 1) * cells.scale)
        names = [NAMES[state] for state in states[part]]
        shares = [-(-255 * names.count(name) // len(names)) for name in ("private", "shared", "idle", "pending")]
        found = cells.content[number * SHARED_CELL_BYTES : (number + 1) * SHARED_CELL_BYTES]
        assert list(found) == [*shares, min(max(counts[part].tolist()), 255)]


def test_a_frame_is_bounded_however_many_sequences_there_are() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=200_000, block_size=4, max_num_seqs=100, max_model_len=8192))
    for first in range(0, 700_000, 7000):
        cache.allocate(list(range(first, first + 7000)))
    frame = Frame.of(take_snapshot(cache, EngineStatus()), 1)
    assert len(frame.rows) == MAX_ROWS
    assert frame.num_rows == 100
    assert max(len(row.path) for row in frame.rows.values()) == MAX_PATH
    assert len(frame.whole()) < 300_000


def test_a_pool_without_a_manager_has_states() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    lease = pool.get_new_blocks(3)
    pool.cache_full_blocks(lease, list(range(8)))
    copy = take_snapshot(live_cache("plain"), EngineStatus()).pool
    copied = type(copy)(pool.ref_counts().copy(), pool.states())
    assert [NAMES[state] for state in pool_states(copied)] == ["shared", "shared", "private", "free", "free"]


@pytest.mark.parametrize("num_tenants", [3, 40])
def test_largest_tenants_are_listed_and_the_rest_is_summed(num_tenants: int) -> None:
    tenants = tuple(Tenant(f"t{number}", min_blocks=number % 2) for number in range(num_tenants))
    groups = (LayerGroup(4, token_bytes=8),)
    cache = KVCacheManager(CacheConfig(1000, 4, groups=groups, hints=HintConfig(retention_blocks=9), tenants=tenants))
    assert take_snapshot(cache, EngineStatus()).stats.block_bytes == 32
    for number in range(num_tenants):
        keys = (CacheSalt(f"t{number}"),)
        seq = cache.allocate(list(range(4 * number + 1)), extra_keys=keys)
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        if number % 3 == 0:
            cache.free([seq])
    cache.retain(list(range(9)), priority=1, expires_at=None, extra_keys=(CacheSalt("t2"),))
    lines, uses = Frame.of(take_snapshot(cache, EngineStatus()), 1).totals["tenants"], cache.stats().tenants
    assert len(lines) == min(num_tenants + 1, MAX_TENANTS + 1)
    told = ("num_held", "num_idle", "num_retained", "min_blocks", "share")
    for place, name in enumerate(told):
        assert sum(line[place + 1] for line in lines) == sum(getattr(use, name) for use in uses)
    by_name = {use.name: tuple(getattr(use, name) for name in told) for use in uses}
    named = lines if num_tenants < MAX_TENANTS else lines[:-1]
    assert [by_name[line[0]] for line in named] == [line[1:] for line in named]
    assert [line[1] + line[2] for line in named] == sorted((line[1] + line[2] for line in named), reverse=True)
    assert num_tenants < MAX_TENANTS or lines[-1][0] == f"{num_tenants + 1 - MAX_TENANTS} others"
    assert "tenants" not in Frame.of(take_snapshot(live_cache("plain"), EngineStatus()), 1).totals
