"""The bars of the control plane, block by block, at 10k, 100k and 1M blocks of 16 tokens."""

from __future__ import annotations

import gc
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from blockyard import BlockLease, BlockPool, CacheConfig, KVCacheManager, StepPlan
from blockyard.steps import StepBuffers

from .aging import aged_pool
from .measure import Figure, figure, nanoseconds_an_item
from .service import neighbours
from .steps import step_figures
from .workload import BLOCK_SIZE, PROMPT_BLOCKS, ROUNDS, SIZES, Request, prompts_for, sample, size_name

#: Of one row, at most.
MOST_PROMPTS = 400


#: How the free blocks of a pool lay before the rows took them.
AGED, SHUFFLED = "aged", "shuffled"
#: Makes an empty pool whose free blocks lie in one way.
Layout = Callable[[int], BlockPool]


def shuffled_pool(num_blocks: int, run: int = 1) -> BlockPool:
    """An empty pool whose free blocks lie in runs of `run` neighbours, in any order; 0 leaves all ids in order."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    pieces: list[BlockLease] = []
    while run and pool.num_free_blocks:
        pieces.append(pool.get_new_blocks(min(run, pool.num_free_blocks)))
    random.Random(0).shuffle(pieces)
    for lease in pieces:
        pool.free_blocks(lease)
    return pool


def layouts_for(requests: list[Request]) -> dict[str, Layout]:
    """As these requests leave a pool, when what they cached is forgotten; and the worst that can be."""

    def served(num_blocks: int) -> BlockPool:
        pool, _ = aged_pool(num_blocks, requests)
        pool.reset()
        return pool

    return {AGED: served, SHUFFLED: shuffled_pool}


def fill(pool: BlockPool, prompts: list[np.ndarray]) -> None:
    """Cache all prompts one after another, then free them."""
    leases = []
    for prompt in prompts:
        leases.append(pool.get_new_blocks(PROMPT_BLOCKS))
        pool.cache_full_blocks(leases[-1], prompt)
    for lease in leases:
        pool.free_blocks(lease)


def filled_pool(num_blocks: int, prompts: list[np.ndarray], run: int = 1) -> BlockPool:
    """A pool that caches all prompts, in runs of `run` neighbours that lie in any order; 0 leaves all ids in order."""
    pool = shuffled_pool(num_blocks, run)
    fill(pool, prompts)
    return pool


#: Nanoseconds a block that a row may take, by layout and size.
BARS = {
    (AGED, "lookup"): ("≤ 12", "≤ 15", "≤ 30"),
    (AGED, "publish"): ("≤ 40", "≤ 45", "≤ 80"),
    (AGED, "evict"): ("≤ 50", "≤ 60", "≤ 120"),
    (AGED, "free"): ("≤ 3", "≤ 4", "≤ 6"),
    (SHUFFLED, "lookup"): ("≤ 25", "≤ 40", ""),
    (SHUFFLED, "publish"): ("≤ 60",) * 3,
    (SHUFFLED, "evict"): ("< 2x",) * 3,
    (SHUFFLED, "free"): ("≤ 10",) * 3,
}


def bar(layout: str, row: str, num_blocks: int) -> str:
    return BARS[layout, row][SIZES.index(num_blocks)] if num_blocks in SIZES else ""


def aging_figures(num_blocks: int, requests: list[Request]) -> Iterator[Figure]:
    """How much of a hit lies side by side: in the trace that aged the pool, and in the prompts of the rows."""
    pool, service = aged_pool(num_blocks, requests)
    prompts = prompts_for(num_blocks, 1)
    fill(pool, prompts)
    own = float(np.mean([neighbours(pool.get_cached_blocks(prompt).block_ids) for prompt in prompts]))
    name = size_name(num_blocks)
    for what, share in (("hits of the aging trace, side by side", service.adjacency), ("prompts, side by side", own)):
        yield Figure(what, name, 100 * share, "%", "", "", AGED)


def lookup_figures(num_blocks: int, layout: str, make_pool: Layout) -> Iterator[Figure]:
    """Find and verify every block of a cached prompt: the question alone, then with the lease, then from a list."""
    prompts = prompts_for(num_blocks, 1)
    pool = make_pool(num_blocks)
    fill(pool, prompts)
    chosen = sample(prompts, 200, 2)

    def ask() -> int:
        for prompt in chosen:
            if pool.num_cached_tokens(prompt) != len(prompt):
                raise AssertionError("a cached prompt was not found")
        return PROMPT_BLOCKS * len(chosen)

    def lease() -> int:
        for prompt in chosen:
            pool.free_blocks(pool.get_cached_blocks(prompt))
        return PROMPT_BLOCKS * len(chosen)

    lists = [prompt.tolist() for prompt in prompts[:40]]

    def ask_list() -> int:
        for prompt in lists:
            pool.num_cached_tokens(prompt)
        return PROMPT_BLOCKS * len(lists)

    rows: list[tuple[str, Callable[[], int], str]] = [
        ("lookup, a hit block, verified (int32)", ask, bar(layout, "lookup", num_blocks)),
        ("lookup, a hit block, verified (list)", ask_list, "≤ 160"),
        ("lookup + lease + release", lease, ""),
    ]
    for name, work, limit in rows:
        samples = nanoseconds_an_item(work, ROUNDS)
        yield figure(name, size_name(num_blocks), samples, "ns", limit, layout=layout)


def life_figures(num_blocks: int, layout: str, make_pool: Layout) -> Iterator[Figure]:
    """Allocate and publish prompts into an empty pool, free them; then the same where each block evicts another."""
    prompts = prompts_for(num_blocks, 3)[:MOST_PROMPTS]
    others = prompts_for(num_blocks, 4)[:MOST_PROMPTS]
    published, freed, evicted = [], [], []
    for _ in range(3 if num_blocks > 100_000 else ROUNDS):
        pool = make_pool(num_blocks)
        for figures, work in ((published, prompts), (evicted, others)):
            if figures is evicted and num_blocks == 1_000_000:
                for prompt in prompts_for(num_blocks, 5):
                    fill(pool, [prompt])
            publish_ns, free_ns = _timed_life(pool, work)
            figures.append(publish_ns)
            freed.append(free_ns)
    for row, name, samples in (
        ("publish", "allocate + publish a new block", published),
        ("evict", "allocate + publish, evicting another", evicted),
        ("free", "free a block", freed),
    ):
        limit = bar(layout, row, num_blocks)
        yield figure(name, size_name(num_blocks), samples, "ns", limit, layout=layout)


def _timed_life(pool: BlockPool, prompts: list[np.ndarray]) -> tuple[float, float]:
    leases = []
    start = time.perf_counter_ns()
    for prompt in prompts:
        lease = pool.get_new_blocks(PROMPT_BLOCKS)
        pool.cache_full_blocks(lease, prompt)
        leases.append(lease)
    middle = time.perf_counter_ns()
    for lease in leases:
        pool.free_blocks(lease)
    end = time.perf_counter_ns()
    num_blocks = PROMPT_BLOCKS * len(prompts)
    return (middle - start) / num_blocks, (end - middle) / num_blocks


def decode_figures(num_seqs: int = 1024, num_tokens: int = 512) -> Iterator[Figure]:
    """One decode step: reserve, slot mapping and table rows in the engine's buffers, commit with sampled tokens."""
    config = CacheConfig(num_blocks=2 * num_seqs * num_tokens // BLOCK_SIZE, max_num_seqs=num_seqs, max_model_len=8192)
    cache = KVCacheManager(config)
    rng = np.random.default_rng(7)
    seqs = np.array(
        [cache.allocate(rng.integers(0, 128_000, num_tokens - 10, dtype=np.int32)) for _ in range(num_seqs)]
    )
    cache.reserve(seqs, num_tokens - 10)
    sampled = rng.integers(0, 128_000, num_seqs)
    ones = np.ones(num_seqs, dtype=np.int64)
    cache.commit(seqs, num_tokens - 10, sampled)
    buffers = StepBuffers(np.zeros(num_seqs, np.int64), np.zeros((num_seqs, 8192 // BLOCK_SIZE), np.int32))
    reserve_ns, commit_ns, both_ns = [], [], []
    for _ in range(320):
        start = time.perf_counter_ns()
        plan = cache.reserve(seqs, ones)
        if plan.num_tokens != num_seqs:
            raise AssertionError("the plan is not of the whole batch")
        plan.fill(buffers)
        middle = time.perf_counter_ns()
        cache.commit(seqs, ones, sampled)
        end = time.perf_counter_ns()
        reserve_ns.append(middle - start)
        commit_ns.append(end - middle)
        both_ns.append(end - start)
    steps = [float(np.mean(both_ns[i : i + 16])) for i in range(0, 320, 16)]
    yield figure("decode step: reserve, slots, table rows", f"{num_seqs} seqs", reserve_ns, "us", "", 1e-3)
    yield figure("decode step: commit, publish", f"{num_seqs} seqs", commit_ns, "us", "", 1e-3)
    yield figure("decode step, whole (mean of 16 steps)", f"{num_seqs} seqs", steps, "us", "≤ 20", 1e-3)


def in_flight_figures(num_seqs: int = 1024, num_tokens: int = 100) -> Iterator[Figure]:
    """What steps with numbers cost: decode steps one after another, and with the next one planned meanwhile."""
    caches = {depth: _decoding(num_seqs, num_tokens, depth) for depth in (1, 2)}
    for size in (1, num_seqs):
        for depth, (cache, seqs) in caches.items():
            plans: deque[StepPlan] = deque()
            times = nanoseconds_an_item(_repeated(_decode(cache, seqs[:size], depth, plans), 16), ROUNDS)
            yield figure(f"decode step with {depth} in flight", f"{size} seqs", times, "us", "", 1e-3)
            for plan in plans:
                cache.commit(seqs[:size], plan.num_scheduled, np.full(size, 7), step=plan.step)
                cache.end_step(plan.step)


def _decode(
    cache: KVCacheManager, seqs: npt.NDArray[np.int64], depth: int, plans: deque[StepPlan]
) -> Callable[[], object]:
    """One more step is planned, and the oldest one in flight is over."""
    ones, sampled = np.ones(len(seqs), dtype=np.int64), np.full(len(seqs), 7)

    def step() -> None:
        plans.append(cache.reserve(seqs, ones))
        if len(plans) == depth:
            number = plans.popleft().step
            cache.commit(seqs, ones, sampled, step=number)
            if depth > 1:
                cache.end_step(number)

    return step


def _decoding(num_seqs: int, num_tokens: int, depth: int) -> tuple[KVCacheManager, npt.NDArray[np.int64]]:
    """A cache whose sequences have computed their prompts, and sampled a token."""
    config = CacheConfig(
        num_blocks=100 * num_seqs, max_num_seqs=num_seqs, max_model_len=16384, max_steps_in_flight=depth
    )
    cache = KVCacheManager(config)
    rng = np.random.default_rng(7)
    prompts = rng.integers(0, 128_000, (num_seqs, num_tokens), dtype=np.int32)
    seqs = np.array([cache.allocate(prompt) for prompt in prompts])
    plan = cache.reserve(seqs)
    cache.commit(seqs, plan.num_scheduled, np.full(num_seqs, 7), step=plan.step)
    if depth > 1:
        cache.end_step(plan.step)
    return cache, seqs


#: One call is timed in runs of this many.
CALLS = 2_000


def small_call_figures(num_tokens: int = 17) -> Iterator[Figure]:
    """What an engine pays that is driven request by request: single calls, warm, of a prompt of a block and a token."""
    cache = KVCacheManager(CacheConfig(num_blocks=2_000, block_size=BLOCK_SIZE, max_num_seqs=64))
    pool = BlockPool(2_000, BLOCK_SIZE)
    tokens = np.arange(num_tokens, dtype=np.int32)
    longer = np.arange(64, dtype=np.int32)
    seq = cache.allocate(tokens)
    cache.reserve(seq)
    cache.commit(seq, num_tokens, [7])

    def short_request() -> None:
        handle = cache.allocate(tokens)
        cache.reserve(handle, 1)
        cache.commit(handle, 1, 5)
        cache.free(handle)

    def step() -> None:
        cache.reserve(seq, 1)
        cache.commit(seq, 0)

    short_list, longer_list = tokens.tolist(), longer.tolist()
    calls: list[tuple[str, Callable[[], object], str]] = [
        ("can_allocate, int32 array", lambda: cache.can_allocate(tokens), ""),
        ("can_allocate, list", lambda: cache.can_allocate(short_list), ""),
        ("can_allocate, int32 array of 64", lambda: cache.can_allocate(longer), ""),
        ("can_allocate, list of 64", lambda: cache.can_allocate(longer_list), "≤ 1.25 of the array"),
        ("allocate + free", lambda: cache.free(cache.allocate(tokens)), ""),
        ("reserve + commit of one sequence", step, "≤ 1.2"),
        ("a whole short request", short_request, "≤ 4"),
        ("get_new_blocks(1) + free_blocks", lambda: pool.free_blocks(pool.get_new_blocks(1)), "≤ 1.5"),
    ]
    for name, call, bar in calls:
        yield figure(name, "1 call", nanoseconds_an_item(_repeated(call), ROUNDS), "us", bar, 1e-3)


def _repeated(call: Callable[[], object], num_calls: int = CALLS) -> Callable[[], int]:
    def work() -> int:
        for _ in range(num_calls):
            call()
        return num_calls

    return work


def creation_figures(num_blocks: int) -> Iterator[Figure]:
    """Time, memory and garbage-collected objects of a pool."""
    BlockPool(100, BLOCK_SIZE)
    gc.collect()
    objects = len(gc.get_objects())
    resident = _resident_bytes()
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    used = _resident_bytes() - resident
    created = len(gc.get_objects()) - objects
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        BlockPool(num_blocks, BLOCK_SIZE)
        times.append(time.perf_counter() - start)
    name = size_name(num_blocks)
    yield figure("create a pool", name, times, "ms", "≤ 100" if num_blocks == 1_000_000 else "", 1e3)
    if num_blocks == 1_000_000:
        yield Figure("memory of a pool", name, used / pool.num_blocks, "B/block", "", "≤ 130")
        yield Figure("objects for the garbage collector", name, created, "objects", "", "a handful")


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def all_figures(sizes: tuple[int, ...], requests: list[Request]) -> Iterator[Figure]:
    """Every figure; memory first, while the process is still small."""
    for size in sorted(sizes, reverse=True):
        yield from creation_figures(size)
    layouts = layouts_for(requests)
    for size in sizes:
        yield from aging_figures(size, requests)
    for figures in (lookup_figures, life_figures):
        for size in sizes:
            for layout, make_pool in layouts.items():
                yield from figures(size, layout, make_pool)
    yield from decode_figures()
    yield from step_figures()
    yield from small_call_figures()
    yield from in_flight_figures()
