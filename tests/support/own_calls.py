"""Managers of ten kinds in the middle of their work, and every public call that does something, with good arguments.

Tests that interrupt calls, call from inside of calls, or give them hostile arguments take these in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import blockyard
from blockyard import BlockPool, CacheConfig, CacheSalt, KVCacheManager, LayerGroup, LoRA, Span
from blockyard.policies import Guarded

from .own_policies import MRU
from .twin import count_handles_from_the_start

BLOCK_SIZE = 4
NUM_BLOCKS = 24
GROUPS = (LayerGroup(4), LayerGroup(4, 6))

#: What each kind of manager has beside the plain settings.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": GROUPS, "num_blocks": 44},
    "cpu": {"num_cpu_blocks": 30, "keep_evicted": True},
    "partial hits": {"partial_hits": True},
    "retention": {"retention_blocks": 10},
    "own policy": {"eviction_policy": MRU},
    "hints": {"eviction_policy": "strict:lfu", "max_sessions": 6},
    "guard": {"eviction_policy": lambda num_blocks: Guarded(MRU(num_blocks), strict=True)},
    "keys": {},
    "observed": {"history_size": 6, "track_misses": True, "residency_sample": 1},
    "in flight": {"max_steps_in_flight": 4, "num_blocks": 30},
}
KEYS = (LoRA("adapter"), CacheSalt("tenant"), Span("image", 1, 3))


def tokens(number: int, count: int) -> list[int]:
    """Prompts of different numbers share no block."""
    return [100 * number + position for position in range(count)]


class Site:
    """A manager with a sequence in each state, leases, blocks that are cached and idle, and few empty ones."""

    def __init__(self, kind: str) -> None:
        count_handles_from_the_start(blockyard)
        self.kind = kind
        settings = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 10, "max_model_len": 48, "hash_seed": 5, **KINDS[kind]}
        settings["enable_kv_cache_events"] = True
        self.cache = KVCacheManager(CacheConfig(block_size=BLOCK_SIZE, watermark=0.0, **settings))
        self.pool = self.cache.pool
        self.keys: tuple[Any, ...] = KEYS if kind == "keys" else ()
        self._begin()
        options: dict[str, Any] = {"retention_blocks": 4, "residency_sample": 2, "enable_kv_cache_events": True}
        self.alone = BlockPool(12, BLOCK_SIZE, hash_seed=5, **options)
        self.alone_lease = self.alone.get_new_blocks(3, "alone")
        self.alone.cache_full_blocks(self.alone_lease, tokens(1, 12))
        self.alone.extend(self.alone_lease, 1)
        self.alone_idle = self.alone.get_new_blocks(2, "idle")
        self.alone.cache_next_blocks(self.alone_idle, tokens(2, 8))
        self.alone.free_blocks(self.alone_idle)
        self.alone_found = self.alone.find_cached_blocks(tokens(2, 8))

    def _begin(self) -> None:
        cache = self.cache
        idle = self.computed(tokens(1, 14), "idle")
        self.done = self.computed(tokens(2, 9), "done")
        self.decoding = self.computed(tokens(3, 6), "decoding", [7])
        if cache.config.max_steps_in_flight > 1:
            cache.free(self.computed(tokens(10, 9), "landed", ends=False))
        self.reserved = cache.allocate(tokens(4, 9), "reserved", self.keys)
        #: The step in which it is, where steps have numbers.
        self.step = cache.reserve([self.reserved], 9).step or None
        self.waiting = cache.allocate(tokens(4, 10), "waiting", self.keys)
        self.swapped = self.computed(tokens(5, 6), "swapped")
        if cache.config.num_cpu_blocks:
            cache.swap_out([self.swapped])
        cache.free(idle)
        if self.kind == "hints":
            cache.hint("idle", back_in=7.0)
        self.lease = self.pool.get_new_blocks(2, "a lease")
        self.hit = self.cache.hold_cached(tokens(3, 6), self.keys, "a hit")

    def computed(self, prompt: list[int], holder: str, next_tokens: list[int] | None = None, ends: bool = True) -> int:
        seq = self.cache.allocate(prompt, holder, self.keys, session=holder if self.kind == "hints" else None)
        missing = self.cache.num_tokens(seq) - self.cache.num_computed_tokens(seq)
        step = self.cache.reserve([seq], missing).step or None
        self.cache.commit([seq], missing, next_tokens, step)
        if step is not None and ends and len(self.cache.steps_in_flight) == 1:
            self.cache.end_step(step)
        return seq

    def check(self) -> None:
        self.cache.check()
        self.alone.check()


@dataclass(frozen=True)
class Call:
    """A call by the name that `ConcurrentCall` says, on a site whose arguments are made already."""

    name: str
    make: Callable[[Site], Callable[[], Any]]


def _manager_calls() -> list[Call]:
    """Of `KVCacheManager`; arguments stand in the outer function, so that the inner one is nothing but the call."""
    return [
        Call("can_allocate", lambda s: lambda: s.cache.can_allocate(tokens(1, 14), s.keys)),
        Call("hold_cached", lambda s: lambda: s.cache.hold_cached(tokens(1, 14), s.keys, "new")),
        Call("allocate", lambda s: lambda: s.cache.allocate(tokens(1, 14), "new", s.keys)),
        Call("allocate", lambda s: lambda: s.cache.allocate(tokens(9, 22), "new", s.keys, 2)),
        Call("allocate", lambda s: lambda: s.cache.allocate([*tokens(1, 6), 5, 5], "new", s.keys, resumed=True)),
        Call("allocate", lambda s: lambda: s.cache.allocate(tokens(9, 22), "new", s.keys, session="idle")),
        Call("try_allocate", lambda s: lambda: s.cache.try_allocate(tokens(1, 14), "new", s.keys)),
        Call("can_allocate_batch", lambda s: lambda: s.cache.can_allocate_batch([tokens(1, 9), tokens(8, 5)], s.keys)),
        Call("allocate_batch", lambda s: lambda: s.cache.allocate_batch([tokens(1, 9), tokens(8, 5)], (), s.keys)),
        Call(
            "allocate_batch",
            lambda s: lambda: s.cache.allocate_batch([tokens(8, 9), tokens(8, 11)], ("a", "b"), s.keys),
        ),
        Call("reserve", lambda s: lambda: s.cache.reserve([s.reserved, s.waiting, s.decoding], [9, 2, 6])),
        Call("reserve", lambda s: lambda: s.cache.reserve(s.decoding, 40)),
        Call("reserve", lambda s: lambda: s.cache.reserve([s.reserved, s.decoding])),
        Call("commit", lambda s: lambda: s.cache.commit([s.reserved], [9], [[3]], s.step)),
        Call("commit", lambda s: lambda: s.cache.commit([s.reserved], 4, None, s.step)),
        Call("end_step", lambda s: lambda: s.cache.end_step(s.cache.steps_in_flight.start)),
        Call("can_append", lambda s: lambda: s.cache.can_append([s.decoding, s.waiting], 5)),
        Call("append", lambda s: lambda: s.cache.append([s.done], [5])),
        Call("fork", lambda s: lambda: s.cache.fork(s.decoding, 2)),
        Call("regroup", lambda s: lambda: s.cache.regroup([s.decoding, s.done], [0, 0, 0])),
        Call("truncate", lambda s: lambda: s.cache.truncate(s.done, 6)),
        Call("free", lambda s: lambda: s.cache.free([s.done, s.reserved])),
        Call("free", lambda s: lambda: s.cache.free(s.decoding)),
        Call("reset_prefix_cache", lambda s: lambda: s.cache.reset_prefix_cache()),
        Call("swap_out", lambda s: lambda: s.cache.swap_out([s.done, s.decoding])),
        Call("swap_in", lambda s: lambda: s.cache.swap_in([s.swapped])),
        Call("can_swap_out", lambda s: lambda: s.cache.can_swap_out([s.done, s.decoding])),
        Call("can_swap_in", lambda s: lambda: s.cache.can_swap_in(s.swapped)),
        Call("resize", lambda s: lambda: s.cache.resize(64)),
        Call("resize", lambda s: lambda: s.cache.resize(9)),
        Call("set_eviction_policy", lambda s: lambda: s.cache.set_eviction_policy("arc")),
        Call("set_eviction_policy", lambda s: lambda: s.cache.set_eviction_policy(MRU)),
        Call("retain", lambda s: lambda: s.cache.retain(tokens(1, 12), 2, 5.0, s.keys)),
        Call("num_retained_of", lambda s: lambda: s.cache.num_retained_of(tokens(1, 12), s.keys)),
        Call("advance_time", lambda s: lambda: s.cache.advance_time(9.5)),
        Call("hint", lambda s: lambda: s.cache.hint("idle", over=True)),
        Call("hint", lambda s: lambda: s.cache.hint(s.decoding, back_in=5.5)),
        Call("hint", lambda s: lambda: s.cache.hint(s.done, back_at=9)),
        Call("num_cached_tokens", lambda s: lambda: s.cache.num_cached_tokens(tokens(1, 14), s.keys)),
        Call("num_tokens", lambda s: lambda: s.cache.num_tokens([s.decoding, s.done])),
        Call("num_computed_tokens", lambda s: lambda: s.cache.num_computed_tokens([s.decoding, s.done])),
        Call("token_ids", lambda s: lambda: s.cache.token_ids(s.decoding)),
        Call("block_ids", lambda s: lambda: s.cache.block_ids(s.decoding)),
        Call("num_owned_blocks", lambda s: lambda: s.cache.num_owned_blocks([s.decoding, s.done])),
        Call("running", lambda s: lambda: s.cache.running()),
        Call("block", lambda s: lambda: s.cache.block(3)),
        Call("history", lambda s: lambda: s.cache.history()),
        Call("take_events", lambda s: lambda: s.cache.take_events()),
        Call("leak_report", lambda s: lambda: s.cache.leak_report()),
        Call("check", lambda s: lambda: s.cache.check()),
    ]


def _pool_calls() -> list[Call]:
    """Of the manager's pool."""
    return [
        Call("free_block_ids", lambda s: lambda: s.pool.free_block_ids()),
        Call("block", lambda s: lambda: s.pool.block(2)),
        Call("get_new_blocks", lambda s: lambda: s.pool.get_new_blocks(4, "new")),
        Call("extend", lambda s: lambda: s.pool.extend(s.lease, 3)),
        Call("touch", lambda s: lambda: s.pool.touch(s.lease, "again")),
        Call("touch", lambda s: lambda: s.pool.touch(s.lease, "again", 1, 2)),
        Call("copy_on_write", lambda s: lambda: s.pool.copy_on_write(s.lease, 0)),
        Call("history", lambda s: lambda: s.pool.history()),
        Call("free_blocks", lambda s: lambda: s.pool.free_blocks(s.lease)),
        Call("release", lambda s: lambda: s.pool.release(s.lease, 0, 1)),
        Call("split", lambda s: lambda: s.pool.split(s.lease, 1, "tail")),
        Call("check", lambda s: lambda: s.pool.check()),
    ]


def _lone_pool_calls() -> list[Call]:
    """Of a pool without a manager."""
    return [
        Call("get_cached_blocks", lambda s: lambda: s.alone.get_cached_blocks(tokens(2, 14), (), "new")),
        Call("get_cached_block", lambda s: lambda: s.alone.get_cached_block(tokens(1, 12), (), "new")),
        Call("num_cached_tokens", lambda s: lambda: s.alone.num_cached_tokens(tokens(1, 12))),
        Call("cached_block_ids", lambda s: lambda: s.alone.cached_block_ids(tokens(1, 12))),
        Call("find_cached_blocks", lambda s: lambda: s.alone.find_cached_blocks(tokens(1, 14))),
        Call("resize", lambda s: lambda: s.alone.resize(30)),
        Call("resize", lambda s: lambda: s.alone.resize(3)),
        Call("set_eviction_policy", lambda s: lambda: s.alone.set_eviction_policy("s3fifo")),
        Call("reset", lambda s: lambda: s.alone.reset()),
        Call("reset_prefix_cache", lambda s: lambda: s.alone.reset_prefix_cache()),
        Call("extend", lambda s: lambda: s.alone.extend(s.alone_lease, 6)),
        Call("hold", lambda s: lambda: s.alone.hold(s.alone_found, "new", extend_by=3)),
        Call("cache_next_blocks", lambda s: lambda: s.alone.cache_next_blocks(s.alone_lease, tokens(1, 16)[12:])),
        Call("release", lambda s: lambda: s.alone.release(s.alone_lease, 1, 4)),
        Call("split", lambda s: lambda: s.alone.split(s.alone_lease, 2, "tail")),
        Call("uncache", lambda s: lambda: s.alone.uncache([5, 2])),
        Call("adopt", lambda s: lambda: s.alone.adopt([6, 8], "new")),
        Call("evict", lambda s: lambda: s.alone.evict(1)),
        Call("retain", lambda s: lambda: s.alone.retain(tokens(1, 12), 2, 5.0)),
        Call("advance_time", lambda s: lambda: s.alone.advance_time(9.5)),
        Call("take_events", lambda s: lambda: s.alone.take_events()),
        Call("residency", lambda s: lambda: s.alone.residency()),
        Call("cache_full_blocks", lambda s: lambda: s.alone.cache_full_blocks(s.alone_lease, tokens(1, 12), 3)),
    ]


MANAGER_CALLS = _manager_calls()
POOL_CALLS = _pool_calls()
LONE_POOL_CALLS = _lone_pool_calls()
ALL_CALLS = MANAGER_CALLS + POOL_CALLS + LONE_POOL_CALLS
FREES = ("free", "free_blocks")

#: One number each (and `leases`): these may be asked at any time, also while a call runs.
QUESTIONS: dict[str, Callable[[Site], Any]] = {
    "num_tokens": lambda s: s.cache.num_tokens(s.done),
    "num_computed_tokens": lambda s: s.cache.num_computed_tokens(s.done),
    "is_swapped_out": lambda s: s.cache.is_swapped_out(s.done),
    "block_table": lambda s: s.cache.block_table.shape,
    "group_table": lambda s: s.cache.group_table(0).shape,
    "cpu_pool": lambda s: type(s.cache.cpu_pool).__name__,
    "generation": lambda s: s.cache.generation,
    "num_free_blocks": lambda s: s.cache.num_free_blocks,
    "num_used_blocks": lambda s: s.cache.num_used_blocks,
    "num_cached_blocks": lambda s: s.cache.num_cached_blocks,
    "usage": lambda s: s.cache.usage,
    "num_seqs": lambda s: s.cache.num_seqs,
    "num_sessions": lambda s: s.cache.num_sessions,
    "steps_in_flight": lambda s: s.cache.steps_in_flight,
    "num_fenced_blocks": lambda s: s.cache.num_fenced_blocks,
    "stats": lambda s: s.cache.stats(),
    "pool.num_blocks": lambda s: s.pool.num_blocks,
    "pool.block_size": lambda s: s.pool.block_size,
    "pool.enable_prefix_caching": lambda s: s.pool.enable_prefix_caching,
    "pool.num_usable_blocks": lambda s: s.pool.num_usable_blocks,
    "pool.num_free_blocks": lambda s: s.pool.num_free_blocks,
    "pool.num_used_blocks": lambda s: s.pool.num_used_blocks,
    "pool.num_cached_blocks": lambda s: s.pool.num_cached_blocks,
    "pool.num_retiring_blocks": lambda s: s.pool.num_retiring_blocks,
    "pool.num_evicted_blocks": lambda s: s.pool.num_evicted_blocks,
    "pool.num_allocated_blocks": lambda s: s.pool.num_allocated_blocks,
    "pool.num_freed_blocks": lambda s: s.pool.num_freed_blocks,
    "pool.peak_used_blocks": lambda s: s.pool.peak_used_blocks,
    "pool.usage": lambda s: s.pool.usage,
    "pool.ref_counts": lambda s: len(s.pool.ref_counts()),
    "pool.cached_mask": lambda s: len(s.pool.cached_mask()),
    "pool.states": lambda s: len(s.pool.states()),
    "pool.version": lambda s: s.pool.version,
    "pool.free_block_after": lambda s: s.pool.free_block_after(0),
    "pool.free_block_before": lambda s: s.pool.free_block_before(0),
    "pool in words": lambda s: repr(s.pool),
    "ended_retentions": lambda s: s.cache.ended_retentions,
    "alone.num_retained_blocks": lambda s: s.alone.num_retained_blocks,
    "alone.ended_retentions": lambda s: s.alone.ended_retentions,
    "pool.leases": lambda s: len(s.pool.leases()),
}
