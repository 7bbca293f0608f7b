"""Random caches, told over a network that loses, doubles, delays and cuts: after one heartbeat the mirror is exact."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import blockyard
from blockyard.events.following.mirror import Mirror

from ..support import seeds
from ..support.seeds import run_seed
from ..support.told import contents_of
from ..world import World
from .wires import Wire

NUM_WORLDS = 120 if blockyard.compiled() else 4
CALLS_A_WORLD = 50


class WiredWorld(World):
    """A random world whose events go over a wire; now and then it is compared with the mirror behind it."""

    def __init__(self, seed: int, mirror: Mirror | None = None, name: str = "worker") -> None:
        super().__init__(blockyard, seed)
        self.wire = Wire(self.config, seed, mirror, name)

    def choose_config(self) -> Any:
        """No window of one token: that needs no block at all, so a hit of it cannot be told from outside."""
        while True:
            config = super().choose_config()
            if all(group.sliding_window != 1 for group in config.layer_groups):
                return config

    def more_config(self, groups: tuple[Any, ...], size: int) -> dict[str, Any]:
        return super().more_config(groups, size) | {"enable_kv_cache_events": True}

    def take_events(self) -> None:
        changes = self.cache.take_events()
        self.told.apply(changes)
        self.wire.tell(changes)
        if self.wire.draw.random() < 0.1:
            self.wire.beat()
            self.compare()

    def compare(self) -> None:
        """Every chain of tokens that the cache has told of, under its keys, and the same under others."""
        for prompt, keys in self.chains():
            for asked in (keys, (blockyard.CacheSalt("nobody"),)):
                self.wire.counts["matches"] += 1
                found = self.wire.mirror.match(prompt, asked).get(self.wire.name)
                assert (found.num_tokens if found else 0) == self.hit(prompt, asked), (prompt, asked)

    def chains(self) -> list[tuple[list[int], tuple[Any, ...]]]:
        """Of each content the tokens from the beginning, with the keys of the request; none of those behind spans."""
        found = []
        for content in self.told.contents:
            tokens: list[int] = []
            while content in self.told.contents:
                content, block = self.told.contents[content]
                tokens = [*block, *tokens]
            root = self.told.roots.get(content)
            if root is not None and not (root and isinstance(root[0], int)):
                found.append((tokens, keys_of(root)))
        return found

    def hit(self, prompt: list[int], keys: tuple[Any, ...]) -> int:
        """The tokens of a prompt that the cache has, by its own structures and lookups; pending blocks left out."""
        size = self.config.hash_block_size
        if self.config.is_mapped:  # a lookup leaves the last token out
            return self.cache.num_cached_tokens([*prompt, 0], keys) // size * size
        index = self.cache._parts.token_blocks.index
        names = {block: name for name, block in contents_of(index, size).items()}
        name = index.known_root(plain(keys))
        for start in range(0, len(prompt), size):
            name = names.get((name, tuple(prompt[start : start + size])), 0)
            if not name:
                return start
        return len(prompt)


def keys_of(root: tuple[Any, ...]) -> tuple[Any, ...]:
    kinds = {"salt": blockyard.CacheSalt, "lora": blockyard.LoRA}
    return tuple(kinds[key[0]](*key[1:]) for key in root)


def plain(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        ("salt", key.value) if isinstance(key, blockyard.CacheSalt) else ("lora", key.name, key.path) for key in keys
    )


def run_worlds(num_worlds: int, num_calls: int, seed: int) -> Counter[str]:
    """So many worlds, each with a mirror of its own; the cache of some is replaced by an empty one on the way."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(num_worlds):
        world_seed = draw.randrange(2**32)
        world = WiredWorld(world_seed)
        try:
            world.run_calls(num_calls)
            for _ in range(draw.randrange(3)):
                wire = world.wire
                wire.restart()
                world = WiredWorld(draw.randrange(2**32), wire.mirror)
                wire.config = world.config
                wire.feed = wire._new_feed()
                world.wire = wire
                world.run_calls(num_calls)
        except AssertionError as error:
            raise AssertionError(f"WiredWorld({world_seed}): {error}") from error
        counts += world.wire.counts
    return counts


def test_after_a_heartbeat_the_mirror_is_the_cache() -> None:
    counts = run_worlds(NUM_WORLDS, CALLS_A_WORLD, run_seed())
    seeds.lines.append("wires: " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items())))
    happened = ("matches", "lost", "late", "doubled", "not heard", "replays cut", "restarts")
    assert not blockyard.compiled() or all(counts[name] > 5 for name in happened), counts
