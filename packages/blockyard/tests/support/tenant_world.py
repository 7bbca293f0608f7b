"""A random world over a cache with tenants."""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType
from typing import Any

from blockyard.policies import EvictionPolicy
from blockyard.tenants import OTHERS, Tenant, TenantGroup
from blockyard_testing.world import World


class Watched(EvictionPolicy):  # type: ignore[misc, unused-ignore]
    """First in, first out; it notes each block that went without having been asked for."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.order: dict[int, None] = {}
        self.revived = 0
        self.num_unasked = 0

    def takes_hints(self) -> bool:
        """Hints would decide before it."""
        return False

    def insert(self, block: int, key: int, depth: int) -> None:
        self.order[block] = None

    def remove(self, block: int) -> None:
        del self.order[block]
        self.revived = block

    def evict(self) -> int:
        block = next(iter(self.order))
        del self.order[block]
        return block

    def uncache(self, block: int) -> None:
        self.num_unasked += block == self.revived

    def clear(self) -> None:
        self.order.clear()


class TenantWorld(World):
    """A world whose prompts belong to tenants with drawn limits; the cache's counts must match the blocks."""

    def __init__(self, package: ModuleType, seed: int) -> None:
        super().__init__(package, seed)
        self.watched = Watched(self.config.num_blocks)
        self.before = self.use()
        if self.is_watched:
            self.cache.set_eviction_policy(self.watch)

    def watch(self, num_blocks: int) -> Watched:
        self.watched = Watched(num_blocks)
        return self.watched

    @property
    def is_watched(self) -> bool:
        return self.seed % 2 == 0

    def set_policy(self) -> None:
        if not self.is_watched:
            super().set_policy()

    def choose_config(self) -> Any:
        config = super().choose_config()
        choose = random.Random(self.seed)
        usable = config.num_blocks - 1 - config.watermark_blocks
        self.guarantees = [0] * 4
        for _ in range(choose.randint(0, max(usable, 0))):
            self.guarantees[choose.randrange(4)] += 1
        self.has_shrunk = False
        salts = [self.tenant(choose, "a", 0), self.tenant(choose, "b", 1)]
        lora = replace(self.tenant(choose, "lora", 2), keys=(self.package.LoRA("a"),))
        tenants: tuple[Any, ...] = (*salts, lora)
        if choose.random() < 0.4:
            guarantee = sum(self.guarantees[:2])
            most = choose.choice((None, guarantee + choose.randint(1, 30)))
            tenants = (TenantGroup("both", tuple(salts), choose.randint(1, 3), 0, most), lora)
        if choose.random() < 0.5:
            tenants = (*tenants, self.tenant(choose, "*", 3))
        return replace(config, tenants=tenants)

    def tenant(self, choose: random.Random, name: str, number: int) -> Any:
        guarantee = self.guarantees[number]
        limits = [choose.choice((None, None, guarantee + choose.randint(1, 30))) for _ in range(3)]
        return Tenant(name, choose.randint(1, 5), guarantee, *limits)

    def keys(self, earlier: Any) -> tuple[Any, ...]:
        package = self.package
        all_keys = ((), (package.LoRA("a"),), (package.CacheSalt("a"),), (package.CacheSalt("b"), package.LoRA("a")))
        keys = (
            tuple(earlier.keys) if earlier is not None and self.random.random() < 0.7 else self.random.choice(all_keys)
        )
        self.asker = self.name_of(keys)
        return keys

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
        self.before = self.use()
        self.watched.revived = self.watched.num_unasked = 0
        self.asker = ""
        super().act(actor)
        after = self.use()
        self.compare(after)
        name = self.story[-1][0]
        if name in ("allocate", "allocate_batch", "swap_in"):
            self.require_guarantees(self.before, after)

    def compute(self, plan: Any, seqs: list[Any]) -> None:
        """Blocks were reserved."""
        self.require_guarantees(self.before, self.use())
        super().compute(plan, seqs)

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
            assert self.cache.num_free_blocks >= claims, "a guarantee that could not be claimed"

    def require_guarantees(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Some took blocks: no other has lost any within its guarantee, and none went that nobody was asked for."""
        assert self.watched.num_unasked == 0 or self.has_shrunk
        taken = [name for name in before if after[name].num_held > before[name].num_held]
        for name, use in before.items():
            left = after[name].num_held + after[name].num_idle
            if name not in (*taken, self.asker) and not self.has_shrunk:
                assert left >= min(use.num_held + use.num_idle, use.min_blocks), (
                    f"{name} lost blocks within its guarantee"
                )
                self.counts["guarantees kept"] += use.num_held + use.num_idle > 0
            self.counts["blocks taken back"] += left < use.num_held + use.num_idle
