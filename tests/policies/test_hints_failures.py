"""Hints around a policy that raises: the cache's books stay whole."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import CacheConfig, HintOutcome, KVCacheManager, NotEnoughMemory, PolicyError
from blockyard.core.gate import Interruption
from blockyard.core.policies.layers.guarded import Guarded
from blockyard.core.policies.layers.hinted import Hinted
from blockyard.core.policies.layers.sessions import OVER, Sessions
from blockyard.core.policies.simple.lru import LRU
from blockyard.core.policies.stack import EvictionStack
from blockyard.policies import EvictionPolicy

from ..support.cached import cached_tokens


class Shallow(EvictionPolicy):
    """The lowest depth first, so that a guard evicts what stands below it before. It raises where it is told to."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.depths: dict[int, int] = {}
        self.fails_in = ""

    def fail(self, method: str) -> None:
        if self.fails_in == method:
            self.fails_in = ""
            raise ValueError(f"{method} fails")

    def insert(self, block: int, key: int, depth: int) -> None:
        assert block not in self.depths
        self.depths[block] = depth

    def remove(self, block: int) -> None:
        del self.depths[block]
        self.fail("remove")

    def evict(self) -> int:
        block = min(self.depths, key=lambda block: (self.depths[block], block))
        del self.depths[block]
        return block

    def clear(self) -> None:
        self.depths.clear()

    def grow(self, num_blocks: int) -> None:
        super().grow(num_blocks)
        self.fail("grow")


def run(cache: KVCacheManager, tokens: range, session: str | None = None) -> None:
    handle = cache.allocate(tokens, session=session)
    cache.commit([handle], cache.reserve([handle]).num_scheduled, [7])
    cache.free(handle)
    cache.check()


def made(num_blocks: int, is_guarded: bool) -> tuple[KVCacheManager, list[Shallow]]:
    policies: list[Shallow] = []

    def make(capacity: int) -> EvictionPolicy:
        policies.append(Shallow(capacity))
        return Guarded(policies[-1]) if is_guarded else policies[-1]

    sizes = {"max_num_seqs": 8, "max_model_len": 64}
    return KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=4, eviction_policy=make, **sizes)), policies


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_policy_that_takes_a_block_out_and_then_raises_is_named_and_the_pool_is_whole(is_guarded: bool) -> None:
    cache, policies = made(13, is_guarded)
    for number, session in enumerate("abc"):
        run(cache, range(100 * number, 100 * number + 15), session)
    cache.hint("b", over=True)
    policies[0].fails_in = "remove"
    before = cache.stats()
    with pytest.raises(PolicyError, match="Shallow: evict raised ValueError: remove fails"):
        cache.allocate(range(900, 917), session="d")
    cache.check()
    assert cache.stats() == before
    for _ in range(2):
        with pytest.raises(PolicyError, match="it raised ValueError when it was told of an eviction; put another in"):
            cache.allocate(range(900, 917), session="d")
        cache.check()
    cache.set_eviction_policy("lru")
    run(cache, range(900, 917), "d")
    assert cached_tokens(cache, range(15)) == 12


class NoMemory(dict[Any, Any]):
    """Has no memory for one more key."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self:
            raise MemoryError
        super().__setitem__(key, value)


def test_without_memory_for_the_name_of_a_session_nothing_begins() -> None:
    cache, _ = made(13, False)
    run(cache, range(15), "a")
    hints, before = cache._hints, cache.stats()
    names = hints._slots
    hints._slots = NoMemory(names)
    with pytest.raises(NotEnoughMemory, match="session: the system has no memory for one more session"):
        cache.allocate(range(100, 115), session="b")
    cache.check()
    assert cache.stats() == before
    assert (cache.num_seqs, cache.num_sessions) == (0, 1)
    seq = cache.allocate(range(200, 215))
    with pytest.raises(NotEnoughMemory, match="session"):
        cache.hint(seq, over=True)
    cache.free(seq)
    cache.check()
    run(cache, range(17), "a")
    hints._slots = dict(hints._slots)
    run(cache, range(100, 115), "b")
    assert cache.num_sessions == 2


def test_a_name_whose_sequence_does_not_begin_is_no_session() -> None:
    cache, policies = made(5, False)
    run(cache, range(13), "a")
    cache.hint("a", over=True)
    policies[0].fails_in = "remove"
    with pytest.raises(PolicyError):
        cache.allocate(range(100, 115), session="b")
    cache.check()
    assert cache.num_sessions == 1
    assert cache.hint("b", over=True) is HintOutcome.UNKNOWN


# ---------------------------------------------------------------- a guard whose choice waits


def chain(policy: EvictionPolicy, blocks: list[int]) -> None:
    """A sequence is freed: `blocks` from its first block to its last become idle, the last first."""
    for depth in range(len(blocks) - 1, -1, -1):
        if depth > 0:
            policy.follows(blocks[depth], blocks[depth - 1])
        policy.insert(blocks[depth], 100 + blocks[depth], depth)


def rich(policy: EvictionPolicy) -> Guarded:
    """A guard with credit for a choice."""
    guard = Guarded(policy)
    for key in range(4000):
        guard.miss(key + 10000)
    return guard


def with_hints(policy: EvictionPolicy, sessions: Sessions, idle: list[int]) -> tuple[EvictionStack, Hinted]:
    """A stack whose policy knows that the blocks in `idle` are idle, and then the sessions."""
    stack = EvictionStack(policy, 20, Interruption())
    for block in idle:
        stack._idle[block] = 1
    stack.know(sessions)
    assert stack.hints is not None
    return stack, stack.hints


def test_of_nested_guards_each_may_have_a_choice_that_waits_and_hints_know_none_of_them() -> None:
    """Below the choice of the inner guard stands another block, which goes first; so it is with the outer one's."""
    inner = rich(Shallow(20))
    outer = rich(inner)
    stack = EvictionStack(outer, 20, Interruption())
    assert (stack.top, stack.layers, stack.name) == (outer, [outer, inner], "Guarded around Guarded around Shallow")
    chain(inner, [1, 2])
    inner.evict()
    assert [block for block in (1, 2) if not inner.passes(block)] == [1]
    inner.insert(2, 102, 1)
    for block in (1, 2):
        outer._shadow.insert(block, 100 + block)
        outer._tree.link(block)
        outer._num_idle += 1
    chain(outer, [3, 4])
    sessions = Sessions(20, 4)
    stack, layer = with_hints(outer, sessions, [1, 2, 3, 4])
    assert (stack.top, stack.layers) == (outer, [outer, inner, layer])
    assert inner.policy is layer
    layer.check()
    assert sorted(outer.evict() for _ in range(4)) == [1, 2, 3, 4]
    outer.check()


def test_what_a_hint_would_have_evicted_and_was_hit_meanwhile_is_not_counted() -> None:
    """Block 2 of a session that is over has block 3 below it, a session's no more: 3 goes, 2 waits and is hit."""
    sessions = Sessions(20, 4)
    stack, layer = with_hints(rich(LRU(20)), sessions, [])
    policy = stack.top
    assert sessions.make_room()
    slot = sessions.open()
    layer.grow_slots()
    tag = sessions.begin(slot)
    for block in (1, 2):
        sessions.mark(block, tag)
    chain(policy, [1, 2, 3])
    sessions.say(slot, OVER, 0.0)
    layer.restate(slot)
    assert policy.evict() == 3
    policy.hit(2, 102)
    policy.remove(2)
    policy.gone(2)
    assert layer.num_evicted == 0
    policy.check()
    assert policy.evict() == 1
    policy.gone(1)
    assert layer.num_evicted == 1


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_policy_that_cannot_grow_fails_and_the_pool_grows_and_shrinks(is_guarded: bool) -> None:
    cache, policies = made(10, is_guarded)
    run(cache, range(17), "a")
    policies[0].fails_in = "grow"
    cache.resize(60)
    for start in range(100, 900, 100):
        run(cache, range(start, start + 21), "b")
    assert cache.hint("b", over=True)
    cache.resize(10)
    cache.check()
    cache.set_eviction_policy("lru")
    run(cache, range(17), "b")
