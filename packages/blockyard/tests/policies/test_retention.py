"""Retention: which blocks stay, for how long, within what budget, and what ends a wish."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import InvalidArgument, LayerGroup, OverBudget, PolicyError
from blockyard.answers import Resize, RetentionEnds
from blockyard.observe import describe_history
from blockyard_testing.cached import cached_tokens
from blockyard_testing.own_policies import MRU

from ..support.checked import Checked, prompt


def retaining(num_blocks: int = 10, retention_blocks: int = 9, **settings: Any) -> Checked:
    return Checked(num_blocks, retention_blocks=retention_blocks, **settings)


def cached(cache: Checked, number: int, num_tokens: int = 4) -> list[int]:
    """An idle cached prompt; its tokens."""
    tokens = prompt(number, num_tokens)
    cache.free(cache.prefilled(tokens))
    return tokens


def is_cached(cache: Checked, tokens: list[int]) -> bool:
    """Whether all full blocks of `tokens` would be hit; asks without changing the order."""
    return bool(cached_tokens(cache.cache, tokens) == len(tokens) // 4 * 4)


def evict(cache: Checked, count: int) -> None:
    """Take `count` blocks and give them back empty."""
    pool = cache.cache.pool
    empty = sum(1 for block in pool.free_block_ids() if not pool.cached_mask()[block])
    pool.free_blocks(pool.get_new_blocks(empty + count))
    cache.cache.check()


def survivors(cache: Checked, prompts: list[list[int]]) -> list[int]:
    return [number for number, tokens in enumerate(prompts) if is_cached(cache, tokens)]


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "s3fifo", "arc", "score", "density", MRU])
def test_retained_blocks_go_last_and_the_lowest_priority_first(policy: object) -> None:
    cache = retaining(eviction_policy=policy)
    prompts = [cached(cache, number) for number in range(6)]
    for number, priority in ((0, 3), (1, 1), (2, 2), (3, 1)):
        assert cache.retain(prompts[number], priority=priority) == 1
    evict(cache, 2)
    assert survivors(cache, prompts) == [0, 1, 2, 3]
    order = []
    for _ in range(4):
        before = survivors(cache, prompts)
        evict(cache, 1)
        order += [number for number in before if number not in survivors(cache, prompts)]
    assert order == [1, 3, 2, 0]


def test_a_wish_is_no_pin() -> None:
    cache = retaining()
    tokens = cached(cache, 1, 36)
    assert cache.retain(tokens) == 9
    seq = cache.allocate(prompt(2, 36))
    assert len(cache.row(seq)) == 9


def test_a_held_block_is_retained_when_it_becomes_idle() -> None:
    cache = retaining()
    seq = cache.prefilled(prompt(0, 5))
    assert cache.retain(prompt(0, 5), priority=1) == 1
    others = [cached(cache, number) for number in (1, 2, 3)]
    cache.free(seq)
    evict(cache, 3)
    assert is_cached(cache, prompt(0, 4))
    assert survivors(cache, others) == []


def test_a_revived_block_keeps_its_priority() -> None:
    cache = retaining()
    kept = cached(cache, 0)
    cache.retain(kept, priority=1)
    cache.free(cache.prefilled([*kept, 9]))
    other = cached(cache, 1)
    evict(cache, 1)
    assert is_cached(cache, kept)
    assert not is_cached(cache, other)


@pytest.mark.parametrize("held", [False, True])
def test_a_wish_changes_and_is_taken_back(held: bool) -> None:
    cache = retaining()
    seq = cache.prefilled(prompt(0, 5))
    if not held:
        cache.free(seq)
    first, second, third = prompt(0, 4), cached(cache, 1), cached(cache, 2)
    cache.retain(first, priority=1)
    cache.retain(second, priority=5)
    cache.retain(first, priority=7)
    cache.retain(second, priority=0)
    if held:
        cache.free(seq)
    evict(cache, 2)
    assert survivors(cache, [first, second, third]) == [0]


def test_a_prompt_that_is_cached_in_part() -> None:
    cache = retaining()
    cached(cache, 0, 8)
    assert cache.retain([*prompt(0, 8), 1, 2, 3, 4]) == 2
    assert cache.retain(prompt(0, 7)) == 1
    assert cache.retain(prompt(5, 8)) == 0


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("held", [False, True])
def test_a_wish_expires(held: bool) -> None:
    cache = retaining()
    seq = cache.prefilled(prompt(0, 5))
    if not held:
        cache.free(seq)
    short, long = prompt(0, 4), cached(cache, 1)
    cache.retain(short, priority=2, expires_at=10)
    cache.retain(long, priority=1, expires_at=10.5)
    cache.advance_time(9.9)
    other = cached(cache, 2)
    evict(cache, 1)
    assert survivors(cache, [long, other]) == [0]
    cache.advance_time(10)
    if held:
        cache.free(seq)
    evict(cache, 1)
    assert survivors(cache, [short, long]) == [1]
    cache.advance_time(11)
    younger = cached(cache, 3)
    evict(cache, 1)
    assert survivors(cache, [long, younger]) == [1]


def test_a_later_wish_replaces_the_expiry() -> None:
    cache = retaining()
    first, second = cached(cache, 0), cached(cache, 1)
    cache.retain(first, priority=1, expires_at=5)
    cache.retain(first, priority=1)
    cache.retain(second, priority=1)
    cache.retain(second, priority=1, expires_at=5)
    cache.advance_time(6)
    evict(cache, 1)
    assert survivors(cache, [first, second]) == [0]


def test_an_expiry_in_the_past_ends_at_the_next_word_about_time() -> None:
    cache = retaining(retention_blocks=1)
    cache.advance_time(7)
    cache.retain(cached(cache, 0), priority=1, expires_at=3)
    cache.advance_time(7)
    assert cache.retain(cached(cache, 1), priority=1) == 1


def test_time_never_goes_back() -> None:
    cache = retaining()
    cache.advance_time(3)
    with pytest.raises(InvalidArgument, match=r"now is 2\.0; it must be at least 3\.0"):
        cache.advance_time(2)


# ---------------------------------------------------------------- the budget


def test_over_budget_changes_nothing() -> None:
    cache = retaining(retention_blocks=2)
    prompts = [cached(cache, number) for number in range(4)]
    pair = cached(cache, 9, 8)
    cache.retain(prompts[3], priority=1)
    with pytest.raises(OverBudget, match="2 more blocks would be retained; 1 of 2 are already"):
        cache.retain(pair, priority=5)
    evict(cache, 5)
    assert survivors(cache, [*prompts, pair]) == [3]


def test_what_is_retained_already_costs_no_budget() -> None:
    cache = retaining(retention_blocks=2)
    pair = cached(cache, 0, 8)
    assert cache.retain(pair, priority=1) == 2
    assert cache.retain(pair, priority=2) == 2
    with pytest.raises(OverBudget):
        cache.retain(cached(cache, 1), priority=1)
    cache.retain(pair, priority=0)
    assert cache.retain(prompt(1, 4), priority=1) == 1


def test_evicted_and_expired_wishes_give_their_budget_back() -> None:
    cache = retaining(retention_blocks=1)
    cache.retain(cached(cache, 0), priority=1)
    evict(cache, 1)
    cache.retain(cached(cache, 1), priority=1, expires_at=1)
    cache.advance_time(2)
    assert cache.retain(cached(cache, 2), priority=1) == 1


def test_wishes_for_what_a_shrunken_pool_dropped_give_their_budget_back() -> None:
    cache = retaining(retention_blocks=2)
    seq = cache.prefilled(prompt(0, 9))
    dropped, held = cached(cache, 1), prompt(0, 4)
    cache.retain(dropped, priority=1)
    cache.retain(held, priority=1)
    assert cache.resize(2) is Resize.DEFERRED
    assert cache.resize(10) is Resize.APPLIED
    assert not is_cached(cache, dropped)
    assert cache.retain(cached(cache, 2), priority=1) == 1
    with pytest.raises(OverBudget):
        cache.retain(cached(cache, 3), priority=1)
    cache.free(seq)
    evict(cache, 3)
    assert is_cached(cache, held)


def test_a_held_block_that_is_written_to_gives_its_budget_back() -> None:
    cache = retaining(retention_blocks=1)
    seq = cache.prefilled(prompt(0, 5))
    cache.retain(prompt(0, 4), priority=1)
    cache.truncate(seq, 2)
    cache.append([seq], [77])
    cache.compute(seq)
    assert not is_cached(cache, prompt(0, 4))
    assert cache.retain(cached(cache, 1), priority=1) == 1


def test_a_cache_without_a_budget() -> None:
    cache = Checked(10)
    tokens = cached(cache, 0)
    with pytest.raises(InvalidArgument, match="retention_blocks is 0"):
        cache.retain(tokens)


@pytest.mark.parametrize(
    "named", [{"priority": -1}, {"priority": 2**20 + 1}, {"priority": 1.5}, {"expires_at": "soon"}]
)
def test_bad_wishes(named: dict[str, Any]) -> None:
    cache = retaining(retention_blocks=1)
    tokens = cached(cache, 0)
    with pytest.raises(InvalidArgument, match=f"{next(iter(named))} is "):
        cache.retain(tokens, **named)
    assert cache.retain(cached(cache, 1), priority=1) == 1


# ---------------------------------------------------------------- what ends a wish


def test_a_new_content_does_not_inherit() -> None:
    """The block of an evicted wish, written anew, is as any other."""
    cache = retaining(num_blocks=3)
    cache.retain(cached(cache, 0), priority=9)
    evict(cache, 1)
    first, second = cached(cache, 1), cached(cache, 2)
    evict(cache, 1)
    assert survivors(cache, [first, second]) == [1]


def test_a_new_content_in_a_held_block_does_not_inherit() -> None:
    """A sequence is cut inside its retained block, goes on with other tokens and publishes the same block anew."""
    cache = retaining()
    seq = cache.prefilled(prompt(0, 5))
    block = cache.row(seq)[0]
    cache.retain(prompt(0, 4), priority=9)
    cache.truncate(seq, 2)
    for token in (7, 8, 9):
        cache.append([seq], [token])
        cache.compute(seq)
    assert cache.row(seq)[0] == block
    changed = [*prompt(0, 2), 7, 8]
    assert is_cached(cache, changed)
    cache.free(seq)
    younger = cached(cache, 1)
    evict(cache, 1)
    assert survivors(cache, [changed, younger]) == [1]


def test_a_reset_ends_all_wishes() -> None:
    cache = retaining(retention_blocks=2)
    seq = cache.prefilled(prompt(0, 5))
    cache.retain(prompt(0, 4), priority=1)
    cache.retain(cached(cache, 1), priority=1)
    cache.reset_prefix_cache()
    assert cache.retain(prompt(0, 4), priority=1) == 0
    cache.free(seq)
    tokens = [cached(cache, number) for number in (2, 3, 4)]
    assert cache.retain(tokens[0], priority=1) + cache.retain(tokens[1], priority=1) == 2
    evict(cache, 1)
    assert survivors(cache, tokens) == [0, 1]


def test_another_policy_ends_all_wishes() -> None:
    cache = retaining(retention_blocks=1)
    first, second = cached(cache, 0), cached(cache, 1)
    cache.retain(first, priority=1)
    cache.set_eviction_policy("fifo")
    evict(cache, 1)
    assert survivors(cache, [first, second]) == [1]
    assert cache.retain(second, priority=1) == 1


def test_wishes_in_a_pool_that_grows() -> None:
    cache = retaining(num_blocks=4)
    kept = cached(cache, 0)
    cache.retain(kept, priority=1)
    assert cache.resize(12) is Resize.APPLIED
    more = [cached(cache, number) for number in range(1, 11)]
    cache.retain(more[4], priority=2)
    evict(cache, 8)
    assert is_cached(cache, kept)
    assert is_cached(cache, more[4])
    evict(cache, 2)
    assert survivors(cache, [kept, more[4]]) == [1]


# ---------------------------------------------------------------- layer groups


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_retention_with_layer_groups(policy: str) -> None:
    """A retained prompt has a block in each group that still has one; both stay, and it is hit."""
    groups = (LayerGroup(4), LayerGroup(4, 6))
    cache = Checked(14, groups=groups, retention_blocks=6, eviction_policy=policy)
    kept = prompt(0, 9)
    cache.free(cache.prefilled(kept))
    assert cache.retain(kept, priority=1) == 4
    for number in range(1, 8):
        cache.free(cache.prefilled(prompt(number, 9)))
    seq = cache.allocate(kept)
    assert cache.num_computed_tokens(seq) == 8
    cache.free(seq)
    with pytest.raises(OverBudget, match="4 of 6 are already"):
        cache.retain(prompt(7, 9), priority=1)
    cache.retain(kept, priority=0)
    for number in range(1, 8):
        cache.free(cache.prefilled(prompt(number, 9)))
    assert cache.num_computed_tokens(cache.allocate(kept)) == 0


# ---------------------------------------------------------------- a policy inside that fails


class Greedy(MRU):
    """Names a block that it was told of once, whoever has it now."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.first = 0

    def insert(self, block: int, key: int, depth: int) -> None:
        self.first = self.first or block
        super().insert(block, key, depth)

    def evict(self) -> int:
        return self.first


def test_a_policy_that_names_a_retained_block() -> None:
    """The block is idle, but the policy was told that it is not its to choose; the error names the user's policy."""
    cache = retaining(num_blocks=4, eviction_policy=Greedy)
    kept, *others = (cached(cache, number) for number in range(3))
    cache.retain(kept, priority=1)
    with pytest.raises(PolicyError, match="eviction policy Greedy: evict raised ValueError: block 1 is retained"):
        cache.allocate(prompt(5, 4))
    assert survivors(cache, [kept, *others]) == [0, 1, 2]
    cache.set_eviction_policy("lru")
    assert len(cache.row(cache.allocate(prompt(5, 12)))) == 3


class Deaf(MRU):
    """Cannot be told that a block is idle no longer."""

    def remove(self, block: int) -> None:
        raise LookupError("not found")


def test_a_policy_that_fails_when_a_wish_takes_a_block_from_it() -> None:
    cache = retaining(num_blocks=4, eviction_policy=Deaf)
    tokens = [cached(cache, number) for number in range(3)]
    assert cache.retain(tokens[0], priority=1) == 1, "the wish is carried out; it is the next question that fails"
    with pytest.raises(PolicyError, match="Deaf: remove raised LookupError: not found"):
        cache.retain(tokens[0], priority=1)
    with pytest.raises(PolicyError, match="Deaf: remove raised LookupError: not found"):
        cache.allocate(prompt(5, 4))
    cache.set_eviction_policy("lru")
    assert cache.retain(tokens[0], priority=1) == 1
    evict(cache, 2)
    assert survivors(cache, tokens) == [0]


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize("policy", ["lru", "density"])
def test_each_end_is_counted_by_its_cause_and_told_to_the_history(policy: str) -> None:
    cache = retaining(eviction_policy=policy, history_size=999)
    prompts = [cached(cache, number) for number in range(6)]
    for tokens in prompts:
        cache.retain(tokens, priority=1, expires_at=50.0 if tokens == prompts[1] else None)
    told = {}

    def ends(number: int) -> None:
        told[number] = (cache.cache.num_retained_of(prompts[number]), cache.cache.ended_retentions)

    evict(cache, 1)
    ends(0)
    cache.cache.advance_time(51.0)
    ends(1)
    cache.retain(prompts[2], priority=0)
    ends(2)
    cache.cache.retain(prompts[2], priority=0)  # which has no wish any more
    assert cache.cache.num_retained_of(prompts[3]) == 1
    cache.cache.resize(2)
    ends(3)
    assert [kept for kept, _ in told.values()] == [0, 0, 0, 0]
    assert [ended for _, ended in told.values()] == [
        RetentionEnds(1, 0, 0, 0),
        RetentionEnds(1, 1, 0, 0),
        RetentionEnds(1, 1, 1, 0),
        RetentionEnds(1, 1, 1, 3),
    ]
    events = [(event.action, event.actor) for event in cache.cache.history() if event.action.startswith("retention")]
    assert [action for action, _ in events] == [
        "retention evicted",
        "retention expired",
        "retention released",
        *["retention dropped"] * 3,
    ]
    assert events[1][1] == "advance_time"
    assert events[2][1] == "retain"
    assert "retention dropped 3 blocks in 3" in describe_history(cache.cache)


@pytest.mark.parametrize(
    "end", [lambda cache: cache.reset_prefix_cache(), lambda cache: cache.set_eviction_policy("lfu")]
)
def test_what_ends_all_retentions_counts_them(end: Any) -> None:
    cache = retaining()
    for number in range(3):
        cache.retain(cached(cache, number))
    end(cache.cache)
    assert cache.cache.ended_retentions == RetentionEnds(0, 0, 0, 3)
    assert cache.cache.num_retained_blocks == 0


def test_a_running_request_that_ends_a_retention_is_named() -> None:
    cache = retaining(history_size=99)
    tokens = cached(cache, 0, 8)
    cache.retain(tokens)
    seq = cache.cache.allocate(prompt(1, 36), holder="greedy")
    (event,) = {(event.action, event.actor) for event in cache.cache.history() if event.action.startswith("retention")}
    assert event == ("retention evicted", "allocate greedy")
    assert cache.cache.num_retained_of(tokens) == 0
    cache.cache.free(seq)


def test_of_a_retained_prompt_the_last_blocks_go_first() -> None:
    cache = retaining()
    tokens = cached(cache, 0, 16)
    cache.retain(tokens)
    left = []
    for _ in range(4):
        evict(cache, 1)
        left.append(cache.cache.num_retained_of(tokens))
    assert left == [3, 2, 1, 0]


def test_without_a_budget_nothing_is_retained_and_nothing_ends() -> None:
    cache = Checked(10)
    assert cache.cache.num_retained_of(cached(cache, 0)) == 0
    assert cache.cache.ended_retentions == RetentionEnds(0, 0, 0, 0)
