"""Hints: who comes back and when, said to the cache, and what is evicted then."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import (
    CacheConfig,
    CacheSalt,
    EvictionPolicy,
    HintOutcome,
    InvalidArgument,
    KVCacheManager,
    PolicyError,
    UnknownSequence,
)
from blockyard.tenants import Tenant

from ..support.cached import cached_tokens
from ..support.own_policies import MRU

ACCEPTED, CLIPPED, REFUSED, UNKNOWN = HintOutcome
POLICIES = ["lru", "fifo", "lfu", "s3fifo", "arc", "score", "density", MRU]


def make_cache(policy: Any = "lru", num_blocks: int = 13, **options: Any) -> KVCacheManager:
    return KVCacheManager(
        CacheConfig(num_blocks, 4, max_model_len=64, watermark=0.0, eviction_policy=policy, hash_seed=1, **options)
    )


def prompt(number: int, num_blocks: int = 4) -> list[int]:
    """Prompts of different numbers share no block."""
    return [1000 * number + position for position in range(4 * num_blocks)]


def begin(cache: KVCacheManager, tokens: list[int], session: str | None = None) -> int:
    seq = cache.allocate(tokens, session=session)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    cache.check()
    return seq


def turn(cache: KVCacheManager, tokens: list[int], session: str | None = None) -> None:
    cache.free(begin(cache, tokens, session))
    cache.check()


def cached(cache: KVCacheManager, *numbers: int) -> list[int]:
    """How many blocks of each prompt are cached."""
    return [cached_tokens(cache, prompt(number)) // 4 for number in numbers]


# ---------------------------------------------------------------- what goes first


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_over_goes_first(policy: Any) -> None:
    cache = make_cache(policy)
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    assert cache.hint("b", over=True) is ACCEPTED
    turn(cache, prompt(4, 3))
    assert cached(cache, 1, 2, 3) == [4, 1, 4]
    assert cache.stats().num_hinted_evictions == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_what_comes_back_stays_and_of_that_the_latest_goes_first(policy: Any) -> None:
    cache = make_cache(policy)
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    assert [cache.hint("a", back_in=5), cache.hint("b", back_at=50)] == [ACCEPTED, ACCEPTED]
    turn(cache, prompt(4))
    assert cached(cache, 1, 2, 3) == [4, 4, 0]
    turn(cache, prompt(5))
    assert cached(cache, 1, 2, 4) == [4, 4, 0]
    turn(cache, prompt(6, 6))
    assert cached(cache, 1, 2, 5) == [4, 2, 0]


def test_a_hint_before_the_end_of_the_sequence_holds_when_it_ends() -> None:
    cache = make_cache()
    turn(cache, prompt(1))
    seq = begin(cache, prompt(2), "b")
    assert cache.hint(seq, over=True) is ACCEPTED
    cache.free(seq)
    turn(cache, prompt(3))
    turn(cache, prompt(4, 3))
    assert cached(cache, 1, 2, 3) == [4, 1, 4]


def test_a_sequence_without_a_session_can_be_hinted_too() -> None:
    cache = make_cache()
    turn(cache, prompt(1))
    seq = begin(cache, prompt(2))
    assert cache.num_sessions == 0
    assert cache.hint(seq, over=True) is ACCEPTED
    assert cache.num_sessions == 1
    cache.free(seq)
    turn(cache, prompt(3))
    turn(cache, prompt(4, 3))
    assert cached(cache, 1, 2, 3) == [4, 1, 4]


def test_a_shared_prefix_is_nobodys() -> None:
    """Two sessions begin with the same two blocks: when both are over, these are the policy's still."""
    cache = make_cache(num_blocks=14)
    system = prompt(9, 2)
    turn(cache, [*system, *prompt(1, 2)], "a")
    turn(cache, [*system, *prompt(2, 2)], "b")
    turn(cache, prompt(3, 4), "c")
    cache.hint("a", over=True)
    cache.hint("b", over=True)
    turn(cache, prompt(4, 7))
    assert cached_tokens(cache, [*system, *prompt(1, 2)]) == 8
    assert cached(cache, 3) == [4]


def test_a_request_without_a_session_makes_its_prefix_nobodys() -> None:
    cache = make_cache()
    turn(cache, prompt(1), "a")
    turn(cache, prompt(1)[:8])
    turn(cache, prompt(2), "b")
    cache.hint("a", over=True)
    turn(cache, prompt(3, 6))
    assert cached(cache, 1, 2) == [2, 4]


# ---------------------------------------------------------------- what is newer


def test_a_session_that_goes_on_is_over_no_longer() -> None:
    cache = make_cache()
    turn(cache, prompt(1), "a")
    turn(cache, prompt(2), "b")
    cache.hint("a", over=True)
    turn(cache, prompt(1), "a")
    turn(cache, prompt(3))
    turn(cache, prompt(4))
    assert cached(cache, 1, 2) == [4, 0]


def test_what_a_session_holds_no_more_is_not_kept_for_it() -> None:
    """It began anew with other tokens: its first ones are the policy's, and go with it when it is over."""
    cache = make_cache()
    turn(cache, prompt(1), "a")
    turn(cache, prompt(2), "a")
    cache.hint("a", back_in=5)
    turn(cache, prompt(3))
    turn(cache, prompt(4))
    assert cached(cache, 1, 2, 3) == [0, 4, 4]
    turn(cache, prompt(1), "a")
    assert cached(cache, 1, 2, 4) == [4, 4, 4]
    cache.hint("a", over=True)
    turn(cache, prompt(5, 5))
    assert cached(cache, 1, 2, 4) == [3, 0, 4]


def test_an_older_sequence_of_a_session_says_nothing() -> None:
    cache = make_cache()
    first = begin(cache, prompt(1), "a")
    second = begin(cache, prompt(2), "a")
    assert cache.hint(first, over=True) is REFUSED
    assert cache.hint(second, over=True) is ACCEPTED
    assert cache.hint(cache.fork(second)[0], over=True) is ACCEPTED


def test_a_hint_can_be_changed_and_taken_back() -> None:
    cache = make_cache()
    for number, session in enumerate("ab", 1):
        turn(cache, prompt(number), session)
    turn(cache, prompt(3))
    cache.hint("a", back_in=5)
    cache.hint("a", over=True)
    turn(cache, prompt(4, 1))
    assert cached(cache, 1, 2, 3) == [3, 4, 4]
    assert cache.hint("a") is ACCEPTED
    cache.hint("a", back_in=7)
    turn(cache, prompt(5, 1))
    assert cached(cache, 1, 2, 3) == [3, 3, 4]
    cache.hint("a")
    turn(cache, prompt(6, 4))
    assert cached(cache, 1, 2, 3) == [3, 0, 3]


def test_a_time_that_has_passed_is_no_hint_any_more() -> None:
    cache = make_cache()
    for number, session in enumerate("ab", 1):
        turn(cache, prompt(number), session)
    cache.hint("a", back_in=5)
    cache.advance_time(5.0)
    turn(cache, prompt(3, 6))
    assert cached(cache, 1, 2) == [4, 2]
    cache.advance_time(5.5)
    cache.check()
    turn(cache, prompt(4, 2))
    turn(cache, prompt(5, 6))
    assert cached(cache, 1, 2) == [4, 0]
    turn(cache, prompt(6, 6))
    assert cached(cache, 1, 2) == [0, 0]


# ---------------------------------------------------------------- outcomes


def test_outcomes() -> None:
    cache = make_cache(hint_horizon=100.0)
    assert cache.hint("a", over=True) is UNKNOWN
    turn(cache, prompt(1), "a")
    cache.advance_time(10.0)
    assert cache.hint("a", back_at=110.0) is ACCEPTED
    assert cache.hint("a", back_at=110.5) is CLIPPED
    assert cache.hint("a", back_in=1e308) is CLIPPED
    assert cache.hint("a", back_at=9.0) is REFUSED
    assert cache.hint("a", back_at=10.0) is ACCEPTED
    assert [bool(outcome) for outcome in HintOutcome] == [True, True, False, False]


@pytest.mark.parametrize("options", [{"max_sessions": 0}, {"enable_prefix_caching": False}])
def test_a_cache_that_knows_no_sessions_refuses(options: dict[str, Any]) -> None:
    cache = make_cache(**options)
    seq = begin(cache, prompt(1), "a")
    assert cache.hint("a", over=True) is REFUSED
    assert cache.hint(seq, over=True) is REFUSED
    assert cache.num_sessions == 0


class Deaf(MRU):
    def takes_hints(self) -> bool:
        return False


def test_a_policy_may_take_no_hints() -> None:
    cache = make_cache(Deaf)
    turn(cache, prompt(1), "a")
    assert cache.hint("a", over=True) is REFUSED
    cache.resize(20)
    cache.set_eviction_policy("lru")
    turn(cache, prompt(2), "b")
    assert cache.hint("a", over=True) is ACCEPTED
    turn(cache, prompt(3), "c")
    turn(cache, prompt(4), "c")
    turn(cache, prompt(5), "c")
    assert cached(cache, 1, 2) == [3, 4]


@pytest.mark.parametrize(
    "arguments",
    [
        {"over": 1},
        {"over": None},
        {"back_in": -1},
        {"back_in": "1"},
        {"back_at": float("nan")},
        {"back_at": float("inf")},
        {"over": True, "back_in": 1},
        {"back_in": 1, "back_at": 1},
        {"target": ""},
        {"target": "x" * 201},
        {"target": None},
        {"target": 1.5},
        {"target": True},
        {"target": b"a"},
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    cache = make_cache()
    turn(cache, prompt(1), "a")
    with pytest.raises(InvalidArgument, match=next(iter(arguments))):
        cache.hint(**{"target": "a", **arguments})


def test_a_string_of_another_class_is_told_apart_from_a_plain_one() -> None:
    class Name(str):
        __slots__ = ()

    with pytest.raises(InvalidArgument, match=r"^session is 'a', a Name; it must be a plain string$"):
        make_cache().allocate(prompt(1), session=Name("a"))


@pytest.mark.parametrize("session", ["", "x" * 201, 1, b"a", True])
def test_bad_sessions(session: Any) -> None:
    cache = make_cache()
    with pytest.raises(InvalidArgument, match="session"):
        cache.allocate(prompt(1), session=session)
    assert cache.num_seqs == 0


def test_a_sequence_that_has_ended_is_unknown() -> None:
    cache = make_cache()
    seq = begin(cache, prompt(1), "a")
    cache.free(seq)
    with pytest.raises(UnknownSequence):
        cache.hint(seq, over=True)


# ---------------------------------------------------------------- bounds, other policies, other calls


def test_the_oldest_session_is_forgotten() -> None:
    cache = make_cache(max_sessions=3, num_blocks=30)
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    assert cache.hint("a", back_in=5) is ACCEPTED
    turn(cache, prompt(4), "d")
    assert cache.num_sessions == 3
    assert [cache.hint(name, over=True) for name in "abcd"] == [ACCEPTED, UNKNOWN, ACCEPTED, ACCEPTED]


def test_many_sessions() -> None:
    cache = make_cache(max_sessions=1000, num_blocks=200)
    for number in range(20_000):
        turn_unchecked(cache, prompt(number, 1), f"session {number}")
        if number % 3:
            cache.hint(f"session {number}", **({"over": True} if number % 2 else {"back_in": number % 97}))
        if number % 50 == 0:
            cache.advance_time(number / 10)
    cache.check()
    assert cache.num_sessions == 1000


def turn_unchecked(cache: KVCacheManager, tokens: list[int], session: str) -> None:
    seq = cache.allocate(tokens, session=session)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    cache.free(seq)


def test_hints_survive_another_policy_and_a_larger_pool() -> None:
    cache = make_cache()
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    cache.hint("b", over=True)
    cache.hint("a", back_in=3)
    cache.set_eviction_policy("arc")
    cache.check()
    turn(cache, prompt(4, 2))
    assert cached(cache, 1, 2, 3) == [4, 2, 4]
    cache.resize(15)
    cache.set_eviction_policy("lru")
    turn(cache, prompt(5, 5))
    assert cached(cache, 1, 2, 3) == [4, 0, 3]
    assert cache.stats().num_hinted_evictions == 4


def test_after_a_reset_nothing_is_anybodys() -> None:
    cache = make_cache()
    turn(cache, prompt(1), "a")
    cache.hint("a", over=True)
    cache.reset_prefix_cache()
    cache.check()
    turn(cache, prompt(2), "b")
    turn(cache, prompt(3), "c")
    turn(cache, prompt(1))
    turn(cache, prompt(4, 2))
    assert cached(cache, 1, 2, 3) == [4, 2, 4]


def test_after_a_reset_under_a_policy_without_hints_nothing_is_anybodys() -> None:
    """The blocks of session "a" are those of "b" afterwards, and no one else's."""
    cache = make_cache(Deaf, num_blocks=9)
    turn(cache, prompt(1), "a")
    turn(cache, prompt(6), "a")
    cache.reset_prefix_cache()
    turn(cache, prompt(2), "b")
    turn(cache, prompt(3), "c")
    cache.set_eviction_policy("lru")
    assert cache.hint("c", over=True) is ACCEPTED
    turn(cache, prompt(4))
    assert cached(cache, 2, 3, 4) == [4, 0, 4]
    assert cache.stats().num_hinted_evictions == 4


class Asks(EvictionPolicy):
    """Chooses by hints itself: what is over, then the oldest that nobody comes back for."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.idle: dict[int, Any] = {}

    def needs_hints(self) -> bool:
        return True

    def hinted(self, block: int, is_over: bool, back_at: float | None) -> None:
        self.idle[block] = (not is_over, back_at or 0)

    def insert(self, block: int, key: int, depth: int) -> None:
        self.idle[block] = (True, 0)

    def remove(self, block: int) -> None:
        del self.idle[block]

    def evict(self) -> int:
        block = min(self.idle, key=lambda block: self.idle[block])
        del self.idle[block]
        return block

    def clear(self) -> None:
        self.idle = {}


def test_a_policy_may_choose_by_hints_itself() -> None:
    cache = make_cache(Asks)
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    cache.hint("b", over=True)
    cache.hint("a", back_in=10)
    turn(cache, prompt(4, 3))
    assert cached(cache, 1, 2, 3) == [4, 1, 4]
    cache.hint("b")
    turn(cache, prompt(5, 3))
    assert cached(cache, 1, 3) != [4, 4]
    assert cached(cache, 1) == [4]


# ---------------------------------------------------------------- policies that break their contract


class Faulty(MRU):
    """The block idle shortest goes first, until a fault is set."""

    fault = ""

    def insert(self, block: int, key: int, depth: int) -> None:
        if self.fault == "insert":
            raise KeyError("broken insert")
        super().insert(block, key, depth)

    def remove(self, block: int) -> None:
        if self.fault == "remove":
            raise KeyError("broken remove")
        super().remove(block)

    def evict(self) -> int:
        return 1 if self.fault == "evict" else super().evict()

    def takes_hints(self) -> bool:
        if self.fault == "takes_hints":
            raise KeyError("broken takes_hints")
        return True

    def needs_hints(self) -> bool:
        if self.fault == "needs_hints":
            raise KeyError("broken needs_hints")
        return False


@pytest.fixture
def faulty() -> Any:
    """The class, whose fault every cache of the test sees."""

    class OfThisTest(Faulty):
        pass

    return OfThisTest


@pytest.mark.parametrize("fault", ["takes_hints", "needs_hints"])
def test_a_policy_that_raises_when_it_is_asked_about_hints(faulty: Any, fault: str) -> None:
    cache = make_cache(faulty)
    faulty.fault = fault
    with pytest.raises(PolicyError, match=f"OfThisTest: {fault} raised KeyError: 'broken {fault}'"):
        cache.allocate(prompt(1), session="a")
    cache.check()
    assert (cache.num_seqs, cache.num_sessions) == (0, 0)
    faulty.fault = ""
    turn(cache, prompt(1), "a")
    assert cache.hint("a", over=True) is ACCEPTED


def test_a_policy_that_raises_when_a_block_is_taken_from_it(faulty: Any) -> None:
    cache = make_cache(faulty)
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    cache.hint("a", over=True)
    faulty.fault = "remove"
    before = cache.stats()
    with pytest.raises(PolicyError, match="OfThisTest: evict raised KeyError: 'broken remove'"):
        cache.allocate(prompt(4), session="d")
    cache.check()
    assert cache.stats() == before
    faulty.fault = ""
    with pytest.raises(PolicyError, match="it raised KeyError when it was told of an eviction; put another in its pl"):
        cache.allocate(prompt(4), session="d")
    cache.set_eviction_policy("lru")
    turn(cache, prompt(4), "d")
    assert cached(cache, 1, 2, 3) == [0, 4, 4]


def test_a_policy_that_raises_when_what_was_kept_is_given_back(faulty: Any) -> None:
    cache = make_cache(faulty)
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    cache.hint("c", back_in=5)
    turn(cache, prompt(4, 1))
    faulty.fault = "insert"
    cache.advance_time(6.0)
    cache.check()
    with pytest.raises(PolicyError, match="OfThisTest: insert raised KeyError: 'broken insert'"):
        cache.allocate(prompt(5))
    cache.set_eviction_policy("lru")
    turn(cache, prompt(5))
    cache.check()


def test_a_policy_that_names_a_block_twice(faulty: Any) -> None:
    """Its first answer was kept on a hint's word; the same again is refused, and whatever was asked is undone."""
    cache = make_cache(faulty)
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    assert cache.block(1).is_cached
    cache.hint("a", back_in=5)
    faulty.fault = "evict"
    with pytest.raises(PolicyError, match="OfThisTest: evict raised ValueError: block 1 was chosen before"):
        cache.allocate(prompt(4))
    cache.set_eviction_policy("lru")
    turn(cache, prompt(4))
    assert cached(cache, 1) == [4]


def test_a_block_revived_after_a_hint_named_it_is_no_hinted_eviction() -> None:
    """The hint names blocks of tenant a, tenant b gives a block instead, and a's block loses its content in use."""
    config = CacheConfig(
        num_blocks=9,
        block_size=4,
        max_model_len=64,
        watermark=0.0,
        hash_seed=5,
        tenants=(Tenant("a"), Tenant("b")),
        max_sessions=4,
    )
    cache = KVCacheManager(config)
    keys = {name: (CacheSalt(name),) for name in "ab"}
    mine = prompt(1, 2)
    first = cache.allocate(mine, session="s", extra_keys=keys["a"])
    cache.commit([first], cache.reserve([first]).num_scheduled)
    cache.free(first)
    cache.hint("s", over=True)
    for number in (2, 3):
        other = cache.allocate(prompt(number, 3), extra_keys=keys["b"])
        cache.commit([other], cache.reserve([other]).num_scheduled)
        cache.free(other)
    other = cache.allocate(prompt(4, 1), extra_keys=keys["b"])
    cache.free(other)
    again = cache.allocate([*mine, 7], session="t", extra_keys=keys["a"])
    assert cache.num_computed_tokens(again) == 8
    cache.truncate(again, 6)
    cache.append(again, 9)
    cache.commit([again], cache.reserve([again]).num_scheduled)
    cache.check()
    assert cache.num_cached_tokens(mine, extra_keys=keys["a"]) == 4
    assert cache.stats().num_hinted_evictions == 0
