"""A cache per rank: hits attract requests, load repels them, and calls for all ranks are all or nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import (
    Admission,
    CacheConfig,
    CacheSalt,
    ConcurrentCall,
    InvalidArgument,
    KVCacheManager,
    NeverFits,
    OutOfBlocks,
    UnknownSequence,
)
from blockyard.answers import HintOutcome
from blockyard.config import cache_config
from blockyard.tenants import Tenant
from blockyard_engine.parallel import CacheGroup
from blockyard_testing import seeds
from blockyard_testing.cached import cached_tokens


def group_of(count: int = 3, load_weight: float = 1.0, **options: Any) -> CacheGroup:
    config = cache_config(**{"num_blocks": 101, "block_size": 4, "max_num_seqs": 16, "watermark": 0.0, **options})
    return CacheGroup([KVCacheManager(config) for _ in range(count)], load_weight)


def run(group: CacheGroup, tokens: list[int], free: bool = True) -> Any:
    placed = group.allocate(tokens)
    cache = group.caches[placed.rank]
    cache.reserve([placed.seq])
    cache.commit([placed.seq], len(tokens) - placed.num_hit_tokens)
    if free:
        cache.free(placed.seq)
    return placed


def test_prompts_without_a_hit_go_to_the_ranks_in_turn() -> None:
    group = group_of()
    placed = [run(group, [number] * 8).rank for number in range(6)]
    assert placed == [0, 1, 2, 0, 1, 2]


def test_a_prompt_is_sent_to_the_rank_with_the_longest_hit() -> None:
    group = group_of()
    for number in range(3):
        run(group, list(range(100 * number, 100 * number + 40)))
    assert [run(group, [*range(100 * n, 100 * n + 40), 7]).rank for n in (2, 0, 1, 1)] == [2, 0, 1, 1]
    assert run(group, [*range(100, 140), 8]).num_hit_tokens == 40


def test_a_load_larger_than_the_hit_moves_requests_away() -> None:
    group = group_of(2)
    run(group, list(range(40)))  # ten blocks on rank 0
    run(group, [999], free=True)
    prompt = [*range(40), 77]
    held = [run(group, [500 + number] * 4 * 3, free=False) for number in range(3)]
    loads = [cache.num_used_blocks for cache in group.caches]
    assert sorted(loads) == [3, 6]
    assert group.costs(prompt) == [41 / 4 - 10 + loads[0], 41 / 4 + loads[1]]
    group.caches[0].allocate(list(range(2000, 2060)))
    assert group.allocate(prompt).rank == 1
    assert CacheGroup(group.caches, load_weight=0).allocate(prompt).rank in (0, 1)
    assert len(held) == 3


def test_without_load_only_the_hit_counts() -> None:
    group = group_of(2, load_weight=0)
    run(group, list(range(40)))
    for number in range(4):
        group.caches[0].allocate([9000 + number] * 60)
    assert group.allocate([*range(40), 5]).rank == 0


def test_a_burst_of_equal_prompts_stays_together_while_it_is_computed() -> None:
    group = group_of(load_weight=0.5)
    ranks = {group.allocate([*range(40), number]).rank for number in range(5)}
    assert len(ranks) == 1


def test_a_rank_without_room_is_skipped() -> None:
    group = group_of(2, max_num_seqs=1)
    first = group.allocate(list(range(40)))
    assert group.allocate([*range(40), 1]).rank != first.rank
    assert group.try_allocate([*range(40), 2]) is Admission.LATER
    with pytest.raises(OutOfBlocks, match="none of 2 ranks has room"):
        group.allocate([1])
    assert group.try_allocate(list(range(1000))) is Admission.NEVER
    with pytest.raises(NeverFits, match="a prompt of 1000 tokens"):
        group.allocate(list(range(1000)))
    assert group.num_seqs == 2


def test_ranks_may_have_pools_of_different_sizes() -> None:
    small, large = (KVCacheManager(CacheConfig(num_blocks=count, block_size=4)) for count in (5, 50))
    group = CacheGroup([small, large])
    assert group.allocate(list(range(100))).rank == 1
    assert group.try_allocate(list(range(1000))) is Admission.NEVER


def test_sequences_of_several_ranks_are_freed_all_or_none() -> None:
    group = group_of()
    placed = [group.allocate([number] * 9) for number in range(5)]
    assert [group.rank_of(each.seq) for each in placed] == [each.rank for each in placed]
    handles = [each.seq for each in placed]
    for wrong in ([*handles, handles[0]], [*handles, max(handles) + 1]):
        with pytest.raises(UnknownSequence):
            group.free(wrong)
        assert group.num_seqs == 5
    for junk in ("ab", None, [1.5], [True]):
        with pytest.raises((InvalidArgument, UnknownSequence)):
            group.free(junk)  # type: ignore[arg-type]
    assert len(group.leak_report()) == 5
    group.free(handles[:4])
    group.free(handles[4])
    assert group.leak_report() == []
    assert group.num_used_blocks == 0


def test_the_leak_report_covers_all_ranks() -> None:
    group = group_of()
    for number in range(7):
        run(group, [*range(8), number], free=number % 2 == 0)
    stats, each = group.stats(), [cache.stats() for cache in group.caches]
    assert stats.num_prompt_tokens == 63
    assert stats.num_hit_tokens == sum(one.num_hit_tokens for one in each) > 0
    assert stats.num_running_seqs == group.num_seqs == 3
    assert stats.num_free_blocks + stats.num_used_blocks == 300
    assert group.num_free_blocks == stats.num_free_blocks
    assert 0 < stats.hit_rate < 1


def test_tenants_are_added_up() -> None:
    group = group_of(2, tenants=(Tenant("a", min_blocks=10, max_idle=7), Tenant("b", weight=3)))
    for cache, tenant in zip(group.caches, "ab", strict=True):
        seq = cache.allocate([1, 2, 3, 4, 5], extra_keys=(CacheSalt(tenant),))
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
    uses = {use.name: use for use in group.stats().tenants}
    assert list(uses) == ["*", "a", "b"]
    assert (uses["a"].num_held, uses["b"].num_held, uses["*"].num_held) == (2, 2, 0)
    assert (uses["a"].min_blocks, uses["a"].max_idle, uses["a"].max_held, uses["b"].weight) == (20, 14, None, 3)
    assert group.stats().num_used_blocks == 4


def test_a_reset_is_all_or_nothing() -> None:
    group = group_of()
    for number in range(3):
        run(group, [number] * 8)
    raised: list[bool] = []

    class Resets:
        def __index__(self) -> int:
            for call in (group.reset_prefix_cache, lambda: group.advance_time(5)):
                with pytest.raises(ConcurrentCall):
                    call()
            raised.append(True)
            return 1

    cache = group.caches[2]
    cache.pool.free_blocks(cache.pool.get_new_blocks(Resets()))
    assert raised
    assert [each.generation for each in group.caches] == [0, 0, 0]
    group.reset_prefix_cache()
    assert [each.generation for each in group.caches] == [1, 1, 1]
    group.advance_time(5)
    assert run(group, [1] * 8).num_hit_tokens == 0


def test_extra_keys_decide_the_hit() -> None:
    group = group_of()
    salt = (CacheSalt("a"),)
    placed = group.allocate(list(range(40)), extra_keys=salt)
    cache = group.caches[placed.rank]
    cache.reserve([placed.seq])
    cache.commit([placed.seq], 40)
    cache.free(placed.seq)
    assert group.allocate([*range(40), 1], extra_keys=salt)[::2] == (placed.rank, 40)
    assert group.allocate([*range(40), 1]).num_hit_tokens == 0


@pytest.mark.parametrize("tokens", [None, 5, [], [-1], ["a"], iter([1, 2])])
def test_bad_prompts_change_nothing(tokens: Any) -> None:
    group = group_of()
    for call in (group.allocate, group.try_allocate):
        with pytest.raises(InvalidArgument):
            call(tokens)
    assert group.num_seqs == 0


@pytest.mark.parametrize("caches", [[], None, [3], "ab"])
def test_bad_caches_are_refused(caches: Any) -> None:
    with pytest.raises(InvalidArgument, match="caches"):
        CacheGroup(caches)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "1", True])
def test_bad_load_weights_are_refused(weight: Any) -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=5))
    with pytest.raises(InvalidArgument, match="load_weight"):
        CacheGroup([cache], weight)
    with pytest.raises(InvalidArgument, match="twice"):
        CacheGroup([cache, cache])


def conversations(group: CacheGroup, place: Any, seed: int) -> tuple[float, float]:
    """Return the share of prompt tokens hit and the largest rank's share of the sequences, for many chats."""
    draw = random.Random(seed)
    chats = [[draw.randrange(1000) for _ in range(12)] for _ in range(24)]
    running: list[Any] = []
    counts = [0] * len(group.caches)
    for _ in range(600):
        chat = draw.choice(chats)
        chat += [draw.randrange(1000) for _ in range(4)]
        if len(chat) > 60:
            del chat[12:]
        if len(running) > 8:
            rank, seq = running.pop(0)
            group.caches[rank].free(seq)
        rank, seq = place(group, list(chat))
        cache = group.caches[rank]
        count = len(chat) - cache.num_computed_tokens(seq)
        if cache.reserve([seq]).all_fit:
            cache.commit([seq], count)
        running.append((rank, seq))
        counts[rank] += 1
    group.check()
    for rank, seq in running:
        group.caches[rank].free(seq)
    assert group.leak_report() == []
    return group.stats().hit_rate, max(counts) / sum(counts)


def test_chats_hit_more_than_at_random_and_no_rank_gets_all() -> None:
    seed = seeds.run_seed()
    draw = random.Random(seed)

    def at_random(group: CacheGroup, tokens: list[int]) -> Any:
        rank = draw.randrange(len(group.caches))
        return rank, group.caches[rank].allocate(tokens)

    ours, ours_most = conversations(group_of(4), lambda group, tokens: group.allocate(tokens)[:2], seed)
    theirs, _ = conversations(group_of(4), at_random, seed)
    seeds.lines.append(f"cache group: {ours:.2f} hit, {theirs:.2f} at random, {ours_most:.2f} of all on one rank")
    assert ours > theirs + 0.1
    assert ours_most < 0.5


def test_a_free_inside_a_call_waits_for_its_end() -> None:
    group = group_of(2)
    first, second = group.allocate([1] * 9), group.allocate([2] * 9)
    left: list[int] = []

    class Frees:
        def __index__(self) -> int:
            group.free([first.seq, second.seq])
            left.append(group.num_seqs)
            return 1

    pool = group.caches[first.rank].pool
    pool.free_blocks(pool.get_new_blocks(Frees()))
    assert left == [1]
    assert group.leak_report() == []
    group.check()


# ---------------------------------------------------------------- hints


def turn(group: CacheGroup, rank: int, tokens: list[int], session: str | None) -> None:
    """Run a sequence of a session on this rank, from start to end."""
    cache = group.caches[rank]
    seq = cache.allocate(tokens, session=session)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    cache.free(seq)


def test_a_hint_reaches_every_rank_that_knows_the_session() -> None:
    """Its blocks are evicted first on the two ranks that know it; on the third the order does not change."""
    group = group_of(3, num_blocks=13, max_model_len=64)
    for rank in range(3):
        for number, name in enumerate("xys"):
            turn(group, rank, [1000 * number + place for place in range(16)], None if rank == 2 else name)
    assert group.hint("s", over=True) is HintOutcome.ACCEPTED
    for rank in range(3):
        turn(group, rank, [9000 + place for place in range(16)], None)
    cached = [[cached_tokens(c, [1000 * n + p for p in range(16)]) for n in range(3)] for c in group.caches]
    assert cached == [[16, 16, 0], [16, 16, 0], [0, 16, 16]]
    group.check()


def test_the_best_outcome_of_a_hint_counts() -> None:
    group = group_of(2)
    assert group.hint("s", over=True) is HintOutcome.UNKNOWN
    turn(group, 1, list(range(16)), "s")
    assert group.hint("s", over=True) is HintOutcome.ACCEPTED
    assert group.hint("t", over=True) is HintOutcome.UNKNOWN


def test_a_hint_for_a_sequence_reaches_its_own_rank() -> None:
    group = group_of(3, num_blocks=13, max_model_len=64)
    placed = [run(group, [100 * number + place for place in range(16)], free=False) for number in range(3)]
    assert group.hint(placed[1].seq, over=True) is HintOutcome.ACCEPTED
    assert [cache.num_sessions for cache in group.caches] == [0, 1, 0]
    group.free([one.seq for one in placed])
    with pytest.raises(UnknownSequence):
        group.hint(placed[1].seq, over=True)
    group.check()


@pytest.mark.parametrize("said", [{"over": 1}, {"over": None}])
def test_a_bad_hint_reaches_no_rank(said: dict[str, Any]) -> None:
    group = group_of(2)
    for rank in range(2):
        turn(group, rank, list(range(16)), "s")
    with pytest.raises(InvalidArgument):
        group.hint("s", **said)
    with pytest.raises(InvalidArgument, match="target"):
        group.hint("", over=True)
    group.check()
