"""The pool with leases against its model: random calls, and after each the same answer and the same whole state."""

from __future__ import annotations

from collections import Counter

import blockyard

from ..support.pool_sides import PoolSide
from ..support.pool_walk import WEIGHTS, PoolWalk
from ..support.reference_pool import PoolModel
from ..support.seeds import run_seed


def walk(seed: int, num_calls: int) -> PoolWalk:
    num_blocks, block_size = 2 + seed % 23, 1 + seed % 5
    sides = [PoolSide(blockyard, num_blocks, block_size, hash_seed=seed), PoolModel(num_blocks, block_size)]
    walked = PoolWalk(seed, num_blocks, block_size, sides)
    for number in range(num_calls):
        try:
            walked.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, call {number}: {error}") from error
    return walked


def test_the_pool_does_what_the_model_does() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(run_seed(), run_seed() + 40):
        outcomes.update(walk(seed, 150).outcomes)
    missing = [name for name in WEIGHTS if outcomes[f"{name} done"] < 10]
    assert missing == [], outcomes
