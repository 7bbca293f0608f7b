"""A tenant's guarantee against an adversary who takes all it can by every call, and tenants of models with states."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from blockyard import (
    Admission,
    CacheSalt,
    CapacityError,
    InvalidArgument,
    KVCacheManager,
    LayerGroup,
    SeqStatus,
    SequenceNotReady,
    StateSpec,
    StepsInFlight,
)
from blockyard.config import cache_config
from blockyard.tenants import OTHERS, Tenant, TenantGroup
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.states_world import World as StateWorld
from blockyard_testing.states_world import config as state_config

#: What the adversary's pools have: keys and values in one group, or in two, one of them with a window; and states.
KINDS = ("plain", "plain", "windows", "states", "states and windows")
#: The most tokens of a sequence.
LONGEST = 400


def groups_of(choose: random.Random, kind: str) -> tuple[LayerGroup, ...]:
    groups = [] if kind == "plain" else [LayerGroup(4, token_bytes=8)]
    if "windows" in kind:
        groups.append(LayerGroup(4, choose.choice((1, 9)), token_bytes=8))
    if "states" in kind:
        groups.append(StateSpec(state_bytes=choose.choice((1, 32, 70)), checkpoint_every=4))
    return tuple(groups)


class Adversary:
    """Everybody but one tenant, taking all that every call gives: sequences, forks, leases, wishes, hints, swaps.

    The victim's prompt is of `num_full` whole blocks and a token, so that no block is ever cached twice. Its guarantee
    has room for it and for the one state after the whole blocks.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random
        self.kind = choose.choice(KINDS)
        self.num_full = choose.randint(1, 9 if "windows" in self.kind else 19)
        settings: dict[str, Any] = {
            "groups": groups_of(choose, self.kind),
            "max_num_seqs": 400,
            "max_model_len": LONGEST,
            "watermark": choose.choice((0.0, 0.1)),
            "num_cpu_blocks": choose.choice((0, 50)),
            "retention_blocks": choose.choice((0, 100)),
            "eviction_policy": choose.choice(("lru", "lru", "lfu", "density", "s3fifo")),
            "partial_hits": self.kind == "plain" and choose.random() < 0.5,
            "max_steps_in_flight": choose.choice((1, 3)),
        }
        if "states" in self.kind:
            settings |= {"state_checkpoints": ("last",), "state_order": choose.choice(("lru", "index"))}
        num_blocks = choose.randint(46, 80)
        config = cache_config(num_blocks, 4, **settings)
        self.guarantee = (self.num_full + 1) * len(config.layer_groups) + config.state_blocks
        self.cache = KVCacheManager(cache_config(num_blocks, 4, **settings, tenants=self.share_out()))
        self.seqs: list[int] = []
        #: The victim's sequence, which runs among the others.
        self.guest = 0
        self.swapped: list[int] = []
        self.leases: list[Any] = []
        self.plans: list[tuple[list[int], list[int], int]] = []
        self.now = 0.0
        self.counts: Counter[str] = Counter()

    def share_out(self) -> tuple[Tenant | TenantGroup, ...]:
        """The victim stands alone, or in a group with who takes."""
        choose = self.random
        victim, one = Tenant("victim", min_blocks=self.guarantee), Tenant("one", weight=10_000)
        two = Tenant("two", min_blocks=choose.randint(0, 5))
        others = Tenant(OTHERS, weight=10_000, min_blocks=choose.randint(0, 5))
        if choose.random() < 0.5:
            return (victim, TenantGroup("pair", (one, two), weight=10_000), others)
        return (two, TenantGroup("pair", (victim, one), choose.choice((1, 10_000))), others)

    def take(self) -> None:
        """One attack; what is refused is no success of anybody's."""
        attacks = (self.allocate, self.allocate, self.decode, self.decode, self.fork, self.hold, self.lease)
        rarer = (self.allocate_batch, self.retain, self.swap, self.cut, self.preempt, self.wait, self.commit, self.grow)
        attack = self.random.choice((*attacks, *attacks, *rarer, self.set_policy))
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
        num_seqs = self.random.choice((1, 1, 1, 4))
        self.seqs.append(
            self.cache.allocate(self.tokens(), holder="", extra_keys=self.keys(), num_seqs=num_seqs, session=session)
        )
        if session is not None:
            self.cache.hint(session, **self.random.choice(({}, {"over": True})))

    def allocate_batch(self) -> None:
        prompts = [self.tokens() for _ in range(self.random.randint(1, 4))]
        self.seqs += self.cache.allocate_batch(prompts, extra_keys=self.keys())

    def running(self) -> list[int]:
        return [seq for seq in self.seqs if seq not in self.swapped]

    def decode(self) -> None:
        self.reserve([])

    def reserve(self, behind: list[int]) -> list[int]:
        """Reserve for all that run and those `behind` them, and return the statuses of these."""
        seqs = [*self.running(), *behind]
        begun = [self.cache.num_computed_tokens(seq) + self.in_flight(seq) for seq in seqs]
        known = [self.cache.num_tokens(seq) - at for seq, at in zip(seqs, begun, strict=True)]
        wishes = [
            number if seq in behind else self.random.choice((1, 50, LONGEST, number))
            for seq, number in zip(seqs, known, strict=True)
        ]
        counts = [max(min(wish, LONGEST - at), 0) for wish, at in zip(wishes, begun, strict=True)]
        try:
            plan = self.cache.reserve(seqs, counts)
        except StepsInFlight:
            self.commit()
            return self.reserve(behind) if behind else []
        self.plans.append((seqs, plan.num_scheduled.tolist(), plan.step))
        if self.cache.config.max_steps_in_flight == 1:
            self.commit()
        return list(plan.status[len(seqs) - len(behind) :])

    def in_flight(self, seq: int) -> int:
        return sum(done[seqs.index(seq)] for seqs, done, _ in self.plans if seq in seqs)

    def commit(self) -> None:
        while self.plans:
            seqs, done, step = self.plans.pop(0)
            for seq, count in zip(seqs, done, strict=True):
                if seq == self.guest:
                    self.cache.commit([seq], count, None, step=self.step_of(step))
                elif seq in self.seqs and not self.committed(seq, count, step):
                    self.seqs.remove(seq)
                    self.cache.free([seq])
            if self.cache.config.max_steps_in_flight > 1:
                self.cache.end_step(step)

    def committed(self, seq: int, count: int, step: int) -> bool:
        """Whether the step of a sequence could be committed, as far as its tokens are known."""
        left = self.cache.num_tokens(seq) - self.cache.num_computed_tokens(seq)
        for num_computed, tokens in ((min(count, left), [[1]]), (min(count, left), None), (0, None)):
            with suppress(InvalidArgument, SequenceNotReady):
                self.cache.commit([seq], num_computed, tokens, step=self.step_of(step))
                return True
        return False

    def step_of(self, step: int) -> int | None:
        return step if self.cache.config.max_steps_in_flight > 1 else None

    def fork(self) -> None:
        for seq in self.running()[:2]:
            with suppress(SequenceNotReady):
                self.seqs += self.cache.fork(seq, self.random.randint(1, 4))

    def hold(self) -> None:
        self.leases.append(self.cache.hold_cached(self.tokens(), extra_keys=self.keys()))

    def lease(self) -> None:
        self.leases.append(self.cache.pool.get_new_blocks(self.random.randint(1, 60)))

    def retain(self) -> None:
        if self.cache.config.hints.retention_blocks:
            self.cache.retain(self.tokens(), priority=9, expires_at=None, extra_keys=self.keys())

    def swap(self) -> None:
        if self.cache.config.cpu.num_blocks:
            with suppress(SequenceNotReady):
                if self.swapped and self.random.random() < 0.5:
                    self.cache.swap_in(self.swapped[:1])
                    self.swapped = self.swapped[1:]
                elif self.running():
                    self.cache.swap_out(self.running()[:1])
                    self.swapped.append(self.running()[0])

    def cut(self) -> None:
        for seq in self.running()[:3]:
            with suppress(SequenceNotReady, InvalidArgument):
                self.cache.truncate(seq, self.random.randint(1, self.cache.num_tokens(seq)))

    def grow(self) -> None:
        """More memory, of which nobody has a guarantee; a size below all guarantees is refused."""
        with pytest.raises(InvalidArgument, match="tenants have guarantees"):
            self.cache.resize(self.guarantee)
        self.cache.resize(self.cache.pool.num_blocks + self.random.randint(0, 2))

    def set_policy(self) -> None:
        self.cache.set_eviction_policy(self.random.choice(("lru", "arc", "density", "lfu")))

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


class Victim:
    """It comes with one prompt, at any time; what it left behind is still there, all of it."""

    def __init__(self, adversary: Adversary) -> None:
        self.adversary = adversary
        self.cache = adversary.cache
        self.prompt = [7] * (4 * adversary.num_full + 1)
        self.keys = (CacheSalt("victim"),)
        self.num_known = 0

    def come(self) -> int:
        """Take the guarantee, compute it among all that run, and return the sequence."""
        cache = self.cache
        assert cache.num_cached_tokens(self.prompt, extra_keys=self.keys) == self.num_known
        assert cache.can_allocate(self.prompt, extra_keys=self.keys) is Admission.OK
        seq = int(cache.allocate(self.prompt, extra_keys=self.keys))
        assert cache.num_computed_tokens(seq) == self.num_known
        cache.check()
        self.adversary.commit()
        self.adversary.guest = seq
        for _ in range(3):  # a step ends where a state is saved
            assert self.adversary.reserve([seq]) == [SeqStatus.SCHEDULED]
            self.adversary.commit()
        assert cache.num_computed_tokens(seq) == len(self.prompt)
        self.num_known = len(self.prompt) - 1
        return seq


def attack(seed: int) -> Counter[str]:
    adversary = Adversary(seed)
    victim = Victim(adversary)
    for moment in range(150):
        adversary.take()
        adversary.cache.check()
        if moment % 5 == 4:
            seq = victim.come()
            if adversary.random.random() < 0.5:
                adversary.take()
            adversary.cache.free([seq])
    return adversary.counts + Counter({adversary.kind: 1})


def test_a_guarantee_holds_against_whoever_takes_all_there_is() -> None:
    """At every moment the tenant gets up to its guarantee, at once; and what it left behind is still there."""
    counts: Counter[str] = Counter()
    for seed in [*range(1, 13), *(run_seed() + number for number in range(draws(60, 12)))]:
        try:
            counts += attack(seed)
        except BaseException as error:
            error.add_note(f"attack({seed})")
            raise
    wanted = (
        "allocate",
        "allocate_batch",
        "decode",
        "fork",
        "hold",
        "lease",
        "retain",
        "swap",
        "cut",
        "preempt",
        "grow",
    )
    assert {name: counts[name] for name in (*wanted, *KINDS, "set_policy", "OutOfBlocks") if counts[name] == 0} == {}


class SharedStateWorld(StateWorld):
    """The world of states, with two tenants; free blocks are never fewer than what guarantees still lack."""

    def lease(self) -> None:
        with suppress(CapacityError):
            super().lease()

    def step(self) -> None:
        super().step()
        uses = self.cache.stats().tenants
        assert self.cache.num_free_blocks >= sum(max(use.min_blocks - use.num_held, 0) for use in uses)
        assert all(use.max_held is None or use.num_held <= use.max_held for use in uses)


@pytest.mark.parametrize("policy", ["lru", "density"])
def test_states_of_tenants_keep_their_books(policy: str) -> None:
    draw = random.Random(f"{run_seed()} tenants {policy}")
    for _ in range(draws(60, 4)):
        num_blocks = draw.choice([60, 130])
        guarantees = [draw.randint(0, 19) for _ in range(3)]
        most = draw.choice([None, guarantees[0] + 30])
        tenants = (
            Tenant("a", 2, guarantees[0], most),
            Tenant("idle", 1, guarantees[1]),
            Tenant(OTHERS, 1, guarantees[2]),
        )
        settings = {"eviction_policy": policy, "retention_blocks": draw.choice([0, 20]), "tenants": tenants}
        SharedStateWorld(draw, state_config(draw, num_blocks, **settings), False).run(120)
