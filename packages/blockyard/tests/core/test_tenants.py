"""Tenants that share a pool: random worlds beside a dictionary, limits, and who gives when memory is short."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import blockyard
from blockyard import (
    Admission,
    CacheConfig,
    CacheSalt,
    InvalidArgument,
    LayerGroup,
    LoRA,
    NeverFits,
    OutOfBlocks,
    OverBudget,
    SeqStatus,
    StateSpec,
)
from blockyard.core.budget import SharedBudget
from blockyard.tenants import OTHERS, Tenant, TenantGroup
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.world import NUM_CALLS

from ..support.checked import Checked, prompt
from ..support.snapshot import snapshot
from ..support.tenant_world import TenantWorld

#: Seeds of worlds in which all that must have happened does.
EVENTFUL = (1, 2, 3, 5, 8, 13, 21, 34, 100, 105, 113)


def test_what_each_tenant_holds_is_what_its_blocks_say() -> None:
    counts: Counter[str] = Counter()
    seeds = [*EVENTFUL, *(run_seed() + number for number in range(draws(120, 24)))]
    for seed in seeds:
        world = TenantWorld(blockyard, seed)
        try:
            world.run(NUM_CALLS)
        except Exception as error:
            error.add_note(f"TenantWorld(blockyard, {seed}), after {len(world.story)} calls")
            raise
        counts += world.counts
    wanted = (
        "guarantees kept",
        "blocks taken back",
        "allocate: OutOfBlocks",
        "swap_in: OutOfBlocks",
        "retain: OverBudget",
    )
    assert {name: counts[name] for name in wanted if counts[name] == 0} == {}


def full_of(cache: Checked, numbers: dict[str, int]) -> None:
    """Idle blocks of each tenant: prompts of that many blocks, one after another."""
    for place, (name, count) in enumerate(numbers.items()):
        for block in range(count):
            cache.free(prefilled(cache, name, prompt(100 * place + block, 4)))


def prefilled(cache: Checked, name: str, tokens: list[int]) -> int:
    seq = int(cache.allocate(tokens, extra_keys=(CacheSalt(name),)))
    cache.compute(seq)
    return seq


def idle_of(cache: Checked) -> dict[str, int]:
    return {use.name: use.num_idle for use in cache.stats().tenants}


def take(cache: Checked, name: str, num_blocks: int) -> int:
    return int(cache.allocate(prompt(9999, 4 * num_blocks), extra_keys=(CacheSalt(name),)))


def test_idle_memory_is_lent_and_comes_back_by_weight() -> None:
    """Of 18 blocks b has 12 and a 6, with twice the weight: b gives until both are as far above."""
    cache = Checked(num_blocks=19, tenants=(Tenant("a", weight=2), Tenant("b"), Tenant("c", min_blocks=9)))
    full_of(cache, {"a": 6, "b": 12})
    seen = []
    for number in range(4):
        cache.allocate(prompt(9000 + number, 12), extra_keys=(CacheSalt("c"),))
        seen.append((idle_of(cache)["a"], idle_of(cache)["b"]))
    assert seen == [(6, 9), (6, 6), (6, 3), (4, 2)]
    assert [use.num_evicted_blocks for use in cache.stats().tenants] == [0, 2, 10, 0]


@pytest.mark.parametrize(
    "tenants", [(Tenant("a"), Tenant("b")), (TenantGroup("both", (Tenant("a"), Tenant("b"))),)], ids=["alone", "group"]
)
def test_what_a_prompt_takes_counts_while_room_is_made_for_it(tenants: tuple[Any, ...]) -> None:
    """a and b have ten idle blocks each; a prompt of ten pushes out a's own, for b is not above it."""
    cache = Checked(num_blocks=21, tenants=tenants)
    full_of(cache, {"a": 10, "b": 10})
    take(cache, "a", 10)
    assert idle_of(cache) == {"*": 0, "a": 0, "b": 10}


def test_a_member_within_its_guarantee_gives_nothing_though_its_group_is_far_above() -> None:
    pair = TenantGroup("pair", (Tenant("kept", min_blocks=4), Tenant("big")))
    cache = Checked(num_blocks=21, tenants=(pair, Tenant("c"), Tenant("d")))
    take(cache, "big", 12)
    full_of(cache, {"kept": 4, "c": 4})
    assert cache.can_allocate([1] * 20, extra_keys=(CacheSalt("d"),)) is Admission.LATER
    take(cache, "d", 4)
    assert idle_of(cache) == {"*": 0, "kept": 4, "big": 0, "c": 0, "d": 0}


def test_what_a_tenant_took_meanwhile_counts() -> None:
    """Both have four idle blocks; then a takes six that cache nothing, and has to give from there on."""
    cache = Checked(num_blocks=21, tenants=(Tenant("a"), Tenant("b"), Tenant("c")))
    full_of(cache, {"a": 4, "b": 4})
    cache.free(take(cache, "c", 13))
    assert idle_of(cache) == {"*": 0, "a": 3, "b": 4, "c": 0}
    take(cache, "a", 6)
    take(cache, "c", 9)
    assert idle_of(cache) == {"*": 0, "a": 1, "b": 4, "c": 0}


def test_in_one_step_each_within_its_guarantee_gives_to_itself() -> None:
    """Four sequences grow by a block each; all free blocks are idle and within guarantees: b's are the oldest."""
    cache = Checked(num_blocks=9, tenants=(Tenant("a", min_blocks=4), Tenant("b", min_blocks=4)))
    full_of(cache, {"b": 2, "a": 2})
    seqs = [prefilled(cache, name, prompt(50 + number, 4)) for number, name in enumerate("aabb")]
    assert idle_of(cache) == {"*": 0, "a": 2, "b": 2}
    assert cache.reserve([seqs[0], seqs[2]], 1).all_fit
    assert idle_of(cache) == {"*": 0, "a": 1, "b": 1}
    assert cache.reserve([seqs[1]], 1).all_fit
    assert idle_of(cache) == {"*": 0, "a": 0, "b": 1}


def test_who_gets_an_empty_block_gives_none() -> None:
    """The first of two that grow by a block gets the empty one, and the second one's own idle block goes."""
    cache = Checked(num_blocks=9, tenants=(Tenant("a", min_blocks=4), Tenant("b", min_blocks=4)))
    full_of(cache, {"b": 2, "a": 1})
    seqs = [prefilled(cache, name, prompt(50 + number, 4)) for number, name in enumerate("aabb")]
    assert cache.reserve([seqs[0], seqs[2]], 1).all_fit
    assert idle_of(cache) == {"*": 0, "a": 1, "b": 1}


def groups_drawn(choose: random.Random) -> tuple[TenantGroup, ...]:
    groups: list[TenantGroup] = []
    for number in range(choose.randint(1, 3)):
        guarantees = [choose.choice((0, choose.randint(0, 6))) for _ in range(choose.randint(1, 3))]
        members = tuple(
            Tenant(f"{number}.{place}", 1, guarantee, choose.choice((None, guarantee + choose.randint(0, 9))))
            for place, guarantee in enumerate(guarantees)
        )
        guarantee = sum(guarantees) + choose.choice((0, 0, choose.randint(1, 6)))
        groups.append(
            TenantGroup(f"{number}", members, 1, guarantee, choose.choice((None, guarantee + choose.randint(0, 9))))
        )
    return tuple(groups)


def most_that_leaves_the_guarantees(
    groups: tuple[TenantGroup, ...], held: dict[str, int], name: str, free: int, watermark: int
) -> int:
    """Try every number: others' shortfalls stay free, a watermark too beyond the own guarantee, and limits hold."""
    own = next(group for group in groups if any(member.name == name for member in group.members))
    lacking = {member.name: max(member.min_blocks - held[member.name], 0) for g in groups for member in g.members}
    member = next(member for member in own.members if member.name == name)
    inside = sum(lacking[other.name] for other in own.members if other is not member)
    outside = 0
    for group in groups:
        if group is not own:
            group_held = sum(held[each.name] for each in group.members)
            outside += max(group.guarantee - group_held, sum(lacking[each.name] for each in group.members))
    own_held = sum(held[each.name] for each in own.members)
    best = 0
    for count in range(free + 1):
        fits = held[name] + count <= (count + held[name] if member.max_held is None else member.max_held)
        fits &= own.max_held is None or own_held + inside + count <= own.max_held
        in_guarantee = count <= max(lacking[name], own.guarantee - own_held - inside)
        fits &= free - count >= outside + inside + (0 if in_guarantee else watermark)
        best = count if fits else best
    return best


def test_what_a_tenant_may_take_is_the_most_that_leaves_the_guarantees() -> None:
    choose = random.Random(run_seed())
    for _ in range(draws(900, 300)):
        groups = groups_drawn(choose)
        names = [member.name for group in groups for member in group.members]
        book = SharedBudget(groups, 100, 4)
        free = sum(group.guarantee for group in groups) + choose.randint(0, 12)
        watermark = choose.choice((0, choose.randint(1, 5)))
        held = dict.fromkeys(names, 0)
        for slot, name in enumerate(names):
            most = most_that_leaves_the_guarantees(groups, held, name, free, watermark)
            assert book.max_blocks(slot, free, watermark) == most, (groups, name, free, watermark)
        for _ in range(8):
            slot = choose.randrange(len(names))
            most = most_that_leaves_the_guarantees(groups, held, names[slot], free, watermark)
            assert max(book.room(slot, free, watermark), 0) == most, (groups, held, names[slot], free, watermark)
            change = choose.choice((most, choose.randint(0, most), -choose.randint(0, held[names[slot]])))
            book.hold(slot, change)
            held[names[slot]] += change
            free -= change


def test_idle_blocks_beyond_their_limit_go_first() -> None:
    cache = Checked(num_blocks=21, tenants=(Tenant("a", weight=100, max_idle=3), Tenant("b"), Tenant("c")))
    full_of(cache, {"a": 6, "b": 14})
    take(cache, "c", 4)
    assert idle_of(cache) == {"*": 0, "a": 3, "b": 13, "c": 0}


def test_retained_blocks_go_when_their_tenant_has_no_other() -> None:
    """Not when nobody has: c above its share gives what it retains, the lowest priority first, while a keeps all."""
    cache = Checked(num_blocks=13, retention_blocks=20, tenants=(Tenant("a", min_blocks=4), Tenant("b"), Tenant("c")))
    full_of(cache, {"a": 4, "c": 8})
    for block in range(8):
        cache.retain(prompt(100 + block, 4), priority=9 - block, expires_at=None, extra_keys=(CacheSalt("c"),))
    take(cache, "b", 3)
    left = [cache.num_cached_tokens([*prompt(100 + block, 4), 1], extra_keys=(CacheSalt("c"),)) for block in range(8)]
    assert left == [4] * 5 + [0] * 3
    assert idle_of(cache) == {"*": 0, "a": 4, "b": 0, "c": 5}
    assert cache.ended_retentions.num_evicted == 3


def test_the_limits_and_what_they_say() -> None:
    tenants = (
        Tenant("a", max_held=5, max_retained=2),
        TenantGroup("g", (Tenant("b", min_blocks=3), Tenant("c")), 1, 0, 6),
    )
    cache = Checked(num_blocks=21, retention_blocks=20, tenants=tenants)
    with pytest.raises(NeverFits, match=r"^token_ids needs 6 blocks; tenant 'a' may hold at most 5$"):
        take(cache, "a", 6)
    seq = prefilled(cache, "a", prompt(1, 16))
    assert cache.can_allocate([1] * 8, extra_keys=(CacheSalt("a"),)) is Admission.LATER
    message = r"^token_ids needs 2 .*; tenant 'a' holds 4 blocks of at most 5; 16 are free, of which 3 are reserved for"
    with pytest.raises(OutOfBlocks, match=message) as caught:
        take(cache, "a", 2)
    assert (caught.value.num_needed, caught.value.num_free) == (2, 1)
    with pytest.raises(OverBudget, match=r"^retain: 4 more .* for tenant 'a'; 0 of 2 are already$"):
        cache.retain(prompt(1, 16), priority=1, expires_at=None, extra_keys=(CacheSalt("a"),))
    assert cache.retain(prompt(1, 8), priority=1, expires_at=None, extra_keys=(CacheSalt("a"),)) == 2
    assert cache.stats().tenants[1].num_retained == 2
    assert cache.reserve([seq], 4).all_fit
    assert cache.reserve([seq], 5).status.tolist() == [SeqStatus.NO_BLOCKS], "a sixth block"
    assert not cache.can_append([seq], 5)
    lease = cache.hold_cached([*prompt(1, 16), 1], extra_keys=(CacheSalt("a"),))
    cache.free(seq)
    assert cache.can_allocate([1] * 8, extra_keys=(CacheSalt("a"),)) is Admission.LATER, "the lease holds four of five"
    with pytest.raises(OutOfBlocks, match=r"tenant 'a' holds 4 blocks of at most 5"):
        take(cache, "a", 2)
    cache.pool.free_blocks(lease)
    take(cache, "c", 3)
    with pytest.raises(
        OutOfBlocks, match="tenant 'c' holds 3 blocks, its group 3 of at most 6; 17 are free, of which 3"
    ):
        take(cache, "c", 1)
    with pytest.raises(OutOfBlocks, match="'b' holds 0 blocks, its group 3 of at most 6; 17 are free, of which 0 are"):
        take(cache, "b", 4)
    take(cache, "b", 3)
    assert cache.can_allocate([1] * 60) is Admission.LATER, "13 of 14 free blocks are anybody's"


@pytest.mark.parametrize("state_bytes", [0, 100])
def test_limits_above_the_pool_limit_nothing_and_below_a_sequence_refuse_it(state_bytes: int) -> None:
    states = (StateSpec(state_bytes=state_bytes, checkpoint_every=4),) if state_bytes else ()
    huge, small = Tenant("huge", max_held=10**6, max_idle=10**6, max_retained=10**6), Tenant("small", max_held=1)
    groups = (LayerGroup(4, token_bytes=8), *states)
    settings: dict[str, Any] = {"max_model_len": 200, "groups": groups, "retention_blocks": 3}
    settings |= {"cut_chunks": False} if state_bytes else {}
    checked = Checked(num_blocks=21, tenants=(huge, small), **settings)
    cache, keys = checked.cache, (CacheSalt("small"),)
    before = snapshot(cache)
    assert cache.try_allocate([1] * 8, extra_keys=keys) is Admission.NEVER
    for call in (
        lambda: cache.allocate([1] * 8, extra_keys=keys),
        lambda: cache.allocate_batch([[1] * 8], extra_keys=keys),
    ):
        with pytest.raises(NeverFits, match=r"token_ids needs 2 blocks; tenant 'small' may hold at most 1$"):
            call()
    with pytest.raises(NeverFits, match="needs 21 blocks; the pool has 20"):
        take(checked, "huge", 21)
    assert snapshot(cache) == before
    seq = prefilled(checked, "huge", prompt(1, 40))
    with pytest.raises(OverBudget, match="3"):
        cache.retain(prompt(1, 40), priority=1, expires_at=None, extra_keys=(CacheSalt("huge"),))
    cache.free(seq)
    take(checked, "huge", 20)


def test_a_million_names_are_one_tenant() -> None:
    cache = Checked(num_blocks=21, tenants=(Tenant("a", min_blocks=5), Tenant(OTHERS, max_held=0)))
    assert cache.can_allocate([1], extra_keys=(CacheSalt("a"),)) is Admission.OK
    for number in range(100):
        assert cache.can_allocate([1], extra_keys=(CacheSalt(f"name {number}"),)) is Admission.NEVER
    with pytest.raises(NeverFits, match=r"tenant '\*' may hold at most 0"):
        cache.allocate([1], extra_keys=(LoRA("a"),))
    with pytest.raises(OutOfBlocks, match=r"^num_blocks is 1; tenant '\*' holds 0 blocks of at most 0; 20 are free"):
        cache.pool.get_new_blocks(1)
    assert len(cache.stats().tenants) == 2


def test_a_pool_is_not_made_smaller_than_its_guarantees() -> None:
    cache = Checked(num_blocks=21, tenants=(Tenant("a", min_blocks=5), Tenant("b", min_blocks=5)))
    with pytest.raises(
        InvalidArgument, match=r"^tenants have guarantees .* of 10 blocks together; num_blocks is 10: 9 "
    ):
        cache.resize(10)
    assert cache.pool.num_blocks == 21
    cache.resize(11)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tenant(""), "name has 0 characters; it must have 1 to 200"),
        (lambda: Tenant("a" * 201), "name has 201 characters"),
        (lambda: Tenant(7), "name is 7; it must be a string"),  # type: ignore[arg-type]
        *(
            (lambda weight=weight: Tenant("a", weight), "weight of 'a' is ")
            for weight in (0, -1, 10**18, math.nan, 0.5)
        ),
        *((lambda low=low: Tenant("a", 1, low), "min_blocks of 'a' is ") for low in (-1, 10**18, math.nan, 0.5)),
        (lambda: Tenant("a", 1, 5, 4), "max_held of 'a' is 4; it must be from 5 to"),
        (lambda: Tenant("a", max_idle=-1), "max_idle of 'a' is -1"),
        (lambda: Tenant("a", max_retained=10**18), "max_retained of 'a' is 10{18}"),
        (lambda: Tenant("a", keys=("x",)), "keys of 'a' is .*; it must be a tuple of CacheSalt, LoRA"),  # type: ignore[arg-type]
        (lambda: Tenant("*", keys=(CacheSalt("a"),)), r"keys of '\*' is .*; it must be \(\)"),
        (lambda: TenantGroup("g", ()), r"members of 'g' is \(\); it must be a tuple of Tenant"),
        (lambda: TenantGroup("g", (1,)), "members of 'g' holds 1; its items must be Tenant"),  # type: ignore[arg-type]
        (
            lambda: TenantGroup("g", (Tenant("a", 1, 9),), 1, 0, 8),
            "max_held of 'g' is 8; the guarantees of .* are 9 blocks",
        ),
        (lambda: shares(7), "tenants is 7; it must be a tuple of Tenant and TenantGroup"),
        (lambda: shares((1,)), r"tenants is \(1,\); it must be a tuple"),
        (lambda: shares((Tenant("a"), Tenant("a"))), "tenants has the name 'a' twice"),
        (lambda: shares((Tenant("a"), TenantGroup("a", (Tenant("b"),)))), "tenants has the name 'a' twice"),
        (lambda: shares((Tenant("a"), Tenant("b", keys=(CacheSalt("a"),)))), "has a salt that is a key of 'a' and 'b'"),
        (lambda: shares((TenantGroup("*", (Tenant("b"),)),)), r"tenants has '\*' as a group"),
        (lambda: shares((TenantGroup("g", (Tenant("*"),)),)), r"tenants has the name '\*' twice"),
        (
            lambda: shares((TenantGroup("g", (Tenant("a", 1, 9), Tenant("b")), 1, 15), Tenant("c", 1, 5))),
            "tenants have guarantees .* of 20 blocks together; num_blocks is 20: 19",
        ),
        (lambda: shares((Tenant("a", 1, 10**18),)), "min_blocks of 'a' is 10{18}; it must be from 0 to"),
        (
            lambda: shares((Tenant("a", 1, 20),)),
            "tenants have guarantees .* of 20 blocks together; num_blocks is 20: 19",
        ),
        (
            lambda: shares(tuple(Tenant(f"{n}") for n in range(10_000))),
            "tenants has 10001 tenants.*; the limit is 10000",
        ),
    ],
)
def test_shares_that_are_none(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


def shares(tenants: Any) -> CacheConfig:
    return CacheConfig(20, 4, watermark=0.0, tenants=tenants)


def test_a_pool_without_tenants_counts_nothing() -> None:
    assert Checked().stats().tenants == ()
