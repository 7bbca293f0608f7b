"""Hints: who comes back and when, said to the cache, and what is evicted then."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import CacheConfig, CacheSalt, HintConfig, InvalidArgument, KVCacheManager, PolicyError, UnknownSequence
from blockyard.answers import HintOutcome
from blockyard.config import cache_config
from blockyard.tenants import Tenant
from blockyard_testing.cached import cached_tokens
from blockyard_testing.own_policies import MRU

ACCEPTED, REFUSED, UNKNOWN = HintOutcome
POLICIES = ["lru", "fifo", "lfu", "s3fifo", "arc", "score", "density", MRU]


def make_cache(policy: Any = "lru", num_blocks: int = 13, **options: Any) -> KVCacheManager:
    return KVCacheManager(
        cache_config(num_blocks, 4, max_model_len=64, watermark=0.0, eviction_policy=policy, hash_seed=1, **options)
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


def test_what_a_session_no_longer_holds_is_evicted_before_what_it_holds() -> None:
    """It began anew with other tokens, which are evicted after its first ones when it is over."""
    cache = make_cache()
    turn(cache, prompt(1), "a")
    turn(cache, prompt(2), "a")
    turn(cache, prompt(3), "b")
    cache.hint("a", over=True)
    turn(cache, prompt(4, 5))
    assert cached(cache, 1, 2, 3) == [0, 3, 4]


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
    cache.hint("a", over=True)
    turn(cache, prompt(4, 1))
    assert cached(cache, 1, 2, 3) == [3, 4, 4]
    assert cache.hint("a") is ACCEPTED
    turn(cache, prompt(5, 1))
    assert cached(cache, 1, 2, 3) == [2, 4, 4]


# ---------------------------------------------------------------- outcomes


def test_outcomes() -> None:
    cache = make_cache()
    assert cache.hint("a", over=True) is UNKNOWN
    turn(cache, prompt(1), "a")
    assert cache.hint("a", over=True) is ACCEPTED
    assert cache.hint("a") is ACCEPTED
    assert [bool(outcome) for outcome in HintOutcome] == [True, False, False]


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
    assert cache.hint("a") is ACCEPTED
    turn(cache, prompt(4), "d")
    assert cache.num_sessions == 3
    assert [cache.hint(name, over=True) for name in "abcd"] == [ACCEPTED, UNKNOWN, ACCEPTED, ACCEPTED]


def test_many_sessions() -> None:
    cache = make_cache(max_sessions=1000, num_blocks=200)
    for number in range(20_000):
        turn_unchecked(cache, prompt(number, 1), f"session {number}")
        if number % 3:
            cache.hint(f"session {number}", over=number % 2 == 1)
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
    cache.set_eviction_policy("arc")
    cache.check()
    turn(cache, prompt(4, 2))
    assert cached(cache, 1, 2, 3) == [4, 2, 4]
    cache.resize(15)
    cache.set_eviction_policy("lru")
    turn(cache, prompt(5, 5))
    assert cached(cache, 1, 2, 3) == [3, 0, 4]
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


@pytest.fixture
def faulty() -> Any:
    """The class, whose fault every cache of the test sees."""

    class OfThisTest(Faulty):
        pass

    return OfThisTest


def test_a_policy_that_raises_when_it_is_asked_about_hints(faulty: Any) -> None:
    cache = make_cache(faulty)
    faulty.fault = "takes_hints"
    with pytest.raises(PolicyError, match="OfThisTest: takes_hints raised KeyError: 'broken takes_hints'"):
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
    with pytest.raises(
        PolicyError, match=r"it raised KeyError in remove\(\), for an evicted block; set another policy"
    ):
        cache.allocate(prompt(4), session="d")
    cache.set_eviction_policy("lru")
    turn(cache, prompt(4), "d")
    assert cached(cache, 1, 2, 3) == [0, 4, 4]


def test_a_policy_that_names_a_block_twice(faulty: Any) -> None:
    cache = make_cache(faulty)
    for number, session in enumerate("abc", 1):
        turn(cache, prompt(number), session)
    assert cache.block(1).is_cached
    faulty.fault = "evict"
    with pytest.raises(PolicyError, match="OfThisTest: evict returned block 1 twice"):
        cache.allocate(prompt(4))
    cache.set_eviction_policy("lru")
    turn(cache, prompt(4))
    assert cached(cache, 1, 2, 4) == [0, 4, 4]


def test_a_block_revived_after_a_hint_named_it_is_no_hinted_eviction() -> None:
    """The hint names blocks of tenant a, tenant b gives a block instead, and a's block loses its content in use."""
    config = CacheConfig(
        num_blocks=9,
        block_size=4,
        max_model_len=64,
        watermark=0.0,
        hash_seed=5,
        tenants=(Tenant("a"), Tenant("b")),
        hints=HintConfig(max_sessions=4),
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
