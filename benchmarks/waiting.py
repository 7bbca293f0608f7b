"""`python -m benchmarks.waiting`: what waiting requests cost the cache, and what asking about them costs.

Rows: an event (a block that is cached or uncached) without a queue, one that nobody waits for, and one that 4,096
requests wait for, whose prompts begin with 10,000 common blocks; then `next`, `missing`, `add` and `remove` with 4,096
waiting. Nanoseconds an event or a call, the least of `--rounds` rounds, since others may use the machine. A row of
events has the publication of blocks in it: subtract the row without a queue.

Predicted before it was run, on an idle machine: an event that nobody waits for adds 2 ns when it comes and 8 when it
goes; one that 4,096 wait for 60 and 30; `next` 500, `missing` 100, `add` of 10,010 blocks 600,000, `remove` 1,500.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from blockyard import BlockPool
from blockyard.admission import AdmissionRule

NUM_WAITING = 4096
NUM_BLOCKS = 10_000
BLOCK_SIZE = 16
CALLS = 1000


def least(rounds: int, run: Callable[[], float]) -> float:
    return min(run() for _ in range(rounds))


class Events:
    """Blocks of one prompt that are cached and uncached again."""

    def __init__(self, pool: BlockPool, tokens: np.ndarray) -> None:
        self.pool = pool
        self.tokens = tokens

    def measure(self, rounds: int) -> tuple[float, float]:
        """Nanoseconds a block that is cached, and one that is uncached."""
        cached, uncached = [], []
        for _ in range(rounds):
            lease = self.pool.get_new_blocks(NUM_BLOCKS)
            blocks = np.array(list(lease))[::-1].copy()
            begin = time.perf_counter()
            self.pool.cache_full_blocks(lease, self.tokens)
            middle = time.perf_counter()
            self.pool.uncache(blocks)
            cached.append(middle - begin)
            uncached.append(time.perf_counter() - middle)
            self.pool.free_blocks(lease)
        return min(cached) / NUM_BLOCKS * 1e9, min(uncached) / NUM_BLOCKS * 1e9


def nanoseconds(calls: int, call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) / calls * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    shared = np.arange(NUM_BLOCKS * BLOCK_SIZE, dtype=np.int32)
    other = shared + 10_000_000
    pool = BlockPool(4 * NUM_BLOCKS, BLOCK_SIZE)
    rows: list[tuple[str, float, float]] = [("no queue", *Events(pool, other).measure(rounds))]
    queue = pool.waiting()
    rule = AdmissionRule(queue, "room", seconds=1e-9)
    tickets, added = [], []
    for number in range(NUM_WAITING):
        prompt = np.append(shared, np.full(10 * BLOCK_SIZE, 20_000_000 + number, np.int32))
        begin = time.perf_counter()
        tickets.append(queue.add(prompt, session=str(number)))
        added.append((time.perf_counter() - begin) * 1e9)
    rows.append(("nobody waits for it", *Events(pool, other).measure(rounds)))
    rows.append((f"{NUM_WAITING} wait for it", *Events(pool, shared).measure(rounds)))
    print(f"{'an event':24} {'comes, ns':>10} {'goes, ns':>10}")
    for name, cached, uncached in rows:
        print(f"{name:24} {cached:10.1f} {uncached:10.1f}")
    calls: dict[str, Callable[[], object]] = {
        "next": lambda: [rule.next(0.0) for _ in range(CALLS)],
        "missing": lambda: [queue.missing(ticket) for ticket in tickets[:CALLS]],
        "wake_at": lambda: [rule.wake_at(0.0) for _ in range(CALLS)],
    }
    print(f"{'a call, 4,096 waiting':24} {'ns':>10}")
    for name, call in calls.items():
        print(f"{name:24} {least(rounds, lambda call=call: nanoseconds(CALLS, call)):10.1f}")
    print(f"{'add, 10,010 blocks':24} {min(added):10.1f}")
    print(f"{'remove':24} {nanoseconds(NUM_WAITING, lambda: [queue.remove(ticket) for ticket in tickets]):10.1f}")


if __name__ == "__main__":
    main()
