"""`python -m benchmarks.layouts`: what a block costs where the blocks of a prompt lie in order, in runs, or anywhere.

Blocks of a prompt are taken together and freed tail first, so in a pool that serves they mostly are neighbours by id.
Least of several rounds, nanoseconds a block; in brackets the same loops in C (`benchmarks/limit`). "attacked" is what
an attacker could send to make guesses fail: beside each block lies one of the same parent that differs in its
last token alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from blockyard import BlockLease, BlockPool

from .core import filled_pool
from .limit import limit_rows
from .measure import nanoseconds_an_item
from .workload import BLOCK_SIZE, PROMPT_BLOCKS, SIZES, prompts_for, size_name

#: Blocks that lie side by side; 0 for all of a prompt.
RUNS = (1, 2, 8, 32, 0)
#: A layout of which only lookups are timed.
ATTACKED = -1
#: Names of the C program's rows, and the layouts it knows.
FIGURES = ("lookup", "lookup + lease + release", "allocate + publish", "allocate + publish, evicting", "free")
LIMITS = {1: "shuffled", 0: "in-order"}
ROUNDS = 11
LOOKUPS = 100
PUBLISHED = 400


def least(prompts: list[np.ndarray], ask: Callable[[np.ndarray], object]) -> float:
    def work() -> int:
        for prompt in prompts:
            ask(prompt)
        return PROMPT_BLOCKS * len(prompts)

    return min(nanoseconds_an_item(work, ROUNDS))


def hold_and_release(pool: BlockPool, prompt: np.ndarray) -> None:
    pool.free_blocks(pool.get_cached_blocks(prompt))


def attacked_pool(size: int, prompts: list[np.ndarray]) -> BlockPool:
    """A pool in which the block after each one of a prompt, by id, is almost the prompt's next."""
    pool = BlockPool(size, BLOCK_SIZE)
    for prompt in prompts:
        lease = pool.get_new_blocks(0)
        for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
            pool.extend(lease, 1)
            pool.cache_full_blocks(lease, prompt[:end], num_cached_blocks=end // BLOCK_SIZE - 1)
            other = prompt[: end + BLOCK_SIZE].copy()
            other[-1] ^= 1
            beside = pool.get_cached_blocks(other)
            pool.extend(beside, 1)
            pool.cache_full_blocks(beside, other, num_cached_blocks=len(beside) - 1)
            pool.free_blocks(beside)
        pool.free_blocks(lease)
    return pool


def lookups(size: int, run: int) -> Iterator[float]:
    """The question alone, and with hold and release."""
    prompts = prompts_for(size, 1)
    if run == ATTACKED:
        prompts = prompts[: len(prompts) // 2]
    chosen = random.Random(2).choices(prompts, k=LOOKUPS)
    pool = attacked_pool(size, prompts) if run == ATTACKED else filled_pool(size, prompts, run)
    if any(pool.num_cached_tokens(prompt) != len(prompt) for prompt in chosen):
        raise AssertionError("a cached prompt was not found")
    yield least(chosen, pool.num_cached_tokens)
    yield least(chosen, partial(hold_and_release, pool))


def published(pool: BlockPool, prompts: list[np.ndarray]) -> tuple[float, float]:
    """Nanoseconds a block that it takes to allocate and publish all prompts, and then to free them."""
    leases: list[BlockLease] = []
    start = time.perf_counter_ns()
    for prompt in prompts:
        leases.append(pool.get_new_blocks(PROMPT_BLOCKS))
        pool.cache_full_blocks(leases[-1], prompt)
    middle = time.perf_counter_ns()
    for lease in leases:
        pool.free_blocks(lease)
    num_blocks = PROMPT_BLOCKS * len(prompts)
    return (middle - start) / num_blocks, (time.perf_counter_ns() - middle) / num_blocks


def lives(size: int, run: int) -> Iterator[float]:
    """Publishing into a pool that caches nothing, into one that is full, and freeing."""
    full, new = prompts_for(size, 3), prompts_for(size, 4)[:PUBLISHED]
    rounds = 3 if size > 100_000 else ROUNDS
    empty = [published(filled_pool(size, [], run), new) for _ in range(rounds)]
    evicting = [published(filled_pool(size, full, run), new) for _ in range(rounds)]
    yield min(spent for spent, _ in empty)
    yield min(spent for spent, _ in evicting)
    yield min(freed for _, freed in empty + evicting)


def main() -> None:
    """One line for each size and layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="blocks of the pools")
    parser.add_argument("--runs", type=int, nargs="+", default=RUNS, help="blocks side by side; 0 for all of a prompt")
    args = parser.parse_args()
    limits = {
        (run, row["size"], row["name"]): row["low"]
        for run in set(args.runs) & set(LIMITS)
        for row in limit_rows(tuple(args.sizes), LIMITS[run])
    }
    print(f"{'':<18}", " | ".join(FIGURES))
    for size in args.sizes:
        for run in [*args.runs, ATTACKED]:
            ours = dict(
                zip(FIGURES, [*lookups(size, run), *([] if run == ATTACKED else lives(size, run))], strict=False)
            )
            name = {1: "shuffled", 0: "in order", ATTACKED: "attacked"}.get(run, f"runs of {run}")
            cells = [
                f"{value:6.1f}" + (f" ({limits[run, size, row]:5.1f})" if run in LIMITS else "")
                for row, value in ours.items()
            ]
            print(f"{size_name(size):>5} {name:<12}", " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
