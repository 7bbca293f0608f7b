"""Random caches, told over a network that loses, doubles, delays and cuts: after one heartbeat the mirror is exact.

A quarter of the publishers are as vLLM's are: without snapshots, so what they kept may be too little to know all.

    python -m tests.wires --worlds 700 --seed 7     # 100,000 random calls and more, and what happened on the way

A wrong claim is a prompt of which the mirror says another number of tokens than the cache: of what is cached now, of
what was cached some time before, and of both under other keys.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import Any

import blockyard
from blockyard._build import build_name
from blockyard.events.following.mirror import Mirror
from blockyard.events.following.stream import Trust
from blockyard_testing.seeds import run_seed
from blockyard_testing.told import Told, contents_of
from blockyard_testing.world import World

from .events.wires import Wire

CALLS_A_WORLD = 50
#: Chains that were cached before, of which the mirror is asked again.
MAX_FORMER = 100


class Compared:
    """The cache of a random world with a mirror that follows it over a wire; they are compared now and then."""

    cache: Any
    config: Any
    told: Told
    wire: Wire
    former: dict[Any, None]

    def take_events(self) -> None:
        changes = self.cache.take_events()
        self.told.apply(changes)
        self.wire.tell(changes)
        if self.wire.draw.random() < 0.1:
            self.beat()

    def beat(self) -> None:
        """One heartbeat, after which the mirror says the same as the cache, or that it knows too little."""
        self.wire.beat()
        if self.wire.mirror.trust(self.wire.name) is Trust.LIVE:
            self.compare()
        else:
            assert self.wire.is_foreign

    def compare(self) -> None:
        """Every chain of tokens that the cache has told of, some of those it told of before, under their keys, and the
        same under others."""
        chains = self.chains()
        for prompt, keys in [*chains, *((list(prompt), keys) for prompt, keys in self.former)]:
            for asked in (keys, (blockyard.CacheSalt("nobody"),)):
                self.wire.counts["matches"] += 1
                found = self.wire.mirror.match(prompt, asked).get(self.wire.name)
                claimed, cached = found.num_tokens if found else 0, self.hit(prompt, asked)
                assert claimed == cached, f"{claimed} tokens claimed, {cached} cached: {prompt} {asked}"
                self.wire.counts["tokens claimed"] += claimed
        for prompt, keys in chains:
            self.former[tuple(prompt), keys] = None
        while len(self.former) > MAX_FORMER:
            del self.former[self.wire.draw.choice(list(self.former))]

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
            return self.cache.num_cached_tokens([*prompt, 0], extra_keys=keys) // size * size
        index = self.cache._parts.token_blocks.index
        names = {block: name for name, block in contents_of(index, size).items()}
        name = index.known_root(plain(keys))
        for start in range(0, len(prompt), size):
            name = names.get((name, tuple(prompt[start : start + size])), 0)
            if not name:
                return start
        return len(prompt)


class WiredWorld(Compared, World):
    """A random world whose events are sent over a wire, and compared with the mirror now and then."""

    def __init__(self, seed: int, mirror: Mirror | None = None, name: str = "worker") -> None:
        super().__init__(blockyard, seed)
        self.wire = Wire(self.config, seed, mirror, name)
        self.former: dict[Any, None] = {}

    def choose_config(self) -> Any:
        """A cache with events, and no window of one token: it needs no block, so nobody outside sees a hit of it."""
        while True:
            config = super().choose_config()
            if config.observe.enable_kv_cache_events and all(each.sliding_window != 1 for each in config.layer_groups):
                return config

    def more_config(self, groups: tuple[Any, ...], size: int) -> dict[str, Any]:
        return super().more_config(groups, size) | {"enable_kv_cache_events": True}


def keys_of(root: tuple[Any, ...]) -> tuple[Any, ...]:
    kinds = {"salt": blockyard.CacheSalt, "lora": blockyard.LoRA}
    return tuple(kinds[key[0]](*key[1:]) for key in root)


def plain(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        ("salt", key.value) if isinstance(key, blockyard.CacheSalt) else ("lora", key.name, key.path) for key in keys
    )


def run_worlds(num_worlds: int, num_calls: int, seed: int) -> Counter[str]:
    """`num_worlds` worlds, each with a mirror of its own; the cache of some is replaced by an empty one on the way."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(num_worlds):
        counts += run_world(draw.randrange(2**32), num_calls)
    return counts


def run_world(seed: int, num_calls: int) -> Counter[str]:
    """One mirror, and up to three caches of one name that it hears of, one after another."""
    draw = random.Random(seed)
    wire: Wire | None = None
    counts: Counter[str] = Counter(worlds=1)
    for _ in range(1 + draw.randrange(3)):
        world = WiredWorld(draw.randrange(2**32), None if wire is None else wire.mirror)
        if wire is not None:
            wire.restart(world.config)
            world.wire = wire
        wire = world.wire
        try:
            world.run_calls(num_calls)
            world.beat()
        except Exception as error:
            error.add_note(
                f"run_world({seed}, {num_calls}), after {len(world.story)} calls of WiredWorld({world.seed})"
            )
            raise
        counts["calls"] += num_calls
    assert wire is not None
    return counts + wire.counts


def main() -> None:
    """Many worlds, and what happened on their wires; the first line has the seed, that repeats them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--worlds", type=int, default=700)
    parser.add_argument("--calls", type=int, default=CALLS_A_WORLD, help="of each cache of a world, one to three")
    parser.add_argument("--seed", type=int, default=None, help="default: BLOCKYARD_SEED, or a random one")
    options = parser.parse_args()
    seed = run_seed() if options.seed is None else options.seed
    print(f"seed {seed}, {build_name()}, {options.worlds} worlds", flush=True)
    began = time.perf_counter()
    counts = run_worlds(options.worlds, options.calls, seed)
    for name, count in sorted(counts.items()):
        print(f"{count:>12,}  {name}")
    print(f"no wrong claim, {time.perf_counter() - began:.1f} s, seed {seed}")


if __name__ == "__main__":
    main()
