"""Policies, retention, residency, history, events and listeners of a standalone pool."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest

from blockyard import BlockPool, CacheConfig, ConcurrentCall, InvalidArgument, KVCacheManager, OverBudget, PolicyError
from blockyard.core.blocks.observer import LossNotifier
from blockyard.core.gate import Gate
from blockyard_testing.own_policies import MRU

from ..support.checked import prompt
from ..support.pools import cached, order

SIZE = 4


def test_a_policy_by_name_or_class() -> None:
    pool = BlockPool(5, SIZE, eviction_policy=MRU)
    for number in (1, 2):
        pool.free_blocks(cached(pool, prompt(number, 8)))
    pool.get_new_blocks(2)
    assert (pool.num_cached_tokens(prompt(1, 8)), pool.num_cached_tokens(prompt(2, 8))) == (8, 0)
    with pytest.raises(InvalidArgument, match="eviction_policy is 'lra'"):
        BlockPool(5, SIZE, eviction_policy="lra")
    with pytest.raises(PolicyError):
        BlockPool(5, SIZE, eviction_policy=lambda num_blocks: 1 // 0)


def test_retention_within_a_budget_and_until_its_time() -> None:
    pool = BlockPool(8, SIZE, retention_blocks=2)
    for number in (1, 2, 3):
        pool.free_blocks(cached(pool, prompt(number, 8)))
    with pytest.raises(OverBudget):
        pool.retain(prompt(1, 8) + prompt(1, 12)[8:], expires_at=5.0) and pool.retain(prompt(2, 8))
    assert pool.num_retained_blocks == 2
    pool.free_blocks(pool.get_new_blocks(5), last=True)
    assert pool.num_cached_tokens(prompt(1, 8)) == 8
    pool.advance_time(5.0)
    assert pool.num_retained_blocks == 0
    with pytest.raises(InvalidArgument, match=r"now is 4.0; it must be at least 5.0"):
        pool.advance_time(4.0)
    pool.check()
    with pytest.raises(InvalidArgument, match="retention_blocks is 0"):
        BlockPool(8, SIZE).retain([1])


def test_history_and_residency_use_the_callers_time() -> None:
    pool = BlockPool(4, SIZE, history_size=10, residency_sample=1)
    lease = pool.get_new_blocks(1, holder="a")
    pool.advance_time(2.0)
    pool.free_blocks(lease)
    assert [(event.time, event.actor) for event in pool.history()] == [
        (0.0, "get_new_blocks a"),
        (2.0, "free_blocks a"),
    ]
    assert pool.residency().sample == 1
    with pytest.raises(InvalidArgument, match="residency_sample is 0"):
        BlockPool(4).residency()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention_blocks", -1),
        ("residency_sample", 1.5),
        ("history_size", -1),
        ("enable_kv_cache_events", 1),
        ("enable_kv_cache_events", None),
        ("num_blocks", 0),
        ("eviction_policy", None),
    ],
)
def test_bad_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} is"):
        BlockPool(**{"num_blocks": 4, name: value})


# ---------------------------------------------------------------- version, reset, events


def test_version_grows_exactly_when_findable_contents_change() -> None:
    pool = BlockPool(6, SIZE)
    seen = [pool.version]

    def grows() -> bool:
        seen.append(pool.version)
        return seen[-1] > seen[-2]

    lease = pool.get_new_blocks(2)
    assert not grows()
    pool.cache_next_blocks(lease, prompt(1, 4), lease.num_cached_blocks)
    assert grows()
    pool.cache_full_blocks(lease, prompt(1, 8), num_cached_blocks=1)
    assert grows()
    pool.free_blocks(lease)
    pool.free_blocks(pool.hold(pool.find_cached_blocks(prompt(1, 8))))
    assert not grows()
    pool.get_new_blocks(4)
    assert grows()
    pool.uncache([1])
    assert grows()
    pool.uncache([1])
    assert not grows()
    pool.reset_prefix_cache()
    assert grows()


def test_a_version_grows_when_pending_blocks_are_computed() -> None:
    cache = KVCacheManager(CacheConfig(8, SIZE))
    seq = cache.allocate(prompt(1, 4))
    cache.reserve([seq])
    before = cache.pool.version
    cache.commit([seq], 4)
    assert cache.pool.version > before


def test_events_of_a_pool_alone() -> None:
    pool = BlockPool(6, SIZE, enable_kv_cache_events=True)
    assert (pool.enable_kv_cache_events, pool.take_events().is_empty) == (True, True)
    lease = cached(pool, prompt(1, 8))
    events = pool.take_events()
    assert events.token_ids.tolist() == [prompt(1, 4), prompt(1, 8)[4:]]
    pool.uncache([2])
    assert pool.take_events().contents.tolist() == [-events.contents[1]]
    pool.reset_prefix_cache()
    assert pool.take_events().cleared
    pool.free_blocks(lease)
    with pytest.raises(InvalidArgument, match="enable_kv_cache_events is False"):
        BlockPool(6).take_events()


# ---------------------------------------------------------------- on_evict


class Listening:
    """A pool of five usable blocks that are all cached and idle, and what its listener was told."""

    def __init__(self, **settings: Any) -> None:
        self.pool = BlockPool(6, SIZE, **settings)
        self.told: list[list[int]] = []
        self.pool.on_evict = self.hear
        self.pool.free_blocks(cached(self.pool, prompt(1, 20)))

    def hear(self, block_ids: np.ndarray) -> None:
        assert block_ids.dtype == np.int32
        self.told.append(block_ids.tolist())


@pytest.mark.parametrize("policy", ["lru", MRU])
def test_listener_is_called_once_after_each_call(policy: Any) -> None:
    site = Listening(eviction_policy=policy)
    taken = site.pool.get_new_blocks(2)
    assert [sorted(told) for told in site.told] == [sorted([*taken])]
    idle = sorted({1, 2, 3, 4, 5} - {*taken})
    assert site.pool.uncache(idle[:1]) == 1
    assert site.told[1:] == [idle[:1]]
    site.pool.evict(1)
    site.pool.get_new_blocks(1)
    site.pool.get_new_blocks(2)
    assert sorted(block for told in site.told for block in told) == [1, 2, 3, 4, 5]
    assert [len(told) for told in site.told] == [2, 1, 1, 1]
    site.pool.on_evict = None
    assert site.pool.on_evict is None


def test_listener_receives_overwritten_blocks_but_no_reset() -> None:
    site = Listening()
    lease = site.pool.get_cached_blocks(prompt(1, 8))
    site.pool.copy_on_write(lease, 1)
    assert site.told == [[2]]
    site.pool.reset_prefix_cache()
    assert site.told == [[2]]


def test_a_listener_may_call_the_pool() -> None:
    """It is called when the call is over, so nothing is refused; blocks that it evicts are reported next."""
    site = Listening()
    pool = site.pool

    def hear(block_ids: np.ndarray) -> None:
        site.hear(block_ids)
        pool.check()
        if len(site.told) == 1:
            assert list(pool.get_new_blocks(1)) == [4]
            pool.free_blocks(pool.leases()[-1])

    pool.on_evict = hear
    lease = pool.get_new_blocks(1)
    assert site.told == [[5], [4]]
    assert list(lease) == [5]
    assert order(pool) == [4, 3, 2, 1]


def test_error_of_a_listener_becomes_a_warning() -> None:
    site = Listening()

    def broken(block_ids: np.ndarray) -> None:
        raise ValueError("no idea")

    site.pool.on_evict = broken
    with pytest.warns(RuntimeWarning, match="on_evict raised ValueError: no idea"):
        lease = site.pool.get_new_blocks(2)
    assert list(lease) == [5, 4]
    assert site.pool.num_on_evict_failures == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = site.pool.get_new_blocks(1)
        assert list(lease) == [3]
        with pytest.raises(RuntimeWarning, match="no idea"):
            site.pool.block(1)
    site.pool.check()


def test_an_interruption_in_a_listener_is_raised_when_no_result_is_lost_by_it() -> None:
    site = Listening()

    def interrupted(block_ids: np.ndarray) -> None:
        raise KeyboardInterrupt

    site.pool.on_evict = interrupted
    lease = site.pool.get_new_blocks(2)
    assert list(lease) == [5, 4]
    with pytest.raises(KeyboardInterrupt):
        site.pool.find_cached_blocks(prompt(1, 4))
    with pytest.raises(KeyboardInterrupt):
        site.pool.resize(2)
    assert site.pool.num_blocks == 2
    assert site.pool.num_on_evict_failures == 2
    site.pool.on_evict = None
    assert site.pool.num_on_evict_failures == 2
    site.pool.check()


def test_a_listener_that_frees_is_not_in_the_middle_of_a_call() -> None:
    site = Listening()
    held = site.pool.get_cached_blocks(prompt(1, 8))
    site.pool.on_evict = lambda ids: site.pool.free_blocks(held) if held in site.pool.leases() else None
    site.pool.get_new_blocks(1)
    assert site.pool.leases()[-1].serial != held.serial
    site.pool.check()


def test_listener_must_be_callable() -> None:
    pool = BlockPool(4)
    with pytest.raises(InvalidArgument, match="on_evict is 3; it must be a callable"):
        pool.on_evict = 3  # type: ignore[assignment]
    assert pool.on_evict is None


def test_a_listener_cannot_be_set_in_the_middle_of_a_call() -> None:
    pool = BlockPool(4, SIZE)

    class Sets:
        def __index__(self) -> int:
            with pytest.raises(ConcurrentCall):
                pool.on_evict = print
            return 1

    assert len(pool.get_new_blocks(Sets())) == 1


def test_managers_pool_notifies_listeners() -> None:
    told: list[int] = []
    cache = KVCacheManager(CacheConfig(6, SIZE, watermark=0.0))
    cache.pool.on_evict = lambda ids: told.extend(ids.tolist())
    seq = cache.allocate(prompt(1, 20))
    cache.reserve([seq])
    cache.commit([seq], 20)
    cache.free(seq)
    cache.allocate(prompt(2, 12))
    assert told == [5, 4, 3]
    cache.check()


def test_listeners_are_notified_of_each_others_changes() -> None:
    """The pools of a manager share a gate: the second's listener makes the first lose a block."""
    gate = Gate()
    first, second = LossNotifier(gate), LossNotifier(gate)
    gate.listeners += [first, second]
    told: list[Any] = []

    def hear_second(block_ids: np.ndarray) -> None:
        told.append(("second", block_ids.tolist()))
        if len(told) == 1:
            gate.enter("a call of the listener")
            first.note(7)
            gate.leave()

    first.callback = lambda block_ids: told.append(("first", block_ids.tolist()))
    second.callback = hear_second
    gate.enter("a call")
    second.note(3)
    gate.leave()
    assert told == [("second", [3]), ("first", [7])]


def test_a_pool_with_a_listener_is_collected() -> None:
    class Owner:
        def __init__(self) -> None:
            self.pool = BlockPool(4)
            self.pool.on_evict = self.hear

        def hear(self, block_ids: np.ndarray) -> None:
            pass

    import weakref

    alive = weakref.ref(Owner())
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------- a pool of the null block alone


def test_a_pool_of_one_block_has_none_to_give() -> None:
    pool = BlockPool(1, SIZE, history_size=3, enable_kv_cache_events=True, residency_sample=1, retention_blocks=1)
    assert (pool.num_blocks, pool.num_usable_blocks, pool.num_free_blocks, pool.num_used_blocks) == (1, 0, 0, 0)
    assert pool.usage == 0.0
    assert pool.free_block_ids().tolist() == []
    lease = pool.get_new_blocks(0)
    assert pool.extend(lease, 0).tolist() == []
    assert len(pool.find_cached_blocks(prompt(1, 8))) == 0
    assert len(pool.get_cached_blocks(prompt(1, 8))) == 0
    assert pool.evict(0).tolist() == []
    assert pool.uncache([]) == 0
    pool.free_blocks(lease)
    pool.reset_prefix_cache()
    pool.take_events()
    pool.check()
    assert pool.resize(3)
    lease = pool.get_new_blocks(2)
    assert list(lease) == [1, 2]
    assert not pool.resize(1)
    pool.free_blocks(lease)
    assert (pool.num_blocks, pool.num_usable_blocks, pool.usage) == (1, 0, 0.0)
    pool.check()
