"""Leases, size and records of a `NamedPool` work as in every pool."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from blockyard import DoubleFree, ForeignBlock, InvalidArgument, OutOfBlocks
from blockyard.answers import BlockState, Resize
from blockyard.errors import BlockyardError, NotEnoughMemory
from blockyard.named import NamedPool
from blockyard.observe import describe_leaks, draw_pool
from blockyard_testing.own_policies import MRU
from blockyard_testing.seeds import draws, run_seed

from ..support.snapshot import refused, snapshot

NUM_WORLDS = draws(12, 3)
NAMES = [bytes([number]) * (1 + number % 32) for number in range(24)]


def found(pool: NamedPool) -> list[Any]:
    """Everything that names lead to, and what each block is called."""
    return [pool.find(NAMES).tolist(), [pool.names_of(block) for block in range(1, pool.num_blocks)]]


class World:
    """A random program over one pool: what must not change does not, and `check` holds after each call."""

    def __init__(self, seed: int, policy: Any) -> None:
        self.random = random.Random(seed)
        self.pool = NamedPool(9, hash_seed=seed, eviction_policy=policy, history_size=50, residency_sample=1)
        self.leases: list[Any] = []
        self.ids: list[int] = []
        self.lost: list[int] = []
        self.pool.on_evict = lambda blocks: self.lost.extend(blocks.tolist())
        self.done: Counter[str] = Counter()

    def play(self, calls: int) -> None:
        verbs = sorted(name for name in dir(self) if name.startswith("do_"))
        for _ in range(calls):
            verb = self.random.choice(verbs)
            if not self.leases:
                self.add(self.pool.get_new_blocks(0))
            before = snapshot(self.pool)
            try:
                if getattr(self, verb)() is not None:
                    self.done[verb] += 1
            except BlockyardError as error:
                assert snapshot(self.pool) == before, verb
                self.done[type(error).__name__] += 1
            self.pool.check()
            assert self.pool.num_used_blocks == sum(self.pool.ref_counts() > 0)
        for lease in self.leases:
            self.pool.free_blocks(lease)
        self.pool.free_ids(self.ids)
        self.pool.check()
        assert self.pool.num_used_blocks == self.pool.num_retiring_blocks == 0

    def lease(self) -> Any:
        return self.random.choice(self.leases)

    def add(self, lease: Any) -> Any:
        self.leases.append(lease)
        return lease

    def do_take(self) -> Any:
        return self.add(self.pool.get_new_blocks(self.random.randint(0, 3)))

    def do_extend(self) -> Any:
        return self.pool.extend(self.lease(), self.random.randint(0, 2))

    def do_touch(self) -> Any:
        return self.add(self.pool.touch(self.lease(), holder="again", start=self.random.randint(0, 2)))

    def do_split(self) -> Any:
        return self.add(self.pool.split(self.lease(), self.random.randint(0, 3)))

    def do_release(self) -> Any:
        return self.pool.release(self.lease(), self.random.randint(0, 2))

    def do_copy_on_write(self) -> Any:
        lease, place = self.lease(), self.random.randint(0, 2)
        copied = self.pool.copy_on_write(lease, place)
        assert self.pool.names_of(lease[place]) == [], "what is written into has no name"
        return copied is not None or None

    def do_free(self) -> Any:
        lease = self.lease()
        self.pool.free_blocks(lease, last=self.random.random() < 0.3)
        self.leases.remove(lease)
        return True

    def do_ids(self) -> Any:
        self.ids += self.pool.new_ids(self.random.randint(0, 2))
        return True

    def do_hold_ids(self) -> Any:
        blocks = [self.random.randint(1, self.pool.num_blocks + 2)]
        self.pool.hold_ids(blocks)
        self.ids += blocks
        return True

    def do_free_ids(self) -> Any:
        blocks = self.random.sample(self.ids, min(len(self.ids), 2))
        self.pool.free_ids(blocks)
        for block in blocks:
            self.ids.remove(block)
        return True

    def do_name(self) -> Any:
        return self.pool.name_one(self.random.randint(1, self.pool.num_blocks + 1), self.random.choice(NAMES))

    def do_find(self) -> Any:
        return self.add(self.pool.get_cached_blocks(self.random.sample(NAMES, 3)))

    def do_uncache(self) -> Any:
        return self.pool.uncache([self.random.randint(1, self.pool.num_blocks - 1)])

    def do_resize(self) -> Any:
        before = self.pool.num_blocks
        names = [self.pool.names_of(block) for block in range(1, before)]
        leads = [self.pool.find([name]).item() for name in NAMES]
        target = self.random.choice([3, 6, before + 1, before + 7])
        if target > 60:
            target = 3
        answer = self.pool.resize(target)
        assert (answer is Resize.DEFERRED) == (self.pool.num_retiring_blocks > 0)
        kept = min(before, target)
        assert [self.pool.names_of(block) for block in range(1, kept)] == names[: kept - 1]
        if target >= before:
            assert [self.pool.find([name]).item() for name in NAMES] == leads
            self.done["grown"] += 1
        return True

    def do_advance(self) -> Any:
        self.pool.advance_time(float(self.random.randint(0, 10**6)))
        return True

    def do_reset(self) -> Any:
        if self.random.random() < 0.1:
            self.pool.reset_prefix_cache()
            return True
        return None


@pytest.mark.parametrize("policy", ["lru", "arc", "lfu", MRU])
def test_random_programs_keep_every_law(policy: Any) -> None:
    draw, done, num_worlds = random.Random(f"{run_seed()} {policy}"), Counter[str](), 0
    wanted = {name for name in dir(World) if name.startswith("do_")} | {"grown", "OutOfBlocks", "InvalidArgument"}
    while num_worlds < NUM_WORLDS or not wanted <= set(done):
        world = World(draw.randrange(2**20), policy)
        num_worlds += 1
        world.play(250)
        done += world.done
        assert world.pool.history()
        assert world.pool.residency().lifetime.num_samples >= 0


def test_names_beyond_the_first_survive_growth_in_order() -> None:
    pool = NamedPool(4, hash_seed=3)
    ids = pool.new_ids(3)
    for name in NAMES:
        for block in ids:
            pool.name_one(block, name)
    before = [pool.names_of(block) for block in ids]
    for size in (5, 40, 41):
        assert pool.resize(size) is Resize.APPLIED
        pool.check()
        assert [pool.names_of(block) for block in ids] == before
        assert pool.find(NAMES).tolist() == [ids[0]] * len(NAMES), "the oldest is found"
    pool.uncache([ids[0]])
    assert pool.find(NAMES).tolist() == [ids[1]] * len(NAMES)
    pool.resize(3)
    assert pool.num_retiring_blocks == 1
    pool.free_ids(ids)
    assert pool.find(NAMES).tolist() == [ids[1]] * len(NAMES)
    assert [BlockState(state).name for state in pool.states()[:4]] == ["GONE", "FREE", "IDLE", "GONE"]
    pool.check()


def test_blocks_beyond_the_end_are_refused_unless_they_are_held() -> None:
    pool = NamedPool(6)
    (block,) = pool.new_ids(1)
    far = pool.get_new_blocks(4)
    pool.resize(2)
    pool.hold_ids([far[0]])
    pool.name_one(far[0], b"held")
    pool.free_ids([far[0]])
    pool.free_blocks(far)
    before = snapshot(pool)
    for call in (
        lambda: pool.hold_ids([5]),
        lambda: pool.hold([5]),
        lambda: pool.name_one(5, b"a"),
        lambda: pool.name_blocks([5], [b"a"]),
        lambda: pool.free_block_after(5),
    ):
        with pytest.raises(InvalidArgument, match="is 5; it must be"):
            call()
        assert snapshot(pool) == before
    pool.free_ids([block])
    pool.check()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda pool, lease: pool.extend(lease, -1), InvalidArgument),
        (lambda pool, lease: pool.extend(lease, 99), OutOfBlocks),
        (lambda pool, lease: pool.extend([1], 1), InvalidArgument),
        (lambda pool, lease: pool.touch(lease, start=3), InvalidArgument),
        (lambda pool, lease: pool.touch(lease, holder=7), InvalidArgument),
        (lambda pool, lease: pool.split(lease, 3), InvalidArgument),
        (lambda pool, lease: pool.release(lease, 1, 9), InvalidArgument),
        (lambda pool, lease: pool.copy_on_write(lease, 2), InvalidArgument),
        (lambda pool, lease: pool.copy_on_write(NamedPool(3).get_new_blocks(1), 0), ForeignBlock),
        (lambda pool, lease: pool.resize(0), InvalidArgument),
        (lambda pool, lease: pool.resize("9"), InvalidArgument),
        (lambda pool, lease: pool.resize(2**27), (InvalidArgument, NotEnoughMemory)),
        (lambda pool, lease: pool.residency(), InvalidArgument),
        (lambda pool, lease: pool.advance_time(-1), InvalidArgument),
        (lambda pool, lease: setattr(pool, "on_evict", 3), InvalidArgument),
        (lambda pool, lease: pool.block(99), InvalidArgument),
    ],
)
def test_bad_arguments_change_nothing(call: Any, error: Any) -> None:
    pool = NamedPool(8)
    lease = pool.get_new_blocks(2, holder="mine")
    pool.name_blocks(lease, [b"a", b"b"])
    pool.name_one(lease[0], b"c")
    with refused(pool, error):
        call(pool, lease)


def test_freed_leases_are_refused_by_every_call() -> None:
    pool = NamedPool(8)
    lease = pool.get_new_blocks(2)
    pool.free_blocks(lease)
    for call in (
        lambda: pool.extend(lease, 1),
        lambda: pool.touch(lease),
        lambda: pool.split(lease, 1),
        lambda: pool.release(lease, 0),
        lambda: pool.copy_on_write(lease, 0),
    ):
        with pytest.raises(DoubleFree):
            call()


def test_history_residency_and_losses_are_told() -> None:
    pool = NamedPool(4, history_size=10, residency_sample=1)
    lost: list[int] = []
    pool.on_evict = lambda blocks: lost.extend(blocks.tolist())
    lease = pool.get_new_blocks(2, holder="mine")
    pool.name_blocks(lease, [b"a", b"b"])
    pool.free_blocks(lease)
    pool.advance_time(3.0)
    pool.free_ids(pool.new_ids(3))
    assert lost == [2, 1]
    assert [(event.action, event.actor) for event in pool.history()] == [
        ("take", "get_new_blocks mine"),
        ("release", "free_blocks mine"),
        ("evict", "new_ids"),
        ("evict", "new_ids"),
        ("take", "new_ids"),
        ("release", "free_ids"),
    ]
    assert pool.residency().lifetime.num_samples == 2


def test_a_named_pool_has_a_picture_and_a_leak_report() -> None:
    pool = NamedPool(9)
    lease = pool.get_new_blocks(2, holder="mine")
    pool.name_one(lease[0], b"a")
    ids = pool.new_ids(2)
    assert draw_pool(pool).splitlines()[0] == "█▒▒▒····"
    assert describe_leaks(pool).splitlines() == [
        "4 of 8 blocks are used, 0 idle and cached, 4 free; holders: 2",
        "lease 1 'mine': 2 blocks: 1, 2",
        f"ids 2 'without a lease': 2 blocks: {ids[0]}, {ids[1]}",
    ]
    assert repr(pool) == "<NamedPool: 4 of 8 blocks used, 1 cached, 4 free>"
