"""Caches at work for the page's tests: random programs over few prompts, and what each block is, one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from blockyard import KVCacheManager, LayerGroup, SeqStatus
from blockyard.config import cache_config
from blockyard.errors import BlockyardError

#: Kinds of caches by what they add: a pool that prompts join in, windows, a CPU pool.
KINDS = ("plain", "groups", "tier")


def live_cache(kind: str) -> KVCacheManager:
    """A small cache of a kind."""
    more: dict[str, object] = {}
    if kind == "groups":
        more = {"groups": (LayerGroup(4), LayerGroup(4, sliding_window=8))}
    if kind == "tier":
        more = {"num_cpu_blocks": 12}
    return KVCacheManager(cache_config(num_blocks=40, block_size=4, max_num_seqs=8, max_model_len=64, **more))  # type: ignore[arg-type]


def at_work(cache: KVCacheManager, seed: int, num_steps: int) -> Iterator[None]:
    """Let a random program run on a cache; yields after each of its steps."""
    rng = random.Random(seed)
    for _ in range(num_steps):
        running = list(cache.running())
        if rng.random() < 0.6:
            start = rng.randrange(3) * 100
            cache.try_allocate(list(range(start, start + rng.randint(1, 30))), holder=f"request {rng.randrange(99)}")
        if running and rng.random() < 0.2:
            cache.free([rng.choice(running)])
        if rng.random() < 0.1:
            try_to(cache.fork, rng.choice(running or [0]))
        if cache.cpu_pool is not None and rng.random() < 0.2:
            try_to(cache.swap_out, rng.choice(running or [0]))
            try_to(cache.swap_in, [seq for seq in cache.running() if cache.is_swapped_out(seq)][:1])
        _step(cache, rng)
        yield


def _step(cache: KVCacheManager, rng: random.Random) -> None:
    """Compute some tokens of some sequences; each that has none left gets one more."""
    seqs = [seq for seq in cache.running() if not cache.is_swapped_out(seq) and rng.random() < 0.8]
    seqs = [seq for seq in seqs if cache.num_tokens(seq) < 60]
    left = [cache.num_tokens(seq) - cache.num_computed_tokens(seq) for seq in seqs]
    seqs = [seq for seq, number in zip(seqs, left, strict=True) if number > 0]
    counts = [rng.randint(1, number) for number in left if number > 0]
    plan = cache.reserve(seqs, counts)
    done = [
        bool(fits) and count == number
        for fits, count, number in zip(
            plan.status == SeqStatus.SCHEDULED, counts, [n for n in left if n > 0], strict=True
        )
    ]
    cache.commit(seqs, plan.num_scheduled, [rng.randrange(1000) if each else -1 for each in done])


def try_to(call: Callable[[Any], object], argument: object) -> None:
    """Make a call that a cache may refuse."""
    with suppress(BlockyardError):
        call(argument)


def state_of(cache: KVCacheManager, block_id: int) -> str:
    """What one block is, from `cache.block` alone."""
    block = cache.block(block_id)
    if block.ref_cnt == 0:
        return "idle" if block.is_cached else "free"
    if not block.is_cached:
        return "private"
    return "shared" if block.is_computed else "pending"
