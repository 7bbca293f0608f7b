"""Managers of several kinds in the middle of their work, and every public call that acts, with good arguments.

Tests that interrupt calls, call from inside of calls, or give them hostile arguments take these in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blockyard
from blockyard import BlockPool, CacheSalt, KVCacheManager, LayerGroup, LoRA, Span, StateHints, StateSpec
from blockyard.admission import AdmissionRule
from blockyard.config import cache_config
from blockyard.tenants import Tenant, TenantGroup
from blockyard_testing.own_policies import MRU
from blockyard_testing.public_calls import Arguments, Call
from blockyard_testing.twin import count_handles_from_the_start

BLOCK_SIZE = 4
NUM_BLOCKS = 24
GROUPS = (LayerGroup(4), LayerGroup(4, 6))
STATES = (LayerGroup(4, token_bytes=8), StateSpec(state_bytes=60, checkpoint_every=4))
TENANTS = (Tenant("first", min_blocks=2), TenantGroup("others", (Tenant("second", 2), Tenant("third", max_idle=3))))
#: Options that do not exclude one another.
EVERYTHING: dict[str, Any] = {
    "tenants": TENANTS,
    "max_sessions": 6,
    "retention_blocks": 10,
    "history_size": 6,
    "track_misses": True,
    "residency_sample": 1,
    "max_steps_in_flight": 4,
}

#: What each kind of manager has beside the plain settings.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": GROUPS, "num_blocks": 44},
    "cpu": {"num_cpu_blocks": 30, "keep_evicted": True},
    "partial hits": {"partial_hits": True},
    "retention": {"retention_blocks": 10},
    "own policy": {"eviction_policy": MRU},
    "hints": {"eviction_policy": "lfu", "max_sessions": 6},
    "keys": {},
    "observed": {"history_size": 6, "track_misses": True, "residency_sample": 1},
    "in flight": {"max_steps_in_flight": 4, "num_blocks": 30},
    "states": {"groups": STATES, "num_blocks": 60, "cut_chunks": False, "track_misses": True},
    "states and an own policy": {
        "groups": STATES,
        "num_blocks": 60,
        "cut_chunks": False,
        "eviction_policy": MRU,
    },
    "tenants": {"tenants": TENANTS, "num_blocks": 28},
    "everything": {**EVERYTHING, "partial_hits": True, "num_blocks": 36},
    "everything with a CPU pool": {
        **EVERYTHING,
        "groups": GROUPS,
        "num_cpu_blocks": 30,
        "keep_evicted": True,
        "eviction_policy": "lfu",
        "num_blocks": 60,
    },
    "everything with states": {
        **EVERYTHING,
        "groups": STATES,
        "num_cpu_blocks": 30,
        "keep_evicted": True,
        "num_blocks": 80,
        "cut_chunks": False,
    },
    "everything with an own policy": {**EVERYTHING, "eviction_policy": MRU, "num_blocks": 36},
}
#: More arguments of a waiting request.
ADDED: dict[str, Any] = {"session": "idle", "max_new_tokens": 9, "arrived": 2.5}
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
        self.cache = KVCacheManager(cache_config(block_size=BLOCK_SIZE, watermark=0.0, **settings))
        self.pool = self.cache.pool
        self.keys: tuple[Any, ...] = KEYS if kind == "keys" else ()
        if self.cache.config.tenants:
            self.keys = (CacheSalt("first"),)
        self._begin()
        options: dict[str, Any] = {"retention_blocks": 4, "residency_sample": 2, "enable_kv_cache_events": True}
        self.alone = BlockPool(12, BLOCK_SIZE, hash_seed=5, **options)
        self.alone_lease = self.alone.get_new_blocks(3, holder="alone")
        self.alone.cache_full_blocks(self.alone_lease, tokens(1, 12))
        self.alone.extend(self.alone_lease, 1)
        self.alone_idle = self.alone.get_new_blocks(2, holder="idle")
        self.alone.cache_next_blocks(self.alone_idle, tokens(2, 8), 0)
        self.alone.free_blocks(self.alone_idle)
        self.alone_found = self.alone.find_cached_blocks(tokens(2, 8))
        self.alone_queue = self.alone.waiting()
        self.alone_queue.add(tokens(1, 14))
        self.alone_ticket = self.alone_queue.add(tokens(2, 14))

    @property
    def has_sessions(self) -> bool:
        return self.kind == "hints" or self.kind.startswith("everything")

    def _begin(self) -> None:
        cache = self.cache
        idle = self.computed(tokens(1, 14), "idle")
        self.done = self.computed(tokens(2, 9), "done")
        self.decoding = self.computed(tokens(3, 6), "decoding", [7])
        if cache.config.max_steps_in_flight > 1:
            cache.free(self.computed(tokens(10, 9), "landed", ends=False))
        self.reserved = cache.allocate(tokens(4, 9), holder="reserved", extra_keys=self.keys)
        #: The step in which it is, where steps have numbers.
        self.step = cache.reserve([self.reserved], 9).step or None
        self.waiting = cache.allocate(tokens(4, 10), holder="waiting", extra_keys=self.keys)
        self.swapped = self.computed(tokens(5, 6), "swapped")
        if cache.config.cpu.num_blocks:
            cache.swap_out([self.swapped])
        cache.free(idle)
        if self.has_sessions:
            cache.hint("idle", over=True)
        self.lease = self.pool.get_new_blocks(2, holder="a lease")
        self.hit = self.cache.hold_cached(tokens(3, 6), extra_keys=self.keys, holder="a hit")
        self.queue = cache.waiting()
        self.rule = AdmissionRule(self.queue, "room", seconds=0.01)
        self.admitted = self.queue.add(tokens(3, 6), extra_keys=self.keys, session="idle")
        self.queue.admitted(self.admitted, 1.0)
        for prompt in (tokens(1, 14), tokens(4, 22), [*tokens(1, 6), 5, 5], tokens(11, 9)):
            self.ticket = self.queue.add(prompt, extra_keys=self.keys)

    def computed(self, prompt: list[int], holder: str, next_tokens: list[int] | None = None, ends: bool = True) -> int:
        seq = self.cache.allocate(
            prompt, holder=holder, extra_keys=self.keys, session=holder if self.has_sessions else None
        )
        missing = self.cache.num_tokens(seq) - self.cache.num_computed_tokens(seq)
        step = self.cache.reserve([seq], missing).step or None
        self.cache.commit([seq], missing, next_tokens, step=step)
        if step is not None and ends and len(self.cache.steps_in_flight) == 1:
            self.cache.end_step(step)
        return seq

    def check(self) -> None:
        self.cache.check()
        self.alone.check()


def _manager_calls() -> list[Call]:
    """Return the calls of `KVCacheManager`."""
    rows: list[tuple[str, Callable[[Site], Arguments]]] = [
        ("can_allocate", lambda s: {"token_ids": tokens(1, 14), "extra_keys": s.keys, "num_seqs": 2}),
        ("hold_cached", lambda s: {"token_ids": tokens(1, 14), "extra_keys": s.keys, "holder": "new"}),
        ("allocate", lambda s: {"token_ids": tokens(1, 14), "holder": "new", "extra_keys": s.keys}),
        ("allocate", lambda s: {"token_ids": tokens(9, 22), "holder": "new", "extra_keys": s.keys, "num_seqs": 2}),
        ("allocate", lambda s: {"token_ids": [*tokens(1, 6), 5, 5], "extra_keys": s.keys, "resumed": True}),
        ("allocate", lambda s: {"token_ids": tokens(9, 22), "extra_keys": s.keys, "session": "idle"}),
        ("allocate", lambda s: {"token_ids": tokens(1, 14), "session": "idle"}),
        (
            "allocate",
            lambda s: {"token_ids": tokens(1, 14), "holder": "h", "extra_keys": s.keys, "num_seqs": 2, "resumed": True},
        ),
        ("try_allocate", lambda s: {"token_ids": tokens(1, 14), "holder": "new", "extra_keys": s.keys}),
        (
            "try_allocate",
            lambda s: {"token_ids": tokens(1, 14), "holder": "h", "extra_keys": s.keys, "num_seqs": 2, "resumed": True},
        ),
        ("can_allocate_batch", lambda s: {"prompts": [tokens(1, 9), tokens(8, 5)], "extra_keys": s.keys}),
        ("allocate_batch", lambda s: {"prompts": [tokens(1, 9), tokens(8, 5)], "extra_keys": s.keys}),
        (
            "allocate_batch",
            lambda s: {"prompts": [tokens(1, 9), tokens(8, 5)], "holders": ["a", "b"], "extra_keys": s.keys},
        ),
        (
            "allocate_batch",
            lambda s: {"prompts": [tokens(8, 9), tokens(8, 11)], "holders": ("a", "b"), "extra_keys": s.keys},
        ),
        ("reserve", lambda s: {"seqs": [s.reserved, s.waiting, s.decoding], "num_new_tokens": [9, 2, 6]}),
        ("reserve", lambda s: {"seqs": s.decoding, "num_new_tokens": 40}),
        ("reserve", lambda s: {"seqs": [s.reserved, s.decoding]}),
        ("commit", lambda s: {"seqs": [s.reserved], "num_computed": [9], "next_tokens": [[3]], "step": s.step}),
        ("commit", lambda s: {"seqs": [s.reserved], "num_computed": 4, "step": s.step}),
        ("end_step", lambda s: {"step": s.cache.steps_in_flight.start}),
        ("can_append", lambda s: {"seqs": [s.decoding, s.waiting], "num_new_tokens": 5}),
        ("can_append", lambda s: {"seqs": [s.decoding, s.done], "num_new_tokens": 5}),
        ("append", lambda s: {"seqs": [s.done], "next_tokens": [5]}),
        ("fork", lambda s: {"seq": s.decoding, "num_forks": 2}),
        ("regroup", lambda s: {"seqs": [s.decoding, s.done], "parents": [0, 0, 0]}),
        ("truncate", lambda s: {"seq": s.done, "num_tokens": 6}),
        ("truncate", lambda s: {"seq": s.decoding, "num_tokens": 3}),
        ("free", lambda s: {"seqs": [s.done, s.reserved]}),
        ("free", lambda s: {"seqs": [s.decoding, s.waiting]}),
        ("free", lambda s: {"seqs": s.decoding}),
        ("reset_prefix_cache", lambda _: {}),
        ("swap_out", lambda s: {"seqs": [s.done, s.decoding]}),
        ("swap_in", lambda s: {"seqs": [s.swapped]}),
        ("can_swap_out", lambda s: {"seqs": [s.done, s.decoding]}),
        ("can_swap_in", lambda s: {"seqs": s.swapped}),
        ("resize", lambda _: {"num_blocks": 64}),
        ("resize", lambda _: {"num_blocks": 9}),
        ("set_eviction_policy", lambda _: {"policy": "arc"}),
        ("set_eviction_policy", lambda _: {"policy": MRU}),
        ("retain", lambda s: {"token_ids": tokens(1, 12), "priority": 2, "expires_at": 5.0, "extra_keys": s.keys}),
        ("num_retained_of", lambda s: {"token_ids": tokens(1, 12), "extra_keys": s.keys}),
        ("advance_time", lambda _: {"now": 9.5}),
        ("hint", lambda _: {"target": "idle", "over": True}),
        ("hint", lambda s: {"target": s.decoding, "over": True}),
        ("hint", lambda s: {"target": s.done}),
        ("num_cached_tokens", lambda s: {"token_ids": tokens(1, 14), "extra_keys": s.keys}),
        ("states.blocks", lambda s: {"token_ids": tokens(1, 12), "extra_keys": s.keys}),
        ("states.skip", lambda s: {"seq": s.waiting, "num_tokens": 9}),
        ("states.skip", lambda s: {"seq": s.waiting, "num_tokens": 9, "checkpoint": 4}),
        (
            "allocate",
            lambda s: {
                "token_ids": tokens(1, 30),
                "extra_keys": s.keys,
                "states": StateHints([12], [tokens(1, 9)], 29),
            },
        ),
        ("states.drop_checkpoints", lambda s: {"seq": s.reserved}),
        ("states.slot", lambda s: {"seq": s.decoding}),
        ("num_tokens", lambda s: {"seqs": [s.decoding, s.done]}),
        ("num_computed_tokens", lambda s: {"seqs": [s.decoding, s.done]}),
        ("token_ids", lambda s: {"seq": s.decoding}),
        ("block_ids", lambda s: {"seq": s.decoding, "group": 0}),
        ("num_owned_blocks", lambda s: {"seqs": [s.decoding, s.done]}),
        ("running", lambda _: {}),
        ("block", lambda _: {"block_id": 3}),
        ("history", lambda _: {}),
        ("take_events", lambda _: {}),
        ("leak_report", lambda _: {}),
        ("check", lambda _: {}),
    ]
    return [Call("cache", *row) for row in rows]


def _pool_calls() -> list[Call]:
    """Return the calls of the manager's pool."""
    rows: list[tuple[str, Callable[[Site], Arguments]]] = [
        ("free_block_ids", lambda _: {}),
        ("block", lambda _: {"block_id": 2}),
        ("get_new_blocks", lambda _: {"num_blocks": 4, "holder": "new"}),
        ("extend", lambda s: {"lease": s.lease, "num_blocks": 3}),
        ("touch", lambda s: {"lease": s.lease, "holder": "again"}),
        ("touch", lambda s: {"lease": s.lease, "holder": "again", "start": 1, "stop": 2}),
        ("touch", lambda s: {"lease": s.lease, "holder": "h", "start": 0, "stop": 1}),
        ("copy_on_write", lambda s: {"lease": s.lease, "position": 0}),
        ("copy_on_write", lambda s: {"lease": s.lease, "position": 1}),
        ("history", lambda _: {}),
        ("free_blocks", lambda s: {"lease": s.lease}),
        ("release", lambda s: {"lease": s.lease, "start": 0, "stop": 1}),
        ("split", lambda s: {"lease": s.lease, "at": 1, "holder": "tail"}),
        ("publish_events", lambda _: {}),
        ("check", lambda _: {}),
    ]
    return [Call("pool", *row) for row in rows]


def _lone_pool_calls() -> list[Call]:
    """Return the calls of a pool without a manager."""
    rows: list[tuple[str, Callable[[Site], Arguments]]] = [
        ("get_cached_blocks", lambda _: {"token_ids": tokens(2, 14), "extra_keys": (), "holder": "new"}),
        ("get_cached_blocks", lambda _: {"token_ids": tokens(1, 14), "extra_keys": (), "holder": "h"}),
        ("get_cached_block", lambda _: {"token_ids": tokens(1, 12), "extra_keys": (), "holder": "new"}),
        ("num_cached_tokens", lambda _: {"token_ids": tokens(1, 12), "extra_keys": ()}),
        ("cached_block_ids", lambda _: {"token_ids": tokens(1, 12), "extra_keys": ()}),
        ("find_cached_blocks", lambda _: {"token_ids": tokens(1, 14), "extra_keys": ()}),
        ("resize", lambda _: {"num_blocks": 30}),
        ("resize", lambda _: {"num_blocks": 3}),
        ("set_eviction_policy", lambda _: {"policy": "s3fifo"}),
        ("set_eviction_policy", lambda _: {"policy": MRU}),
        ("reset", lambda _: {}),
        ("reset_prefix_cache", lambda _: {}),
        ("extend", lambda s: {"lease": s.alone_lease, "num_blocks": 6}),
        ("hold", lambda s: {"found": s.alone_found, "holder": "new", "extend_by": 3}),
        ("hold", lambda s: {"found": s.alone_found, "holder": "h", "num_blocks": 1, "extend_by": 2}),
        (
            "cache_next_blocks",
            lambda s: {"lease": s.alone_lease, "token_ids": tokens(1, 16)[12:], "num_cached_blocks": 3},
        ),
        (
            "cache_next_blocks",
            lambda s: {
                "lease": s.alone_lease,
                "token_ids": tokens(1, 16)[8:],
                "extra_keys": (),
                "num_cached_blocks": 2,
            },
        ),
        ("release", lambda s: {"lease": s.alone_lease, "start": 1, "stop": 4}),
        ("split", lambda s: {"lease": s.alone_lease, "at": 2, "holder": "tail"}),
        ("uncache", lambda _: {"block_ids": [5, 2]}),
        ("adopt", lambda _: {"block_ids": [6, 8], "holder": "new"}),
        ("evict", lambda _: {"num_blocks": 1}),
        ("retain", lambda _: {"token_ids": tokens(1, 12), "priority": 2, "expires_at": 5.0, "extra_keys": ()}),
        ("advance_time", lambda _: {"now": 9.5}),
        ("take_events", lambda _: {}),
        ("residency", lambda _: {}),
        (
            "cache_full_blocks",
            lambda s: {"lease": s.alone_lease, "token_ids": tokens(1, 12), "extra_keys": (), "num_cached_blocks": 3},
        ),
    ]
    return [Call("alone", *row) for row in rows]


def _queue_calls() -> list[Call]:
    """Of the manager's waiting requests."""
    rows: list[tuple[str, Callable[[Site], Arguments]]] = [
        ("add", lambda s: {"token_ids": tokens(1, 20), "extra_keys": s.keys, "num_seqs": 2, **ADDED}),
        ("add", lambda s: {"token_ids": tokens(12, 20), "extra_keys": s.keys}),
        ("remove", lambda s: {"ticket": s.ticket}),
        ("admitted", lambda s: {"ticket": s.ticket, "now": 2.0}),
        ("finished", lambda s: {"ticket": s.admitted, "now": 2.0, "blocks": s.decoding, "is_over": False}),
        ("missing", lambda s: {"ticket": s.ticket - 1}),
        ("joining", lambda s: {"ticket": s.ticket - 2}),
        ("first", lambda _: {"count": 3}),
        ("oldest", lambda _: {}),
        ("check", lambda _: {}),
    ]
    of_the_rule: list[tuple[str, Callable[[Site], Arguments]]] = [
        ("next", lambda _: {"now": 3.0}),
        ("order", lambda _: {"now": 3.0, "count": 2}),
        ("wake_at", lambda _: {"now": 3.0}),
        ("lane_bound", lambda s: {"ticket": s.ticket, "now": 3.0}),
    ]
    calls = [Call("queue", *row) for row in rows] + [Call("rule", *row) for row in of_the_rule]
    return [Call("cache", "waiting"), *calls]


def _lone_queue_calls() -> list[Call]:
    """Of the waiting requests of the pool without a manager."""
    return [
        Call("alone", "waiting"),
        Call("alone_queue", "add", lambda _: {"token_ids": tokens(2, 20), "extra_keys": (), **ADDED}),
        Call("alone_queue", "remove", lambda s: {"ticket": s.alone_ticket}),
        Call("alone_queue", "missing", lambda s: {"ticket": s.alone_ticket}),
    ]


MANAGER_CALLS = _manager_calls() + _queue_calls()
POOL_CALLS = _pool_calls()
LONE_POOL_CALLS = _lone_pool_calls() + _lone_queue_calls()
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
