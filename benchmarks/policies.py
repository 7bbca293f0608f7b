"""What an eviction policy costs: `python -m benchmarks.policies`.

A pool whose blocks are all cached and idle takes prompts of 750 blocks, each block evicting another, and gives them
back. "lru" is the order of the free queue and asks no policy; "LRU, asked" is the same order as a policy. Random
prompts are never hit, so this is the price of telling and asking a policy, not what a hit rate is worth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import blockyard
from blockyard import BlockPool
from blockyard.core.policies import POLICIES
from blockyard.core.policies.base import EvictionPolicy
from blockyard.core.policies.lru import LRU
from blockyard.core.policies.retention import Retention

from .core import PROMPT_BLOCKS, filled_pool, prompts_for, size_name
from .measure import Figure, figure

ROUNDS = 5
MOST_PROMPTS = 133

Maker = Callable[[int], EvictionPolicy]

#: What is measured, besides "lru" without a policy.
MAKERS: dict[str, Maker] = {
    "LRU, asked": LRU,
    **{name: make for name, make in POLICIES.items() if name != "lru"},
    "retention around LRU": lambda num_blocks: Retention(LRU(num_blocks), num_blocks),
}


class LastIn(EvictionPolicy):
    """The shortest policy in plain Python: what a user's own costs at least."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.idle: dict[int, None] = {}

    def insert(self, block: int, key: int, depth: int) -> None:
        self.idle[block] = None

    def remove(self, block: int) -> None:
        del self.idle[block]

    def evict(self) -> int:
        return self.idle.popitem()[0]

    def clear(self) -> None:
        self.idle = {}


def turn_over(pool: BlockPool, prompts: list) -> tuple[float, float]:
    """Take and publish all prompts, then give them back; nanoseconds a block of each."""
    blocks = PROMPT_BLOCKS * len(prompts)
    evicted = pool.num_evicted_blocks
    leases = []
    start = time.perf_counter_ns()
    for prompt in prompts:
        leases.append(pool.get_new_blocks(PROMPT_BLOCKS))
        pool.cache_full_blocks(leases[-1], prompt)
    middle = time.perf_counter_ns()
    for lease in leases:
        pool.free_blocks(lease)
    end = time.perf_counter_ns()
    if pool.num_evicted_blocks - evicted < blocks - PROMPT_BLOCKS:
        raise AssertionError("blocks were taken that evicted no other")
    return (middle - start) / blocks, (end - middle) / blocks


def policy_figures(name: str, make: Maker | None, num_blocks: int) -> Iterator[Figure]:
    """Figures of one policy in one pool."""
    pool = filled_pool(num_blocks, prompts_for(num_blocks, 1))
    pool.set_policy(None if make is None else make(num_blocks))
    samples = [turn_over(pool, prompts_for(num_blocks, seed)[:MOST_PROMPTS]) for seed in range(2, ROUNDS + 3)][1:]
    pool.check()
    size = size_name(num_blocks)
    yield figure(f"{name}: allocate + publish, evicting another", size, [taken for taken, _ in samples], "ns")
    yield figure(f"{name}: free a block", size, [freed for _, freed in samples], "ns")


def main() -> None:
    """Print a row for each policy."""
    print(f"blockyard {blockyard.__version__}, {blockyard.build_name()}")
    rows: dict[str, Maker | None] = {"lru": None, **MAKERS, "plain Python": LastIn}
    for num_blocks in (10_000, 100_000):
        for name, make in rows.items():
            for row in policy_figures(name, make, num_blocks):
                print(f"{row.name:<58} {row.size:>6} {row.value:>8.1f} {row.unit}  {row.spread}", flush=True)


if __name__ == "__main__":
    main()
