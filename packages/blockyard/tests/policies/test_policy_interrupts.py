"""Ctrl-C and its like in the callbacks of a policy: the change is finished or undone, then it is raised."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blockyard import BlockyardError, CacheConfig, ConcurrentCall, KVCacheManager, PolicyError
from blockyard_testing.own_policies import MRU

from ..interrupts import state
from ..support.own_calls import ALL_CALLS, GROUPS, LONE_POOL_CALLS, Call, Site, tokens

HOOKS = ("insert", "hit", "remove", "evict", "clear", "grow")
INTERRUPTIONS = (KeyboardInterrupt, SystemExit, asyncio.CancelledError)
#: Their results must not be lost: where they are finished, the next call raises.
RAISED_NEXT = ("reserve", "regroup", "swap_out", "swap_in", "fork", "touch")
#: Where a batch is undone, idle blocks that were evicted for it stay evicted.
GIVES_UP_IDLE = ("allocate_batch",)
CALLS = [call for call in ALL_CALLS if call not in LONE_POOL_CALLS]


class Interrupted(MRU):
    """Acts in one of its methods, at the n-th time that it is called from now on."""

    made: Interrupted

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        Interrupted.made = self
        self.hook = ""
        self.after = 0
        self.act: Callable[[], object] = lambda: None
        self.num_acts = 0

    def _at(self, hook: str) -> None:
        if hook == self.hook:
            self.after -= 1
            if self.after == -1:
                self.num_acts += 1
                self.act()

    def insert(self, block: int, key: int, depth: int) -> None:
        self._at("insert")
        super().insert(block, key, depth)

    def hit(self, block: int, key: int) -> None:
        self._at("hit")

    def remove(self, block: int) -> None:
        self._at("remove")
        super().remove(block)

    def evict(self) -> int:
        self._at("evict")
        return super().evict()

    def clear(self) -> None:
        self._at("clear")
        super().clear()

    def grow(self, num_blocks: int) -> None:
        self._at("grow")
        super().grow(num_blocks)


class PolicySite(Site):
    """A site with such a policy, and so full that calls have to evict."""

    def __init__(self, mapped: bool = False) -> None:
        super().__init__("groups" if mapped else "own policy")
        self.kind = "own policy"
        filler = self.computed(tokens(11, 20), "filler")
        self.cache.free(filler)
        self.cache.set_eviction_policy(Interrupted)
        self.policy = Interrupted.made
        num_idle = int(self.pool.cached_mask()[self.pool.free_block_ids()].sum())
        self.fill = self.pool.get_new_blocks(self.pool.num_free_blocks - num_idle, holder="takes the empty ones")


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def combinations(mapped: bool) -> Iterator[tuple[Call, str, int]]:
    """Each call, each hook that it comes to, each time."""
    for call in CALLS:
        for hook in HOOKS:
            for after in range(12):
                site = PolicySite(mapped)
                site.policy.hook, site.policy.after = hook, after
                outcome_of(call.make(site))
                if site.policy.num_acts == 0:
                    break
                yield call, hook, after


def outcome_of(call: Callable[[], Any]) -> Any:
    """What it returned, or the error that it raised."""
    try:
        return call()
    except BaseException as error:
        return error


def states_of(call: Call, mapped: bool) -> list[dict[str, Any]]:
    before, after = PolicySite(mapped), PolicySite(mapped)
    outcome_of(call.make(after))
    return [state(before), state(after)]


def held_by(site: Site) -> dict[str, Any]:
    """All that anybody holds."""
    cache, groups = site.cache, range(len(site.cache.config.layer_groups))
    found: dict[str, Any] = {"running": cache.running(), "ref counts": site.pool.ref_counts().tolist()}
    found["leases"] = [(lease.serial, list(lease)) for lease in site.pool.leases()]
    for seq in cache.running():
        blocks = [cache.block_ids(seq, group).tolist() for group in groups]
        found[f"{seq}"] = (cache.token_ids(seq).tolist(), cache.num_computed_tokens(seq), blocks)
    return found


def problem(call: Call, hook: str, after: int, error: BaseException, mapped: bool, allowed: list[Any]) -> str:
    site = PolicySite(mapped)
    site.policy.hook, site.policy.after, site.policy.act = hook, after, raising(error)
    outcome = outcome_of(call.make(site))
    raised_next = outcome is not error
    if raised_next:
        later = outcome_of(site.cache.running)
        if later is not error:
            return f"the interruption got lost: {outcome!r}, then {later!r}"
        if call.name not in RAISED_NEXT and not call.name.startswith("get_"):
            return "it was raised by the next call, and this one returns nothing"
    again = outcome_of(site.cache.running)
    if isinstance(again, BaseException):
        return f"raised twice: {again!r}"
    reached = state(site)  # before the check, which brings the tree of waiting prompts up to date
    try:
        site.cache.check()
    except BlockyardError as broken:
        return f"{type(broken).__name__}: {broken}"
    if raised_next and reached != allowed[1]:
        return "not finished, and it returned"
    if reached not in allowed and not (call.name in GIVES_UP_IDLE and held_by(site) == held_by(PolicySite(mapped))):
        different = [path for path in reached if reached[path] != allowed[0].get(path)]
        return f"neither undone nor finished: {different[:4]}"
    return ""


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "groups"])
def test_an_interruption_in_a_callback_leaves_the_call_undone_or_finished(mapped: bool) -> None:
    wrong, seen = [], set()
    for number, (call, hook, after) in enumerate(combinations(mapped)):
        kind = INTERRUPTIONS[number % len(INTERRUPTIONS)]
        found = problem(call, hook, after, kind("in a callback"), mapped, states_of(call, mapped))
        seen.add((call.name, hook))
        if found:
            wrong.append(f"{call.name}, {hook} {after}, {kind.__name__}: {found}")
    assert wrong == []
    assert len(seen) >= 12, seen
    assert {hook for _, hook in seen} >= {"insert", "remove", "evict", "clear", "grow"}, seen


def test_after_an_interruption_the_policy_is_asked_no_more() -> None:
    """It may have missed what it was told; another one takes its place, and all goes on."""
    site = PolicySite()
    site.policy.hook, site.policy.act = "insert", raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        site.cache.free(site.done)
    assert site.done not in site.cache.running()
    with pytest.raises(PolicyError, match="insert raised KeyboardInterrupt"):
        site.pool.get_new_blocks(site.pool.num_free_blocks)
    site.cache.set_eviction_policy("lru")
    assert len(site.pool.get_new_blocks(site.pool.num_free_blocks)) > 0
    site.cache.check()


def test_a_policy_that_frees_from_each_hook_is_obeyed_later() -> None:
    for hook in HOOKS:
        for call in (call for call in CALLS if call.name in ("allocate", "free", "reset_prefix_cache", "resize")):
            site = PolicySite()
            site.policy.hook = hook
            site.policy.act = lambda site=site: (site.cache.free(site.waiting), site.pool.free_blocks(site.lease))
            outcome_of(call.make(site))
            if site.policy.num_acts:
                assert site.waiting not in site.cache.running(), (hook, call.name)
                assert site.lease not in site.pool.leases(), (hook, call.name)
            site.cache.check()


@pytest.mark.parametrize("name", ["allocate", "reserve", "get_new_blocks", "resize", "check"])
def test_a_policy_that_calls_the_cache_from_each_hook_is_refused(name: str) -> None:
    inner = next(call for call in CALLS if call.name == name)
    refused = 0
    for hook in HOOKS:
        for outer in (call for call in CALLS if call.name in ("allocate", "free", "reset_prefix_cache", "resize")):
            site = PolicySite()
            errors: list[Any] = []
            site.policy.hook = hook
            site.policy.act = lambda site=site, errors=errors: errors.append(outcome_of(inner.make(site)))
            outcome_of(outer.make(site))
            assert {type(error) for error in errors} <= {ConcurrentCall}, (hook, outer.name, errors)
            refused += len(errors)
            site.cache.check()
    assert refused >= 6


@pytest.mark.parametrize("groups", [(), GROUPS], ids=["plain", "groups"])
def test_four_threads_with_an_own_policy_and_no_lock_break_nothing(groups: Any) -> None:
    """Callbacks let other threads run in the middle of calls: theirs are refused, and their frees wait."""
    cache = KVCacheManager(
        CacheConfig(40, 4, max_num_seqs=16, max_model_len=64, eviction_policy=Interrupted, groups=groups)
    )
    wrong: list[BaseException] = []
    refused = [0] * 4

    def work(number: int) -> None:
        for turn in range(300):
            try:
                seq = cache.allocate(tokens(number * 7 + turn % 5, 9 + turn % 20))
            except ConcurrentCall:
                refused[number] += 1
                continue
            except BlockyardError:
                continue
            try:
                cache.free(seq)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    cache.check()
    assert cache.running() == {}
    assert cache.num_used_blocks == 0


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
