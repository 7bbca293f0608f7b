"""A pool that a trace has aged is sound and free, and what is said of its hits is so."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from benchmarks.aging import PoolEngine, aged_pool, read_trace
from benchmarks.core import fill, layouts_for
from benchmarks.service import Service, neighbours
from benchmarks.workload import BLOCK_SIZE, PROMPT_BLOCKS, Request, prompts_for

from blockyard import BlockLease, BlockPool

TRACE = "mix:requests=400,seed=3,hash_block_size=64"


class WatchedPool:
    """A pool that keeps the ids of every hit."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.hits: list[list[int]] = []

    def get_cached_blocks(self, tokens: np.ndarray) -> BlockLease:
        lease = self._pool.get_cached_blocks(tokens)
        self.hits.append(lease.block_ids.tolist())
        return lease

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def test_blocks_are_equal_where_the_ids_of_the_trace_are() -> None:
    ids = np.array([5, 2**30 + 5, 5, 9])
    request = Request(0, ids, 64, 4 * 64 - 7, 40)
    prompt = request.prompt()
    assert (len(prompt), len(request.output()), request.num_blocks) == (249, 40, 19)
    blocks = [tuple(prompt[start : start + BLOCK_SIZE]) for start in range(0, 240, BLOCK_SIZE)]
    assert blocks[0:4] == blocks[8:12]
    assert len(set(blocks)) == len(blocks) - 4
    assert not set(request.output()) & set(prompt.tolist())


def test_an_aged_pool_is_free_and_sound_and_always_the_same() -> None:
    requests = read_trace(TRACE)
    pool, service = aged_pool(3_000, requests)
    pool.check()
    assert pool.leases() == []
    assert sorted(pool.free_block_ids().tolist()) == list(range(1, 3_000))
    assert service.num_taken >= 2 * 3_000
    assert service.num_hits > 0
    again, _ = aged_pool(3_000, requests)
    assert again.free_block_ids().tolist() == pool.free_block_ids().tolist()


def test_its_adjacency_is_that_of_its_hits() -> None:
    pool: Any = WatchedPool(500)
    service = Service(PoolEngine(pool))
    service.run([request for request in read_trace(TRACE) if request.num_blocks < 200])
    assert service.num_hits == sum(map(len, pool.hits))
    # What was hit before the pool was first full does not count: so serve on, from where it is full.
    late, later = Service(PoolEngine(pool)), len(pool.hits)
    late.num_taken = pool.num_blocks
    late.run(read_trace("chat:requests=60,seed=8"))
    steps = [abs(b - a) == 1 for hit in pool.hits[later:] for a, b in pairwise(hit)]
    assert len(steps) > 0
    assert late.adjacency == pytest.approx(sum(steps) / len(steps))


def test_neighbours_are_one_above_or_one_below() -> None:
    assert neighbours(np.array([4, 5, 6, 9, 8, 3], np.int32)) == 3 / 5


def test_a_trace_that_does_not_fill_the_pool_ages_nothing() -> None:
    with pytest.raises(SystemExit, match="too short to age a pool of 1,000,000"):
        aged_pool(1_000_000, read_trace("chat:requests=20,seed=1"))


def test_both_layouts_are_empty_pools_that_the_rows_can_fill() -> None:
    prompts = prompts_for(3_000, 1)
    shares = {}
    for layout, make_pool in layouts_for(read_trace(TRACE)).items():
        pool = make_pool(3_000)
        assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 2_999)
        fill(pool, prompts)
        pool.check()
        hits = [pool.get_cached_blocks(prompt).block_ids for prompt in prompts]
        assert [len(hit) for hit in hits] == [PROMPT_BLOCKS] * len(prompts)
        shares[layout] = float(np.mean([neighbours(hit) for hit in hits]))
    assert shares["aged"] > 0.3
    assert shares["shuffled"] < 0.05
