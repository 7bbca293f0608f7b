"""One call at a time: what arrives in the middle of a call waits if it frees; anything else is refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from blockyard import (
    BlockPool,
    CacheConfig,
    ConcurrentCall,
    DoubleFree,
    ForeignBlock,
    InvalidArgument,
    KVCacheManager,
    UnknownSequence,
)
from blockyard.core.states import CacheStates
from blockyard.errors import StalePlan
from blockyard_testing.hostile_values import Array, Number
from blockyard_testing.own_policies import MRU
from blockyard_testing.patience import PATIENCE_SECONDS

from ..support.own_calls import (
    ALL_CALLS,
    FREES,
    KINDS,
    LONE_POOL_CALLS,
    MANAGER_CALLS,
    POOL_CALLS,
    QUESTIONS,
    Call,
    Site,
    tokens,
)
from ..support.snapshot import snapshot

REFUSED = [call for call in ALL_CALLS if call.name not in FREES]
#: The calls of a manager and of its pool, which enter by one gate.
OF_THE_MANAGER = [call for call in MANAGER_CALLS + POOL_CALLS if call.name not in FREES]


def prompt(act: Callable[[], object]) -> Array:
    """A prompt whose conversion does something first."""
    return Array(act, tokens(7, 5))


def tried(call: Callable[[], object], outcomes: list[Any]) -> Callable[[], None]:
    """Notes what `call` raises or returns."""

    def attempt() -> None:
        try:
            outcomes.append(call())
        except BaseException as error:
            outcomes.append(error)

    return attempt


def is_refusal(outcome: object, call: str, running: str) -> bool:
    return type(outcome) is ConcurrentCall and str(outcome).startswith(
        f"{call} was called while {running} runs on the same cache"
    )


def public_calls(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}


def test_the_table_has_every_public_call() -> None:
    known = {call.name for call in MANAGER_CALLS} | set(QUESTIONS) | {"miss_causes", "miss_totals", "residency"}
    assert public_calls(KVCacheManager) - known == set()
    assert {f"states.{name}" for name in public_calls(CacheStates)} - known == set()
    of_pools = {call.name for call in POOL_CALLS + LONE_POOL_CALLS} | {name.removeprefix("pool.") for name in QUESTIONS}
    assert public_calls(BlockPool) - of_pools == set()


@pytest.mark.parametrize("call", OF_THE_MANAGER, ids=lambda call: call.name)
@pytest.mark.parametrize("kind", ["plain", "cpu", "observed"])
def test_every_call_during_a_call_is_refused(kind: str, call: Call) -> None:
    """In the middle of `can_append`, which itself changes nothing: neither may the refused call."""
    site, outcomes = Site(kind), []
    inner = call.make(site)
    before = snapshot(site.cache)
    site.cache.can_append([site.done], Array(tried(inner, outcomes), [1]))
    if not outcomes:
        pytest.fail("the number was not converted")
    assert is_refusal(outcomes[0], call.name, "can_append"), outcomes
    assert snapshot(site.cache) == before
    site.check()


@pytest.mark.parametrize("call", LONE_POOL_CALLS, ids=lambda call: call.name)
def test_every_call_during_a_call_of_a_pool_is_refused(call: Call) -> None:
    site, outcomes = Site("plain"), []
    inner = call.make(site)
    before = snapshot(site.alone)
    site.alone.num_cached_tokens(prompt(tried(inner, outcomes)))
    assert is_refusal(outcomes[0], call.name, "num_cached_tokens"), outcomes
    assert snapshot(site.alone) == before


@pytest.mark.parametrize("outer", ["allocate", "allocate_batch", "retain", "hold_cached", "num_cached_tokens"])
def test_every_call_that_converts_tokens_names_itself(outer: str) -> None:
    site, outcomes = Site("retention"), []
    given: Any = prompt(tried(lambda: site.cache.fork(site.decoding), outcomes))
    getattr(site.cache, outer)([given] if outer == "allocate_batch" else given)
    assert is_refusal(outcomes[0], "fork", outer)
    site.check()


class Held:
    """A call that another thread is in the middle of, until `release`."""

    def __init__(self, site: Site) -> None:
        self.is_inside = threading.Event()
        self.may_end = threading.Event()
        self.outcomes: list[Any] = []
        call = tried(lambda: site.cache.allocate(prompt(self._wait), holder="the thread"), self.outcomes)
        self.thread = threading.Thread(target=call, daemon=True)
        self.thread.start()
        assert self.is_inside.wait(PATIENCE_SECONDS)

    def _wait(self) -> None:
        self.is_inside.set()
        assert self.may_end.wait(PATIENCE_SECONDS)

    def release(self) -> Any:
        """Let it end; returns what it returned or raised."""
        self.may_end.set()
        self.thread.join(PATIENCE_SECONDS)
        return self.outcomes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_another_thread_is_refused_while_a_call_is_held(kind: str) -> None:
    site = Site(kind)
    held = Held(site)
    before = snapshot(site.cache)
    for call in OF_THE_MANAGER:
        outcomes: list[Any] = []
        tried(call.make(site), outcomes)()
        assert is_refusal(outcomes[0], call.name, "allocate"), (call.name, outcomes)
        assert snapshot(site.cache) == before, call.name
    assert held.release() in site.cache.running()
    site.check()


@pytest.mark.parametrize("kind", KINDS)
def test_single_counters_are_readable_during_a_call(kind: str) -> None:
    site = Site(kind)
    before = {name: question(site) for name, question in QUESTIONS.items()}
    held = Held(site)
    assert {name: question(site) for name, question in QUESTIONS.items()} == before
    assert isinstance(held.release(), int)


@pytest.mark.parametrize("kind", KINDS)
def test_frees_that_arrive_in_a_call_are_carried_out_when_it_ends(kind: str) -> None:
    site = Site(kind)
    held = Held(site)
    site.cache.free([site.done, site.waiting])
    site.cache.free(site.reserved)
    site.pool.free_blocks(site.lease)
    assert site.cache.num_tokens(site.done) == 9, "not before the call has ended"
    assert site.lease in site.pool.leases()
    new = held.release()
    assert {site.done, site.waiting, site.reserved}.isdisjoint(site.cache.running())
    assert new in site.cache.running()
    assert site.lease not in site.pool.leases()
    site.check()
    with pytest.raises(UnknownSequence, match="has finished"):
        site.cache.free(site.done)
    with pytest.raises(DoubleFree):
        site.pool.free_blocks(site.lease)


def test_queued_free_is_not_carried_out_twice() -> None:
    """A second free is refused at once and as a whole; the first one stays queued."""
    site, other = Site("plain"), Site("plain")
    held = Held(site)
    site.cache.free(site.done)
    for wrong in (site.done, [site.reserved, site.done], [site.reserved, site.reserved], 0, [site.reserved, 12345]):
        with pytest.raises(UnknownSequence):
            site.cache.free(wrong)
    site.pool.free_blocks(site.lease)
    with pytest.raises(DoubleFree, match="takes effect when the running call ends"):
        site.pool.free_blocks(site.lease)
    with pytest.raises(ForeignBlock):
        site.pool.free_blocks(other.lease)
    held.release()
    assert site.done not in site.cache.running()
    assert site.reserved in site.cache.running(), "the refused calls freed nothing"
    site.check()


def test_a_free_that_waits_for_what_the_call_ends_itself() -> None:
    """`regroup` drops a sequence whose free has arrived meanwhile: it is freed once."""
    site = Site("plain")
    handles = site.cache.regroup([site.decoding, site.done], Array(lambda: site.cache.free(site.done), [0, 0]))
    assert handles[0] == site.decoding
    assert site.done not in site.cache.running()
    site.check()


def test_a_free_that_waits_for_a_sequence_that_the_call_forks() -> None:
    site = Site("plain")
    forks = site.cache.fork(site.decoding, Number(lambda: site.cache.free(site.decoding), 2))
    assert site.decoding not in site.cache.running()
    assert [site.cache.num_tokens(fork) for fork in forks] == [7, 7]
    site.check()


def test_failing_call_carries_out_queued_frees() -> None:
    site = Site("plain")

    def free_and_raise() -> None:
        site.cache.free(site.done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        site.cache.allocate(prompt(free_and_raise))
    assert site.done not in site.cache.running()
    site.check()


def test_a_refused_call_leaves_the_running_one_as_it_was() -> None:
    """The gate is not opened by the inner call's end: a second one is refused as the first was."""
    site, outcomes = Site("plain"), []

    def twice() -> None:
        for _ in range(3):
            tried(lambda: site.cache.allocate([1, 2]), outcomes)()
            tried(lambda: site.cache.free(site.cache.num_tokens(site.done)), outcomes)()

    site.cache.allocate(prompt(twice))
    assert [type(outcome) for outcome in outcomes] == [ConcurrentCall, UnknownSequence] * 3
    assert site.cache.allocate([1, 2]) in site.cache.running()
    site.check()


class Calling(MRU):
    """A policy that calls from each of its methods."""

    act: Callable[[], object] = staticmethod(lambda: None)

    def insert(self, block: int, key: int, depth: int) -> None:
        self.act()
        super().insert(block, key, depth)

    def hit(self, block: int, key: int) -> None:
        self.act()

    def remove(self, block: int) -> None:
        self.act()
        super().remove(block)

    def evict(self) -> int:
        self.act()
        return super().evict()

    def clear(self) -> None:
        self.act()
        super().clear()


@pytest.mark.parametrize("inner", [call for call in OF_THE_MANAGER if call.name != "check"], ids=lambda call: call.name)
def test_a_policy_that_calls_from_each_of_its_methods_is_refused(inner: Call) -> None:
    site, outcomes = Site("plain"), []
    policies: list[Calling] = []

    def make(num_blocks: int) -> Calling:
        policies.append(Calling(num_blocks))
        return policies[-1]

    site.cache.set_eviction_policy(make)
    policies[0].act = tried(inner.make(site), outcomes)
    site.cache.allocate([*tokens(1, 12), *tokens(7, 4)])
    site.cache.free([site.done])
    site.cache.free(site.cache.allocate(tokens(8, 30)))
    assert site.cache.stats().num_evicted_blocks > 0
    site.cache.reset_prefix_cache()
    assert len(outcomes) >= 5
    assert {type(outcome) for outcome in outcomes} == {ConcurrentCall}
    policies[0].act = staticmethod(lambda: None)
    site.check()


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.name)
def test_calls_one_after_another_are_not_refused(call: Call) -> None:
    """The gate is open again after every call, whatever it came to."""
    site = Site("plain")
    for _ in range(2):
        outcomes: list[Any] = []
        tried(call.make(site), outcomes)()
        assert not isinstance(outcomes[0], ConcurrentCall)
    site.check()


def test_managers_do_not_block_each_other() -> None:
    one, other = Site("plain"), Site("own policy")
    found: list[Any] = []
    one.cache.allocate(prompt(tried(lambda: other.cache.allocate(tokens(9, 5)), found)))
    assert found[0] in other.cache.running()
    one.check()
    other.check()


# ---------------------------------------------------------------- plans and frees that waited


@pytest.mark.parametrize("call", ["num_tokens", "num_computed_tokens", "num_owned_blocks", "can_append", "refused"])
def test_a_free_inside_a_question_makes_an_earlier_plan_stale(call: str) -> None:
    """Whatever the question looked up: the plan of a step names blocks that the free gave to others."""
    cache = KVCacheManager(CacheConfig(num_blocks=40, block_size=4, max_num_seqs=4, max_model_len=32))
    planned, other = cache.allocate([1, 2, 3, 4, 5]), cache.allocate([9] * 5)
    cache.commit([planned, other], cache.reserve([planned, other]).num_scheduled, [6, 7])
    plan = cache.reserve([planned], 1)
    cache.num_tokens([other])
    with contextlib.suppress(InvalidArgument):
        if call == "refused":
            cache.reserve([other], Array(lambda: cache.free(planned), [99]))
        elif call == "can_append":
            cache.can_append([other], Array(lambda: cache.free(planned), [1]))
        else:
            getattr(cache, call)(Batch(lambda: cache.free(planned), [other]))
    assert cache.num_seqs == 1
    with pytest.raises(StalePlan):
        _ = plan.slot_mapping
    with pytest.raises(StalePlan):
        _ = plan.block_tables


def test_a_plan_stays_true_when_the_call_that_made_it_ends_another_sequence() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=40, block_size=4, max_num_seqs=4, max_model_len=32))
    planned, other = cache.allocate([1, 2, 3, 4, 5]), cache.allocate([9] * 5)
    plan = cache.reserve([planned], Array(lambda: cache.free(other), [5]))
    assert cache.num_seqs == 1
    assert plan.slot_mapping.tolist() == [4, 5, 6, 7, 8]


class Batch(Array):
    def __len__(self) -> int:
        return 1
