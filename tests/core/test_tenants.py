"""Tenants that share a pool: random worlds beside a dictionary, and an adversary who takes all it can."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import blockyard
from blockyard import (
    Admission,
    CacheConfig,
    CacheSalt,
    CapacityError,
    InvalidArgument,
    KVCacheManager,
    LoRA,
    NeverFits,
    OutOfBlocks,
    OverBudget,
    SeqStatus,
    SequenceNotReady,
    StepsInFlight,
)
from blockyard.tenants import OTHERS, Tenant, TenantGroup

from ..support.checked import Checked, prompt
from ..support.seeds import draws, run_seed
from ..world import NUM_CALLS, World

#: Seeds of worlds in which all that must have happened does.
EVENTFUL = (1, 2, 3, 5, 8, 13, 21, 34)


class TenantWorld(World):
    """A world whose prompts are of tenants with drawn shares; what the cache counts is what the blocks say."""

    def choose_config(self) -> Any:
        config = super().choose_config()
        choose = random.Random(self.seed)
        usable = config.num_blocks - 1 - config.watermark_blocks
        self.floors = [0] * 4
        for _ in range(choose.randint(0, max(usable, 0))):
            self.floors[choose.randrange(4)] += 1
        self.has_shrunk = False
        salts = [self.tenant(choose, "a", 0), self.tenant(choose, "b", 1)]
        lora = replace(self.tenant(choose, "lora", 2), keys=(self.package.LoRA("a"),))
        tenants: tuple[Any, ...] = (*salts, lora)
        if choose.random() < 0.4:
            floor = sum(self.floors[:2])
            most = choose.choice((None, floor + choose.randint(1, 30)))
            tenants = (TenantGroup("both", tuple(salts), choose.randint(1, 3), 0, most), lora)
        if choose.random() < 0.5:
            tenants = (*tenants, self.tenant(choose, "*", 3))
        return replace(config, tenants=tenants)

    def tenant(self, choose: random.Random, name: str, number: int) -> Any:
        floor = self.floors[number]
        limits = [choose.choice((None, None, floor + choose.randint(1, 30))) for _ in range(3)]
        return Tenant(name, choose.randint(1, 5), floor, *limits)

    def keys(self, earlier: Any) -> tuple[Any, ...]:
        if earlier is not None and self.random.random() < 0.7:
            return tuple(earlier.keys)
        package = self.package
        return self.random.choice(
            ((), (package.LoRA("a"),), (package.CacheSalt("a"),), (package.CacheSalt("b"), package.LoRA("a")))
        )

    def name_of(self, keys: tuple[Any, ...]) -> str:
        salts = [key.value for key in keys if isinstance(key, self.package.CacheSalt)]
        return salts[0] if salts else "lora" if keys else OTHERS

    def require_hope(self, answer: str) -> None:
        assert answer != "LATER" or self.seqs or self.has_shrunk, "LATER, and nothing runs"

    def resize(self) -> str:
        before = self.cache.pool.num_blocks
        answer = super().resize()
        self.has_shrunk |= self.cache.pool.num_blocks < before
        self.counts["resized"] += 1
        return answer

    def act(self, actor: Any) -> None:
        before = self.use()
        super().act(actor)
        after = self.use()
        self.compare(after)
        name = self.story[-1][0]
        if name in ("allocate", "allocate_batch"):
            self.require_floors(before, after)

    def use(self) -> dict[str, Any]:
        return {use.name: use for use in self.cache.stats().tenants}

    def compare(self, uses: dict[str, Any]) -> None:
        """Blocks by tenant, from the block tables and the reference counts alone."""
        held: dict[str, set[int]] = {name: set() for name in uses}
        for holding in self.cache.leak_report():
            if holding.kind.endswith("sequence"):
                seq = next(seq for seq in self.seqs if seq.handle == holding.handle)
                held[self.name_of(seq.keys)] |= set(holding.block_ids)
        told = {name: use.num_held for name, use in uses.items()}
        assert told == {name: len(blocks) for name, blocks in held.items()}
        states = self.cache.pool.states().tolist()
        assert sum(use.num_idle for use in uses.values()) == states.count(3)
        assert sum(use.num_retained for use in uses.values()) == self.cache.num_retained_blocks
        for use in uses.values():
            assert use.max_held is None or use.num_held <= use.max_held
            assert use.max_retained is None or use.num_retained <= use.max_retained
        if not self.has_shrunk:
            claims = sum(max(use.min_blocks - use.num_held, 0) for use in uses.values())
            assert self.cache.num_free_blocks >= claims, "a floor that could not be claimed"

    def require_floors(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """One tenant took blocks: no other has lost any within its floor."""
        taken = [name for name in before if after[name].num_held > before[name].num_held]
        for name, use in before.items():
            left = after[name].num_held + after[name].num_idle
            if name not in taken and not self.has_shrunk:
                assert left >= min(use.num_held + use.num_idle, use.min_blocks), f"{name} lost blocks within its floor"
                self.counts["floors kept"] += use.num_held + use.num_idle > 0
            self.counts["blocks taken back"] += left < use.num_held + use.num_idle


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
    wanted = ("floors kept", "blocks taken back", "allocate: OutOfBlocks", "swap_in: OutOfBlocks", "retain: OverBudget")
    assert {name: counts[name] for name in wanted if counts[name] == 0} == {}


class Adversary:
    """Everybody but one tenant, taking all that every call gives: sequences, forks, leases, wishes, hints, swaps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random
        self.floor = choose.randint(2, 20)
        self.cache = KVCacheManager(
            CacheConfig(
                choose.randint(46, 80),
                4,
                max_num_seqs=64,
                max_model_len=400,
                watermark=choose.choice((0.0, 0.1)),
                num_cpu_blocks=choose.choice((0, 50)),
                retention_blocks=choose.choice((0, 100)),
                eviction_policy=choose.choice(("lru", "lru", "lfu", "guarded:density", "s3fifo")),
                partial_hits=choose.random() < 0.5,
                max_steps_in_flight=choose.choice((1, 3)),
                tenants=self.share_out(),
            )
        )
        self.seqs: list[int] = []
        self.swapped: list[int] = []
        self.leases: list[Any] = []
        self.plans: list[tuple[list[int], list[int], int]] = []
        self.now = 0.0
        self.counts: Counter[str] = Counter()

    def share_out(self) -> tuple[Tenant | TenantGroup, ...]:
        """The victim stands alone, or in a group with who takes."""
        choose = self.random
        victim, one = Tenant("victim", min_blocks=self.floor), Tenant("one", weight=10_000)
        two = Tenant("two", min_blocks=choose.randint(0, 5))
        others = Tenant(OTHERS, weight=10_000, min_blocks=choose.randint(0, 5))
        if choose.random() < 0.5:
            return (victim, TenantGroup("pair", (one, two), weight=10_000), others)
        return (two, TenantGroup("pair", (victim, one), choose.choice((1, 10_000))), others)

    def take(self) -> None:
        """One attack; what is refused is no success of anybody's."""
        attacks = (self.allocate, self.allocate, self.decode, self.decode, self.fork, self.hold, self.lease)
        attack = self.random.choice((*attacks, self.retain, self.swap, self.preempt, self.wait, self.commit))
        try:
            attack()
            self.counts[attack.__name__] += 1
        except CapacityError as error:
            self.counts[type(error).__name__] += 1

    def keys(self) -> tuple[CacheSalt, ...]:
        name = self.random.choice(("one", "two", "nobody", f"name {self.random.random()}"))
        return (CacheSalt(name),)

    def tokens(self) -> list[int]:
        return [self.random.randrange(3)] * self.random.choice((4, 9, 40, 200, 300))

    def allocate(self) -> None:
        session = self.random.choice((None, "s", "t"))
        self.seqs.append(self.cache.allocate(self.tokens(), extra_keys=self.keys(), session=session))
        if session is not None:
            self.cache.hint(session, back_in=1e4)

    def running(self) -> list[int]:
        return [seq for seq in self.seqs if seq not in self.swapped]

    def decode(self) -> None:
        seqs = self.running()
        begun = [self.cache.num_computed_tokens(seq) + self.in_flight(seq) for seq in seqs]
        counts = [
            self.random.choice((1, 50, 400, self.cache.num_tokens(seq) - at))
            for seq, at in zip(seqs, begun, strict=True)
        ]
        counts = [max(min(count, 400 - at), 0) for count, at in zip(counts, begun, strict=True)]
        try:
            plan = self.cache.reserve(seqs, counts)
        except StepsInFlight:
            self.commit()
            return
        done = [0 if status != 0 else count for status, count in zip(plan.status, counts, strict=True)]
        self.plans.append((seqs, done, plan.step))
        if self.cache.config.max_steps_in_flight == 1:
            self.commit()

    def in_flight(self, seq: int) -> int:
        return sum(done[seqs.index(seq)] for seqs, done, _ in self.plans if seq in seqs)

    def commit(self) -> None:
        while self.plans:
            seqs, done, step = self.plans.pop(0)
            for seq, count in zip(seqs, done, strict=True):
                if seq in self.seqs and not self.committed(seq, count, step):
                    self.seqs.remove(seq)
                    self.cache.free([seq])
            if self.cache.config.max_steps_in_flight > 1:
                self.cache.end_step(step)

    def committed(self, seq: int, count: int, step: int) -> bool:
        """Whether the step of a sequence could be committed, as far as its tokens are known."""
        left = self.cache.num_tokens(seq) - self.cache.num_computed_tokens(seq)
        for num_computed, tokens in ((min(count, left), [[1]]), (min(count, left), None), (0, None)):
            with suppress(InvalidArgument, SequenceNotReady):
                self.cache.commit([seq], num_computed, tokens, *self.step_of(step))
                return True
        return False

    def step_of(self, step: int) -> tuple[int, ...]:
        return (step,) if self.cache.config.max_steps_in_flight > 1 else ()

    def fork(self) -> None:
        for seq in self.running()[:2]:
            with suppress(SequenceNotReady):
                self.seqs += self.cache.fork(seq, self.random.randint(1, 4))

    def hold(self) -> None:
        self.leases.append(self.cache.hold_cached(self.tokens(), self.keys()))

    def lease(self) -> None:
        self.leases.append(self.cache.pool.get_new_blocks(self.random.randint(1, 60)))

    def retain(self) -> None:
        if self.cache.config.retention_blocks:
            self.cache.retain(self.tokens(), 9, None, self.keys())

    def swap(self) -> None:
        if self.cache.config.num_cpu_blocks:
            with suppress(SequenceNotReady):
                if self.swapped and self.random.random() < 0.5:
                    self.cache.swap_in(self.swapped[:1])
                    self.swapped = self.swapped[1:]
                elif self.running():
                    self.cache.swap_out(self.running()[:1])
                    self.swapped.append(self.running()[0])

    def preempt(self) -> None:
        """Free some, and come back with as much."""
        for seq in self.random.sample(self.seqs, len(self.seqs) // 2):
            self.seqs.remove(seq)
            self.swapped = [other for other in self.swapped if other != seq]
            self.cache.free([seq])
        for lease in self.leases[::2]:
            self.cache.pool.free_blocks(lease)
        self.leases = self.leases[1::2]

    def wait(self) -> None:
        self.now += 1.0
        self.cache.advance_time(self.now)


def test_a_floor_holds_against_whoever_takes_all_there_is() -> None:
    """At every moment the tenant gets up to its floor, at once; and what it left behind is still there."""
    counts: Counter[str] = Counter()
    for seed in [1, 2, 3, 4, 5, 6, *(run_seed() + number for number in range(draws(60, 12)))]:
        adversary = Adversary(seed)
        cache = adversary.cache
        # Its last block is never full, so no second copy of a block is ever cached.
        prompt = [7] * (4 * (adversary.floor - 1) + 1)
        keys = (CacheSalt("victim"),)
        is_known = False
        for moment in range(150):
            adversary.take()
            cache.check()
            if moment % 5 != 4:
                continue
            where = f"Adversary({seed}), moment {moment}"
            hit = cache.num_cached_tokens(prompt, keys)
            assert not is_known or hit == len(prompt) - 1, f"{where}: {hit} of {len(prompt)} tokens are left"
            assert cache.can_allocate(prompt, keys) is Admission.OK, where
            seq = cache.allocate(prompt, extra_keys=keys)
            cache.check()
            adversary.commit()
            plan = cache.reserve([seq])
            assert plan.all_fit, where
            cache.commit(
                [seq], cache.num_tokens(seq) - cache.num_computed_tokens(seq), None, *adversary.step_of(plan.step)
            )
            if cache.config.max_steps_in_flight > 1:
                cache.end_step(plan.step)
            is_known = True
            if adversary.random.random() < 0.5:
                adversary.take()
            cache.free([seq])
        counts += adversary.counts
    wanted = ("allocate", "decode", "fork", "hold", "lease", "retain", "swap", "preempt", "OutOfBlocks")
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


def test_what_a_prompt_takes_counts_while_room_is_made_for_it() -> None:
    """a and b have ten idle blocks each; a prompt of ten pushes out a's own, for b is not above it."""
    cache = Checked(num_blocks=21, tenants=(Tenant("a"), Tenant("b")))
    full_of(cache, {"a": 10, "b": 10})
    take(cache, "a", 10)
    assert idle_of(cache) == {"*": 0, "a": 0, "b": 10}


def test_a_member_within_its_floor_gives_nothing_though_its_group_is_far_above() -> None:
    pair = TenantGroup("pair", (Tenant("kept", min_blocks=4), Tenant("big")))
    cache = Checked(num_blocks=21, tenants=(pair, Tenant("c"), Tenant("d")))
    take(cache, "big", 12)
    full_of(cache, {"kept": 4, "c": 4})
    assert cache.can_allocate([1] * 20, (CacheSalt("d"),)) is Admission.LATER
    take(cache, "d", 4)
    assert idle_of(cache) == {"*": 0, "kept": 4, "big": 0, "c": 0, "d": 0}


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
        cache.retain(prompt(100 + block, 4), 9 - block, None, (CacheSalt("c"),))
    take(cache, "b", 3)
    left = [cache.num_cached_tokens([*prompt(100 + block, 4), 1], (CacheSalt("c"),)) for block in range(8)]
    assert left == [4] * 5 + [0] * 3
    assert idle_of(cache) == {"*": 0, "a": 4, "b": 0, "c": 5}
    assert cache.ended_retentions.num_evicted == 3


def test_the_limits_and_what_they_say() -> None:
    tenants = (
        Tenant("a", max_held=5, max_retained=2),
        TenantGroup("g", (Tenant("b", min_blocks=3), Tenant("c")), 1, 0, 6),
    )
    cache = Checked(num_blocks=21, retention_blocks=20, tenants=tenants)
    with pytest.raises(NeverFits, match=r"^token_ids needs 6 blocks; the share of tenant 'a' is at most 5$"):
        take(cache, "a", 6)
    seq = prefilled(cache, "a", prompt(1, 16))
    assert cache.can_allocate([1] * 8, (CacheSalt("a"),)) is Admission.LATER
    message = r"^token_ids needs 2 .*; tenant 'a' holds 4 blocks of at most 5; 16 are free, of which 3 are kept for the"
    with pytest.raises(OutOfBlocks, match=message) as caught:
        take(cache, "a", 2)
    assert (caught.value.num_needed, caught.value.num_free) == (2, 1)
    with pytest.raises(OverBudget, match=r"^retain: 4 more .* for tenant 'a'; 0 of 2 are already$"):
        cache.retain(prompt(1, 16), 1, None, (CacheSalt("a"),))
    assert cache.retain(prompt(1, 8), 1, None, (CacheSalt("a"),)) == 2
    assert cache.stats().tenants[1].num_retained == 2
    assert cache.reserve([seq], 4).all_fit
    assert cache.reserve([seq], 5).status.tolist() == [SeqStatus.NO_BLOCKS], "a sixth block"
    assert not cache.can_append([seq], 5)
    lease = cache.hold_cached([*prompt(1, 16), 1], (CacheSalt("a"),))
    cache.free(seq)
    assert cache.can_allocate([1] * 8, (CacheSalt("a"),)) is Admission.NEVER, "the lease holds four of five"
    with pytest.raises(NeverFits, match=r"the share of tenant 'a' is at most 5; leases hold 4 that it does not begin"):
        take(cache, "a", 2)
    cache.pool.free_blocks(lease)
    take(cache, "c", 3)
    with pytest.raises(
        OutOfBlocks, match="tenant 'c' holds 3 blocks, its group 3 of at most 6; 17 are free, of which 3"
    ):
        take(cache, "c", 1)
    take(cache, "b", 3)
    assert cache.can_allocate([1] * 60) is Admission.LATER, "13 of 14 free blocks are anybody's"


def test_a_million_names_are_one_tenant() -> None:
    cache = Checked(num_blocks=21, tenants=(Tenant("a", min_blocks=5), Tenant(OTHERS, max_held=0)))
    assert cache.can_allocate([1], (CacheSalt("a"),)) is Admission.OK
    for number in range(100):
        assert cache.can_allocate([1], (CacheSalt(f"name {number}"),)) is Admission.NEVER
    with pytest.raises(NeverFits, match=r"the share of tenant '\*' is at most 0"):
        cache.allocate([1], extra_keys=(LoRA("a"),))
    with pytest.raises(OutOfBlocks, match=r"^num_blocks is 1; tenant '\*' holds 0 blocks of at most 0; 20 are free"):
        cache.pool.get_new_blocks(1)
    assert len(cache.stats().tenants) == 2


def test_a_pool_is_not_made_smaller_than_its_floors() -> None:
    cache = Checked(num_blocks=21, tenants=(Tenant("a", min_blocks=5), Tenant("b", min_blocks=5)))
    with pytest.raises(InvalidArgument, match=r"^tenants have floors .* of 10 blocks together; num_blocks is 10: 9 "):
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
            "max_held of 'g' is 8; the floors of .* are 9 blocks",
        ),
        (lambda: shares(7), "tenants is 7; it must be a tuple of Tenant and TenantGroup"),
        (lambda: shares((1,)), r"tenants is \(1,\); it must be a tuple"),
        (lambda: shares((Tenant("a"), Tenant("a"))), "tenants has the name 'a' twice"),
        (lambda: shares((Tenant("a"), TenantGroup("a", (Tenant("b"),)))), "tenants has the name 'a' twice"),
        (lambda: shares((Tenant("a"), Tenant("b", keys=(CacheSalt("a"),)))), "has a salt that is a key of 'a' and 'b'"),
        (lambda: shares((TenantGroup("*", (Tenant("b"),)),)), r"tenants has a group '\*'"),
        (lambda: shares((TenantGroup("g", (Tenant("*"),)),)), r"tenants has the name '\*' twice"),
        (lambda: shares((Tenant("a", 1, 20),)), "tenants have floors .* of 20 blocks together; num_blocks is 20: 19"),
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
