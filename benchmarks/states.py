"""`python -m benchmarks.states [N ...]`: what states add to decode steps and to hits, in turns with a plain cache, and
what a prompt costs that evicts some of N states.

Seconds are those of this process, so that others on the machine count only by what they do to its caches.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from blockyard import CacheConfig, KVCacheManager, LayerGroup, StateConfig, StateSpec
from blockyard.steps import StepBuffers

from .measure import HEADERS, Figure, print_plain
from .workload import BLOCK_SIZE

NUM_SEQS, NUM_TOKENS, MAX_MODEL_LEN = 1024, 512, 8192
#: Keys and values of a token, and blocks that a state takes: one, a small model's, Qwen3-Next's.
TOKEN_BYTES = 24_576
STATE_BLOCKS = (1, 25, 197)
#: Rounds that take turns; steps and requests of a round.
ROUNDS, NUM_STEPS, NUM_REQUESTS = 21, 16, 200
#: States that a full pool holds, prompts that fill it at a time, and prompts of a round that each evict a state.
NUM_STATES = (1_000, 10_000, 100_000, 1_000_000)
BATCH, NUM_PROMPTS = 250, 200
ATTENTION = LayerGroup(BLOCK_SIZE, token_bytes=TOKEN_BYTES)
#: One group of attention is a plain cache; with another, blocks are found by group, as they are beside states.
PLAIN = (ATTENTION,)
TWO_GROUPS = (ATTENTION, LayerGroup(BLOCK_SIZE, sliding_window=MAX_MODEL_LEN, token_bytes=TOKEN_BYTES))


def with_states(num_state_blocks: int) -> tuple[LayerGroup, ...]:
    """Attention, and a state of this many blocks."""
    size = num_state_blocks * BLOCK_SIZE * TOKEN_BYTES
    return (ATTENTION, StateSpec(state_bytes=size, checkpoint_every=BLOCK_SIZE))


def cache_of(groups: tuple[LayerGroup, ...], num_seqs: int, num_blocks: int, *places: str) -> KVCacheManager:
    """Return a cache with these checkpoint rules, if it has states."""
    has_states = any(isinstance(group, StateSpec) for group in groups)
    return KVCacheManager(
        CacheConfig(
            num_blocks,
            max_num_seqs=num_seqs,
            max_model_len=MAX_MODEL_LEN,
            groups=groups,
            states=StateConfig(checkpoints=places) if has_states else StateConfig(),
        )
    )


def decode_steps(cache: KVCacheManager) -> Callable[[], float]:
    """Steps of sequences that decode together, their ends spread over the block: microseconds a step."""
    rng = np.random.default_rng(7)
    lengths = NUM_TOKENS - np.arange(NUM_SEQS) % BLOCK_SIZE
    seqs = np.array([cache.allocate(rng.integers(0, 128_000, length, dtype=np.int32)) for length in lengths])
    sampled, ones = rng.integers(0, 128_000, NUM_SEQS), np.ones(NUM_SEQS, np.int64)
    # One each: a set of buffers rewrites its whole table when another group fills it.
    buffers = [
        StepBuffers(np.zeros(NUM_SEQS, np.int64), np.zeros((NUM_SEQS, MAX_MODEL_LEN // BLOCK_SIZE), np.int32))
        for _ in range(2)
    ]
    while not _is_computed(cache, seqs, lengths):
        plan = cache.reserve(seqs)
        ends = np.where(plan.num_computed + plan.num_scheduled == lengths, sampled, -1)
        cache.commit(seqs, plan.num_scheduled, ends)

    def steps() -> float:
        start = time.process_time_ns()
        for _ in range(NUM_STEPS):
            plan = cache.reserve(seqs, ones)
            for number, group in enumerate(plan.groups):
                group.fill(buffers[number])
            cache.commit(seqs, ones, sampled)
        return (time.process_time_ns() - start) / NUM_STEPS / 1000

    return steps


def _is_computed(cache: KVCacheManager, seqs: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> bool:
    return bool((np.asarray(cache.num_computed_tokens(seqs)) == lengths).all())


def hits(cache: KVCacheManager) -> Callable[[], float]:
    """Allocate and free of a prompt whose first 2,032 of 2,040 tokens are cached: microseconds a request."""
    prompt = np.random.default_rng(8).integers(0, 128_000, 2040, dtype=np.int32)
    seq = cache.allocate(prompt)
    while cache.num_computed_tokens(seq) < len(prompt):
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
    cache.free(seq)
    if cache.num_cached_tokens(prompt) != 2032:
        raise AssertionError("the prompt is not cached")

    def requests() -> float:
        start = time.process_time_ns()
        for _ in range(NUM_REQUESTS):
            cache.free(cache.allocate(prompt))
        return (time.process_time_ns() - start) / NUM_REQUESTS / 1000

    return requests


def serve(cache: KVCacheManager, prompts: npt.NDArray[np.int32]) -> None:
    """Compute these prompts in one step, and free them."""
    seqs = np.array([cache.allocate(prompt) for prompt in prompts])
    cache.commit(seqs, cache.reserve(seqs).num_scheduled)
    cache.free(seqs)


def evictions(order: str, num_states: int) -> Figure:
    """Prompts one after another that each leave a state, in a pool that is full of states."""
    groups, draw = with_states(1), np.random.default_rng(9)
    config = CacheConfig(
        2 * num_states + 2,
        BLOCK_SIZE,
        max_num_seqs=BATCH,
        max_model_len=MAX_MODEL_LEN,
        groups=groups,
        states=StateConfig(checkpoints=("last",), order=order),
    )
    cache = KVCacheManager(config)
    for _ in range(num_states // BATCH + 2):
        serve(cache, draw.integers(0, 2**31, (BATCH, BLOCK_SIZE + 1), dtype=np.int32))
    samples = []
    for _ in range(ROUNDS + 1):
        prompts = draw.integers(0, 2**31, (NUM_PROMPTS, 1, BLOCK_SIZE + 1), dtype=np.int32)
        start = time.process_time_ns()
        for prompt in prompts:
            serve(cache, prompt)
        samples.append((time.process_time_ns() - start) / NUM_PROMPTS / 1000)
    spread = f"{min(samples[1:]):.3g} to {max(samples[1:]):.3g}"
    counts = f"{cache.stats().num_kept_states:,} written"
    return Figure(
        f"prompt that evicts a state, {order}",
        f"{num_states:,}",
        statistics.median(samples[1:]),
        "us",
        spread,
        layout="states",
        counts=counts,
    )


def in_turns(works: dict[str, Callable[[], float]]) -> dict[str, tuple[list[float], float]]:
    """Samples of each, and the median of their ratios to the first of the same round."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, work in works.items():
            found = work()
            if number:
                samples[name].append(found)
    first = next(iter(samples.values()))
    ratio = {
        name: statistics.median(one / base for one, base in zip(found, first, strict=True))
        for name, found in samples.items()
    }
    return {name: (found, ratio[name]) for name, found in samples.items()}


def state_figures() -> Iterator[Figure]:
    """Rows of both tables; the bar is on the ratio."""
    room = 100_000
    steps = {"plain": decode_steps(cache_of(PLAIN, NUM_SEQS, room))}
    steps["two groups"] = decode_steps(cache_of(TWO_GROUPS, NUM_SEQS, 2 * room))
    steps["states, none kept"] = decode_steps(cache_of(with_states(25), NUM_SEQS, room))
    for blocks in STATE_BLOCKS:
        cache = cache_of(with_states(blocks), NUM_SEQS, room + 3 * NUM_SEQS * blocks, "ends")
        steps[f"states of {blocks}, of outputs"] = decode_steps(cache)
    yield from _rows("decode step", f"{NUM_SEQS} seqs", steps)
    requests = {"plain": hits(cache_of(PLAIN, 8, 10_000)), "two groups": hits(cache_of(TWO_GROUPS, 8, 10_000))}
    for blocks in STATE_BLOCKS:
        requests[f"states of {blocks}"] = hits(cache_of(with_states(blocks), 8, 10_000, "ends"))
    yield from _rows("allocate + free, a hit", "2040 tok", requests)


def _rows(what: str, size: str, works: dict[str, Callable[[], float]]) -> Iterator[Figure]:
    for name, (samples, ratio) in in_turns(works).items():
        spread = f"{min(samples):.3g} to {max(samples):.3g}"
        counts = "" if name == "plain" else f" {ratio:.2f} of plain"
        bar = "" if name == "plain" else "≤ 1.3:"
        yield Figure(f"{what}, {name}", size, statistics.median(samples), "us", spread, bar, counts=counts)


if __name__ == "__main__":
    print(HEADERS[print_plain])
    sizes = tuple(map(int, sys.argv[1:]))
    for row in () if sizes else state_figures():
        print_plain(row)
    for order in ("index", "lru"):
        for num_states in sizes or NUM_STATES:
            print_plain(evictions(order, num_states))
