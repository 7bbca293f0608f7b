"""The pool with leases against its model: random calls, and after each the same answer and the same whole state."""

from __future__ import annotations

from collections import Counter

import blockyard
from blockyard_testing.seeds import run_seed

from ..support.pool_sides import WEIGHTS, PoolSide, PoolWalk
from ..support.reference_pool import PoolModel


def walk(seed: int, num_calls: int) -> PoolWalk:
    num_blocks, block_size = 1 + seed % 24, 1 + seed % 5
    retention_blocks = (0, 3, 9)[seed % 3]
    settings = {"hash_seed": seed, "enable_kv_cache_events": True, "retention_blocks": retention_blocks}
    pool = PoolSide(blockyard, num_blocks, block_size, **settings)
    sides = [pool, PoolModel(num_blocks, block_size, retention_blocks)]
    walked = PoolWalk(seed, num_blocks, block_size, sides)
    for number in range(num_calls):
        try:
            walked.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, call {number}: {error}") from error
    return walked


def test_pool_matches_the_model() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(run_seed(), run_seed() + 40):
        outcomes.update(walk(seed, 150).outcomes)
    missing = [name for name in WEIGHTS if outcomes[f"{name} done"] < 5]
    assert missing == [], outcomes
