"""A slow pool known by names, in lists and dicts, and a random program that plays it beside `NamedPool`.

`play(package, seed, calls)` takes either build and compares every answer, the free order and all names after each call.
"""

from __future__ import annotations

import random
from importlib import import_module
from types import ModuleType
from typing import Any

NUM_NAMES = 12


class SlowPool:
    """The behaviour of `NamedPool` with the policy "lru", simple and O(everything)."""

    def __init__(self, num_blocks: int) -> None:
        self.order = list(range(1, num_blocks))
        self.held = [0] * num_blocks
        self.names: list[tuple[tuple[bytes, int], int]] = []  # (name, block), oldest first
        self.told: list[tuple[str, bytes, int, int]] = []

    def has_name(self, block: int) -> bool:
        return any(owner == block for _, owner in self.names)

    def take(self, count: int) -> list[int]:
        blocks, self.order = self.order[:count], self.order[count:]
        for block in blocks:
            self.forget(block)
            self.held[block] = 1
        return blocks

    def forget(self, block: int) -> None:
        self.told += [("removed", *name, owner) for name, owner in self.names if owner == block]
        self.names = [(name, owner) for name, owner in self.names if owner != block]

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.order:
                self.order.remove(block)
            self.held[block] += 1

    def free(self, blocks: list[int], last: bool) -> None:
        """The first is to be evicted first."""
        idle = []
        for block in blocks:
            self.held[block] -= 1
            if self.held[block] == 0:
                idle.append(block)
        nameless = [block for block in idle if not self.has_name(block)]
        if last:
            self.order += idle
        else:
            self.order = nameless + self.order + [block for block in idle if block not in nameless]

    def find(self, name: bytes, group: int) -> int:
        return next((owner for known, owner in self.names if known == (name, group)), 0)

    def name(self, block: int, name: bytes, group: int) -> int:
        if ((name, group), block) in self.names:
            return 0
        self.names.append(((name, group), block))
        self.told.append(("stored", name, group, block))
        return 1

    def move(self, source: int, target: int) -> int:
        moved = [name for name, owner in self.names if owner == source]
        self.forget(source)
        for name in moved:
            self.name(target, *name)
        return len(moved)

    def reset(self) -> None:
        self.names = []
        self.told.append(("cleared", b"", 0, 0))


class NamedWorld:
    """One random program on both pools."""

    def __init__(self, package: ModuleType, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_blocks = self.random.choice([2, 5, 12, 30])
        named = import_module(f"{package.__name__}.named")
        self.pool = named.NamedPool(self.num_blocks, hash_seed=seed, max_events=10_000)
        self.slow = SlowPool(self.num_blocks)
        self.leases: list[Any] = []
        self.ids: list[int] = []
        self.story: list[Any] = []
        sizes = [1, 7, 8, 16, 31, 32]
        self.known = [self.random.randbytes(self.random.choice(sizes)) for _ in range(NUM_NAMES)]

    def play(self, calls: int) -> None:
        """Random calls, each compared."""
        verbs = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        for _ in range(calls):
            verb = self.random.choice(verbs)
            self.story.append((verb.__name__, verb()))
            self.compare()
        for lease in self.leases:
            self.pool.free_blocks(lease)
        self.pool.free_ids(self.ids)
        assert self.pool.num_used_blocks == 0
        self.pool.check()

    def compare(self) -> None:
        pool, slow = self.pool, self.slow
        pool.check()
        assert pool.free_block_ids().tolist() == slow.order
        around = [0, *slow.order, 0]
        assert [pool.free_block_after(block) for block in around[:-1]] == around[1:]
        assert [pool.free_block_before(block) for block in around[1:]] == around[:-1]
        assert pool.ref_counts().tolist() == slow.held
        assert pool.num_names == len(slow.names)
        assert pool.num_cached_blocks == len({owner for _, owner in slow.names})
        for group in (0, 1):
            assert pool.find(self.known, group).tolist() == [slow.find(name, group) for name in self.known]
        for block in range(self.num_blocks):
            assert pool.names_of(block) == [name for name, owner in slow.names if owner == block]

    def some_names(self, count: int) -> tuple[list[bytes], int]:
        return [self.random.choice(self.known) for _ in range(count)], self.random.choice([0, 0, 1])

    def some_held(self) -> list[int]:
        held = [block for block in range(1, self.num_blocks) if self.slow.held[block]]
        return self.random.sample(held, min(len(held), self.random.randrange(4)))

    def do_new(self) -> Any:
        count = self.random.randrange(min(4, len(self.slow.order) + 1))
        if self.random.random() < 0.5:
            self.leases.append(self.pool.get_new_blocks(count, holder="someone"))
            taken = list(self.leases[-1])
        else:
            taken = self.pool.new_ids(count)
            self.ids += taken
        assert taken == self.slow.take(count)
        return taken

    def do_hold(self) -> Any:
        names, group = self.some_names(4)
        blocks = [block for block in self.pool.find(names, group).tolist() if block] + self.some_held()
        if self.random.random() < 0.5:
            self.leases.append(self.pool.hold(blocks))
        else:
            self.pool.hold_ids(blocks)
            self.ids += blocks
        self.slow.share(blocks)
        return blocks

    def do_hit(self) -> Any:
        names, group = self.some_names(3)
        lease = self.pool.get_cached_blocks(names, group, holder="hit")
        found = [self.slow.find(name, group) for name in names]
        expected = found[: found.index(0)] if 0 in found else found
        assert list(lease) == expected == self.pool.find_prefix(names, [group]).reshape(-1).tolist()
        self.leases.append(lease)
        self.slow.share(expected)
        return expected

    def do_free(self) -> Any:
        last = self.random.random() < 0.2
        if self.leases and self.random.random() < 0.5:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            self.pool.free_blocks(lease, last=last)
            blocks = list(lease)[::-1]
            if last:
                self.slow.free(blocks, True)
            else:
                self.free_backwards(blocks)
            return blocks
        self.random.shuffle(self.ids)
        blocks, self.ids = self.ids[:3], self.ids[3:]
        self.pool.free_ids(blocks, last=last)
        self.slow.free(blocks, last)
        return blocks

    def free_backwards(self, blocks: list[int]) -> None:
        """A lease puts its nameless blocks to the front one by one, the last block first."""
        for block in blocks:
            self.slow.free([block], False)

    def do_adopt(self) -> Any:
        blocks = [self.random.randrange(1, self.num_blocks) for _ in range(2)]
        self.pool.hold_ids(blocks)
        self.ids += blocks
        self.slow.share(blocks)
        return blocks

    def do_name(self) -> Any:
        blocks = [*self.some_held(), *self.slow.order[: self.random.choice([0, 0, 1])]]
        names, group = self.some_names(len(blocks))
        if len(blocks) == 1:
            given = int(self.pool.name_one(blocks[0], names[0], group))
        else:
            given = self.pool.name_blocks(blocks, names, group)
        assert given == sum(self.slow.name(block, name, group) for block, name in zip(blocks, names, strict=True))
        return given

    def do_move(self) -> Any:
        held = [block for block in range(1, self.num_blocks) if self.slow.held[block]]
        sources = [block for block in held if self.slow.has_name(block)]
        targets = [block for block in held if not self.slow.has_name(block)]
        if not sources or not targets:
            return None
        source, target = self.random.choice(sources), self.random.choice(targets)
        moved = self.pool.move_names(source, target)
        assert moved == self.slow.move(source, target)
        return moved

    def do_uncache(self) -> Any:
        blocks = self.random.sample(range(1, self.num_blocks), min(2, self.num_blocks - 1))
        if self.random.random() < 0.7:
            return None
        gone = [block for block in blocks if self.slow.has_name(block)]
        assert self.pool.uncache(blocks) == len(gone)
        for block in gone:
            self.slow.forget(block)
        return gone

    def do_events(self) -> Any:
        events = [(e.kind, e.name, e.group, e.block_id) for e in self.pool.take_events()]
        assert sorted(events) == sorted(self.slow.told)
        assert [e for e in events if e[0] != "removed"] == [e for e in self.slow.told if e[0] != "removed"]
        self.slow.told = []
        return len(events)

    def do_reset(self) -> Any:
        if self.random.random() < 0.9:
            return None
        self.pool.reset_prefix_cache()
        return self.slow.reset()


def play(package: ModuleType, seed: int, calls: int) -> list[Any]:
    """The story of one program."""
    world = NamedWorld(package, seed)
    world.play(calls)
    return world.story
