"""`python -m benchmarks.layouts`: a lookup where the blocks of a prompt lie in order, in runs, or anywhere.

Blocks of a prompt are taken together and freed tail first, so in a pool that serves they mostly are neighbours by id.
Least of eleven rounds, nanoseconds a block: the question alone, and with hold and release.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np

from blockyard import BlockPool

from .core import filled_pool
from .measure import nanoseconds_an_item
from .workload import PROMPT_BLOCKS, SIZES, prompts_for, size_name

#: Blocks that lie side by side; 0 for all of a prompt.
RUNS = (1, 8, 32, 0)
ROUNDS = 11
LOOKUPS = 100


def least(pool: BlockPool, prompts: list[np.ndarray], ask: Callable[[np.ndarray], object]) -> float:
    def work() -> int:
        for prompt in prompts:
            ask(prompt)
        return PROMPT_BLOCKS * len(prompts)

    return min(nanoseconds_an_item(work, ROUNDS))


def hold_and_release(pool: BlockPool, prompt: np.ndarray) -> None:
    pool.free_blocks(pool.get_cached_blocks(prompt))


def main() -> None:
    """One line for each size and layout."""
    for size in SIZES:
        prompts = prompts_for(size, 1)
        chosen = random.Random(2).choices(prompts, k=LOOKUPS)
        for run in RUNS:
            pool = filled_pool(size, prompts, run)
            if any(pool.num_cached_tokens(prompt) != len(prompt) for prompt in chosen):
                raise AssertionError("a cached prompt was not found")
            asked = least(pool, chosen, pool.num_cached_tokens)
            held = least(pool, chosen, partial(hold_and_release, pool))
            name = f"runs of {run}" if run else "in order"
            print(f"{size_name(size):>5} {name:<12} {asked:7.1f} ns  with hold and release {held:7.1f} ns", flush=True)


if __name__ == "__main__":
    main()
