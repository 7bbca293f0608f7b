"""What a pool costs under a scheduler of one's own: one more block at any length, a lookup with its hold, `evict`.

    python -m benchmarks.own_scheduler

The old ways stand beside the new ones in the same process: `cache_full_blocks` from the first token for one more block,
`get_cached_blocks` for `find_cached_blocks` and `hold`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

import numpy as np

from blockyard import BlockLease, BlockPool

from .measure import Figure, figure, nanoseconds_an_item
from .workload import BLOCK_SIZE, ROUNDS

LENGTHS = (2_048, 32_768, 131_072)
CALLS = 200
#: Calls a round of what is slow.
FEW = 5
MORE = CALLS * (ROUNDS + 1) + 10


def lease_of(pool: BlockPool, tokens: np.ndarray) -> BlockLease:
    lease = pool.get_new_blocks(len(tokens) // BLOCK_SIZE)
    pool.cache_full_blocks(lease, tokens)
    return lease


def one_more_block(num_tokens: int) -> Iterator[Figure]:
    """Extend a lease by a block; cache it by its own tokens, and by the whole prompt."""
    pool = BlockPool(num_tokens // BLOCK_SIZE + 4 * MORE, BLOCK_SIZE)
    tokens = np.arange(num_tokens + MORE * BLOCK_SIZE, dtype=np.int32)
    grown = lease_of(pool, tokens[:num_tokens])

    def extend() -> int:
        for _ in range(CALLS):
            pool.extend(grown, 1)
        return CALLS

    yield figure("extend by a block", f"{num_tokens} tokens", nanoseconds_an_item(extend, ROUNDS), "us", "", 1e-3)
    for name, form in (("int32 array", tokens), ("list", tokens.tolist())):
        for step in (cache_next_blocks, cache_full_blocks):
            lease = pool.touch(grown, holder="", start=0, stop=num_tokens // BLOCK_SIZE)
            calls = CALLS if step is cache_next_blocks else FEW
            pool.extend(lease, calls * (ROUNDS + 1))
            samples = nanoseconds_an_item(_block_by_block(step, pool, lease, form, calls), ROUNDS)
            yield figure(f"{step.__name__}, one more block, {name}", f"{num_tokens} tokens", samples, "us", "", 1e-3)
            pool.free_blocks(lease)


def _block_by_block(
    step: Callable[[BlockPool, BlockLease, Any, int], None], pool: BlockPool, lease: BlockLease, tokens: Any, calls: int
) -> Callable[[], int]:
    def work() -> int:
        for _ in range(calls):
            step(pool, lease, tokens, lease.num_cached_blocks)
        return calls

    return work


def cache_next_blocks(pool: BlockPool, lease: BlockLease, tokens: Any, num_cached: int) -> None:
    """One more block, by its own tokens."""
    pool.cache_next_blocks(lease, tokens[num_cached * BLOCK_SIZE : (num_cached + 1) * BLOCK_SIZE], num_cached)


def cache_full_blocks(pool: BlockPool, lease: BlockLease, tokens: Any, num_cached: int) -> None:
    """One more block, by the whole prompt up to its end."""
    pool.cache_full_blocks(lease, tokens[: (num_cached + 1) * BLOCK_SIZE], num_cached_blocks=num_cached)


def _repeated(step: Callable[[], object], calls: int) -> Callable[[], int]:
    def work() -> int:
        for _ in range(calls):
            step()
        return calls

    return work


def look_ups(num_tokens: int) -> Iterator[Figure]:
    """A cached prompt: the question, the question and the hold, and the old call that does both."""
    pool = BlockPool(10_000, BLOCK_SIZE)
    tokens = np.arange(num_tokens, dtype=np.int32)
    pool.free_blocks(lease_of(pool, tokens))

    def find_and_hold() -> None:
        pool.free_blocks(pool.hold(pool.find_cached_blocks(tokens), extend_by=1))

    def get_and_extend() -> None:
        lease = pool.get_cached_blocks(tokens)
        pool.extend(lease, 1)
        pool.free_blocks(lease)

    calls: list[tuple[str, Callable[[], object]]] = [
        ("find_cached_blocks", lambda: pool.find_cached_blocks(tokens)),
        ("num_cached_tokens", lambda: pool.num_cached_tokens(tokens)),
        ("find + hold(extend_by=1) + free", find_and_hold),
        ("get_cached_blocks + extend(1) + free", get_and_extend),
    ]
    for name, call in calls:
        samples = nanoseconds_an_item(_repeated(call, CALLS), ROUNDS)
        yield figure(name, f"{num_tokens} tokens", samples, "us", "", 1e-3)


def evictions(num_blocks: int) -> Iterator[Figure]:
    """`evict(1)` in a pool of which almost nothing is cached: the blocks that cache nothing stand before the others."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    number = iter(range(ROUNDS * CALLS * 10))

    def cache_some() -> None:
        for _ in range(CALLS):
            lease = pool.get_new_blocks(1)
            pool.cache_full_blocks(lease, np.full(BLOCK_SIZE, next(number), np.int32))
            pool.free_blocks(lease)

    samples = []
    for _ in range(ROUNDS):
        cache_some()
        start = perf_counter_ns()
        for _ in range(CALLS):
            pool.evict(1)
        samples.append((perf_counter_ns() - start) / CALLS)
    yield figure("evict(1), the rest is empty", f"{num_blocks} blocks", samples, "us", "", 1e-3)


def all_figures() -> Iterator[Figure]:
    """Every figure."""
    for num_blocks in (1_000, 100_000, 1_000_000):
        yield from evictions(num_blocks)
    for num_tokens in (256, 8_192):
        yield from look_ups(num_tokens)
    for num_tokens in LENGTHS:
        yield from one_more_block(num_tokens)


def main() -> None:
    """Print them as a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for row in all_figures():
        print(f"{row.name:55} {row.size:15} {row.value:9.3g} {row.unit}  ({row.spread})")


if __name__ == "__main__":
    main()
