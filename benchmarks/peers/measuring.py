"""The rows of one peer, taken as benchmarks/core.py takes those of Blockyard: same prompts, same order, same rounds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..measure import nanoseconds_an_item
from ..workload import (
    BLOCK_SIZE,
    ORDER_FILE,
    PROMPT_BLOCKS,
    SIZES,
    TRACE_FILE,
    prompts_for,
    read_requests,
    sample,
)
from .peer import Peer
from .rows import (
    AGED,
    DECODE,
    EVICTING,
    FREE,
    LEAF,
    LEAF_SIZES,
    LEASE,
    LIFE,
    LOOK_UP_BUFFER,
    LOOK_UP_LIST,
    NUM_SEQS,
    PUBLISH,
    SHUFFLED,
    Measured,
)

#: At most; ours takes seven, but a peer may take a hundred times as long a round.
ROUNDS = 3
#: As in benchmarks/core.py: enough that nothing is still in the caches from the round before.
PROMPTS_AT_MOST = 400
LOOK_UPS = 200
#: Tokens of a hit that a peer may leave for the engine to compute again: vLLM never hits the last block.
LEFT_OVER = BLOCK_SIZE
DECODE_TOKENS = 512
TRACE_REQUESTS = 1500
#: A peer that takes longer than this for the trace is stopped; that size and larger ones stay empty.
TRACE_SECONDS = 20
#: A row that takes longer than this is taken from fewer prompts or rounds, at least one.
ROW_SECONDS = 3
#: A peer whose hold takes longer than this for one block (its cost grows with the pool) is not asked at larger sizes.
SLOWEST_HOLD_NS = 100_000


Orders = dict[str, npt.NDArray[np.int32]]


def orders_of(folder: Path, size: int) -> Orders:
    """By layout, the ids of the free blocks in the order in which they are used."""
    shuffled = np.random.default_rng(0).permutation(np.arange(1, size, dtype=np.int32))
    return {AGED: np.load(folder / ORDER_FILE.format(size)), SHUFFLED: shuffled}


def peer_rows(peer: Peer, folder: Path) -> Iterator[Measured]:
    """Every row that the peer offers."""
    slowest_hold = 0.0
    for size in SIZES:
        holds = slowest_hold < SLOWEST_HOLD_NS
        for layout, order in orders_of(folder, size).items():
            for row in layout_rows(peer, size, order, holds):
                yield replace(row, layout=layout)
                if row.name == LEASE:
                    slowest_hold = max(slowest_hold, row.value)
    for size in LEAF_SIZES:
        yield from leaf_rows(peer, size)
    yield from decode_rows(peer)
    trace = str(folder / TRACE_FILE)
    for size in SIZES:
        row = trace_row(peer, size, trace)
        if row is None:
            return
        yield row


def layout_rows(peer: Peer, size: int, order: npt.NDArray[np.int32], holds: bool) -> Iterator[Measured]:
    """The rows whose time depends on where the blocks of a prompt lie."""
    yield look_up_row(peer, size, order)
    if holds:
        yield hold_row(peer, size)
    yield from life_rows(peer, size, order)


def open_pool(peer: Peer, size: int, order: npt.NDArray[np.int32] | None = None) -> None:
    """A new pool, out of the garbage collector's sight, as engines keep it."""
    gc.unfreeze()
    peer.open(size, order)
    gc.collect()
    gc.freeze()


def fill(peer: Peer, prompts: list[np.ndarray]) -> None:
    """Cache all prompts, and leave them idle."""
    holdings = [peer.admit(peer.request(peer.prompt(prompt))) for prompt in prompts]
    for holding in holdings:
        peer.free(holding)


def look_up_row(peer: Peer, size: int, order: npt.NDArray[np.int32]) -> Measured:
    """Prompts of 750 cached blocks, in random order. Leaves the pool as it is for `hold_row`."""
    prompts = prompts_for(size, 1)
    open_pool(peer, size, order)
    fill(peer, prompts)
    return _hit_row(LOOK_UP_LIST if peer.prompt_form == "a list" else LOOK_UP_BUFFER, peer, size, peer.look_up)


def hold_row(peer: Peer, size: int) -> Measured:
    """The same, and every hit block is held and released."""
    return _hit_row(LEASE, peer, size, peer.hold_and_release)


def _hit_row(name: str, peer: Peer, size: int, ask: Callable[[Any], int]) -> Measured:
    prompts = [peer.prompt(prompt) for prompt in sample(prompts_for(size, 1), LOOK_UPS, 2)]

    def work() -> int:
        for prompt in prompts:
            if ask(prompt) < PROMPT_BLOCKS * BLOCK_SIZE - LEFT_OVER:
                raise AssertionError(f"{name}: a cached prompt was not found")
        return PROMPT_BLOCKS * len(prompts)

    start = time.perf_counter()
    ask(prompts[0])
    affordable = ROW_SECONDS / (ROUNDS + 1) / (time.perf_counter() - start)
    prompts = prompts[: max(1, int(affordable))]
    return Measured(name, size, min(nanoseconds_an_item(work, ROUNDS)))


def life_rows(peer: Peer, size: int, order: npt.NDArray[np.int32]) -> Iterator[Measured]:
    """Prompts into an empty pool, then into one where each block evicts another; both times freed."""
    published, evicting, freed = [], [], []
    prompts, others = prompts_for(size, 3), prompts_for(size, 4)[:PROMPTS_AT_MOST]
    start = time.perf_counter()
    while len(published) < ROUNDS and time.perf_counter() - start < ROW_SECONDS:
        open_pool(peer, size, order)
        for times, work in ((published, prompts[:PROMPTS_AT_MOST]), (evicting, others)):
            if times is evicting:
                fill(peer, prompts[PROMPTS_AT_MOST:])
                fill(peer, prompts_for(size, 5)[:PROMPTS_AT_MOST])
            publish_ns, free_ns = _timed_life(peer, work)
            times.append(publish_ns)
            freed.append(free_ns)
    for name, times in ((PUBLISH, published), (EVICTING, evicting), (FREE, freed)):
        yield Measured(name, size, min(times))


def _timed_life(peer: Peer, prompts: list[np.ndarray]) -> tuple[float, float]:
    requests = [peer.request(peer.prompt(prompt)) for prompt in prompts]
    start = time.perf_counter_ns()
    holdings = [peer.admit(request) for request in requests]
    middle = time.perf_counter_ns()
    for holding in holdings:
        peer.free(holding)
    end = time.perf_counter_ns()
    num_blocks = PROMPT_BLOCKS * len(prompts)
    return (middle - start) / num_blocks, (end - middle) / num_blocks


def one_block_prompts(count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 128_000, BLOCK_SIZE, dtype=np.int32) for _ in range(count)]


def leaf_rows(peer: Peer, size: int) -> Iterator[Measured]:
    """A pool full of prompts of one block each: every cached block is a leaf that may be evicted."""
    open_pool(peer, size)
    for prompt in one_block_prompts(size - 1, 6):
        peer.free(peer.admit(peer.request(peer.prompt(prompt))))
    times = []
    for seed in range(10, 10 + ROUNDS):
        requests = [peer.request(peer.prompt(prompt)) for prompt in one_block_prompts(20, seed)]
        start = time.perf_counter_ns()
        for request in requests:
            peer.free(peer.admit(request))
        times.append((time.perf_counter_ns() - start) / len(requests))
    yield Measured(LEAF, size, min(times))


def decode_rows(peer: Peer) -> Iterator[Measured]:
    """Steps of 1,024 sequences that fill a block in the same step; the mean over 16 steps, the least of five."""
    open_pool(peer, 2 * NUM_SEQS * DECODE_TOKENS // BLOCK_SIZE)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 128_000, DECODE_TOKENS - BLOCK_SIZE, dtype=np.int32) for _ in range(NUM_SEQS)]
    peer.open_batch([peer.prompt(prompt) for prompt in prompts])
    sampled = rng.integers(0, 128_000, NUM_SEQS).tolist()
    times = []
    for _ in range(5):
        start = time.perf_counter_ns()
        for _ in range(16):
            peer.decode_step(sampled)
        times.append((time.perf_counter_ns() - start) / 16)
    yield Measured(DECODE, NUM_SEQS, min(times))


def trace_row(peer: Peer, size: int, trace: str) -> Measured | None:
    """The first requests of the trace, one after another, in processor time; making the prompts does not count."""
    open_pool(peer, size)
    spent = hit_tokens = 0
    for request in read_requests(trace, stop=TRACE_REQUESTS):
        form, output_form = peer.prompt(request.prompt()), request.output().tolist()
        start = time.process_time_ns()
        hit_tokens += peer.serve(form, output_form)
        spent += time.process_time_ns() - start
        if spent > TRACE_SECONDS * 10**9:
            return None
    return Measured(LIFE, size, spent, hit_tokens=hit_tokens)
