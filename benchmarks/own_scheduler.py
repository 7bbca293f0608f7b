"""What a pool costs under a scheduler of one's own: one more block at any length, and a look-up with its hold.

    python -m benchmarks.own_scheduler

The old ways stand beside the new ones in the same process: `cache_full_blocks` from the first token for one more block,
`get_cached_blocks` for `find_cached_blocks` and `hold`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blockyard import BlockLease, BlockPool

from .measure import Figure, figure, nanoseconds_an_item
from .workload import BLOCK_SIZE, ROUNDS

LENGTHS = (2_048, 32_768, 131_072)
CALLS = 200
MORE = CALLS * (ROUNDS + 1) + 10


def lease_of(pool: BlockPool, tokens: np.ndarray) -> BlockLease:
    lease = pool.get_new_blocks(len(tokens) // BLOCK_SIZE)
    pool.cache_full_blocks(lease, tokens)
    return lease


def one_more_block(num_tokens: int) -> Iterator[Figure]:
    """Extend a lease by a block; cache it by its own tokens, and by the whole prompt."""
    pool = BlockPool(num_tokens // BLOCK_SIZE + 2 * MORE, BLOCK_SIZE)
    tokens = np.arange(num_tokens + MORE * BLOCK_SIZE, dtype=np.int32)
    grown = lease_of(pool, tokens[:num_tokens])

    def extend() -> int:
        for _ in range(CALLS):
            pool.extend(grown, 1)
        return CALLS

    yield figure("extend by a block", f"{num_tokens} tokens", nanoseconds_an_item(extend, ROUNDS), "us", "", 1e-3)
    for name, form in (("int32 array", tokens), ("list", tokens.tolist())):
        lease = pool.touch(grown, "", 0, num_tokens // BLOCK_SIZE)
        for step in (_next(pool, lease, form, num_tokens), _from_the_start(pool, lease, form, num_tokens)):
            calls = CALLS if step.__name__ == "cache_next_blocks" else 5
            pool.extend(lease, 1)
            samples = nanoseconds_an_item(_repeated(step, calls), ROUNDS)
            yield figure(f"{step.__name__}, one more block, {name}", f"{num_tokens} tokens", samples, "us", "", 1e-3)
        pool.free_blocks(lease)


def _repeated(step: Callable[[], object], calls: int) -> Callable[[], int]:
    def work() -> int:
        for _ in range(calls):
            step()
        return calls

    return work


def _next(pool: BlockPool, lease: BlockLease, tokens: Any, num_tokens: int) -> Callable[[], object]:
    """The last block of the lease, cached again and again: its content goes before each call, which is in the time."""
    last = tokens[num_tokens : num_tokens + BLOCK_SIZE]
    position = num_tokens // BLOCK_SIZE

    def cache_next_blocks() -> None:
        pool.cache_next_blocks(lease, last, (), position)
        pool.copy_on_write(lease, position)

    return cache_next_blocks


def _from_the_start(pool: BlockPool, lease: BlockLease, tokens: Any, num_tokens: int) -> Callable[[], object]:
    whole = tokens[: num_tokens + BLOCK_SIZE]
    position = num_tokens // BLOCK_SIZE

    def cache_full_blocks() -> None:
        pool.cache_full_blocks(lease, whole, position)
        pool.copy_on_write(lease, position)

    return cache_full_blocks


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


def all_figures() -> Iterator[Figure]:
    """Every figure."""
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
