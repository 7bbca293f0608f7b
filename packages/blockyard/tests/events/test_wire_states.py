"""States of hybrid models over a wire that loses: a mirror claims a hit where a state stands, and nowhere else."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec

from blockyard import CacheConfig, KVCacheManager, LayerGroup, StateSpec
from blockyard.config import cache_config
from blockyard.core.index.prompt import Hit
from blockyard.events.following.mirror import Mirror
from blockyard.events.publishing.feed import Feed
from blockyard.events.tables.content_table import ContentTable
from blockyard.events.wire import STATE_KIND, BlockRemoved, BlockStored, decode_batch
from blockyard_testing import seeds
from blockyard_testing.state_memory import StateMemory, compute
from blockyard_testing.states_world import World as StateWorld
from blockyard_testing.states_world import config as state_config
from blockyard_testing.told import Told

from ..wires import Compared
from .wires import Wire


class WiredStates(Compared, StateWorld):
    """A random world with states whose events go over a wire."""

    def __init__(self, draw: random.Random, config: CacheConfig, mirror: Mirror | None) -> None:
        super().__init__(draw, config, False)
        self.config = config
        self.told = Told()
        self.wire = Wire(config, draw.randrange(2**32), mirror)
        self.former = {}

    def acted(self) -> None:
        if self.draw.random() < 0.5:
            self.take_events()
            assert self.told.differences(self.cache) == []
        if self.draw.random() < 0.01:
            self.cache.reset_prefix_cache()

    def hit(self, prompt: list[int], keys: tuple[Any, ...]) -> int:
        """What is cached of a prompt; where its state has no room beside it now, a lookup says that nothing is hit."""
        parts = self.cache._parts
        asked = self.cache._prompt([*prompt, 0], keys)
        root = parts.token_blocks.index.known_root(asked.keys)
        found = parts.token_blocks.index.find_under(root, asked, len(prompt) // parts.block_size)
        hit = Hit(root, found)
        parts.store.limit(hit)
        num_tokens = int(hit.num_usable) * parts.block_size
        parts.store.fit(hit, len(prompt) + 1, self.cache.num_free_blocks - self.config.watermark_blocks)
        assert self.cache.num_cached_tokens([*prompt, 0], extra_keys=keys) == hit.num_usable * parts.block_size
        return num_tokens


def choose_config(draw: random.Random) -> CacheConfig:
    """No window of one token: that needs no block at all, so a hit of it cannot be told from outside."""
    while True:
        policy = draw.choice(["lru", "density"])
        config = state_config(draw, draw.choice([40, 130, 400]), eviction_policy=policy, enable_kv_cache_events=True)
        if all(group.sliding_window != 1 for group in config.layer_groups):
            return config


def run_world(draw: random.Random, num_steps: int) -> Counter[str]:
    """One mirror, and one or two caches of one name that it hears of, one after another."""
    counts: Counter[str] = Counter()
    wire: Wire | None = None
    for _ in range(draw.choice([1, 1, 2])):
        world = WiredStates(draw, choose_config(draw), None if wire is None else wire.mirror)
        if wire is not None:
            wire.restart(world.config)
            world.wire = wire
        wire = world.wire
        world.run(num_steps)
        world.take_events()
        world.beat()
    assert wire is not None
    counts += wire.counts
    return counts


def test_after_a_heartbeat_the_mirror_claims_what_the_cache_hits() -> None:
    draw = random.Random(f"{seeds.run_seed()} wired states")
    counts: Counter[str] = Counter()
    happened = ("matches", "tokens claimed", "lost", "late", "not heard", "restarts", "unreadable", "merged")
    num_worlds = 0
    while num_worlds < seeds.draws(60, 3) or not all(counts[name] > 0 for name in happened):
        counts += run_world(draw, 60)
        num_worlds += 1
    seeds.lines.append("states over wires: " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items())))


class Heard:
    """A cache, and a mirror that hears all of it."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.feed = Feed(ContentTable(cache.config, True), True, 100, None, lambda: 1000.0)
        self.mirror = Mirror()

    def hear(self) -> list[BlockStored | BlockRemoved]:
        """Hear what is new; return the events of states."""
        number, payload = self.feed.make_message(self.cache.take_events()) or self.feed.heartbeat()
        self.mirror.receive_live("worker", number, payload)
        while (start := self.mirror.replay_from("worker")) is not None:
            self.mirror.begin_replay("worker")
            for number, kept in self.feed.replay(start):
                self.mirror.receive_replayed("worker", number, kept)
            self.mirror.end_replay("worker")
        events = [event for event in decode_batch(payload).events if isinstance(event, BlockStored | BlockRemoved)]
        return [event for event in events if event.group_idx == 1]

    def claimed(self, prompt: list[int]) -> int:
        found = self.mirror.match(prompt).get("worker")
        return found.num_tokens if found else 0


PROMPT = list(range(100, 140))


def computed(places: tuple[str, ...], **fields: Any) -> Heard:
    groups = (LayerGroup(4, token_bytes=8), StateSpec(state_bytes=100, checkpoint_every=4))
    config = cache_config(
        100, groups=groups, state_checkpoints=places, enable_kv_cache_events=True, max_num_seqs=4, **fields
    )
    cache = KVCacheManager(config)
    compute(cache, StateMemory(cache), cache.allocate(PROMPT), list(PROMPT), [])
    return Heard(cache)


def test_keys_and_values_alone_are_no_claim() -> None:
    heard = computed(("every:16",))
    heard.hear()
    for length in range(1, 41):
        assert heard.claimed(PROMPT[:length]) == length // 16 * 16
    bare = computed(())
    assert bare.hear() == []
    assert bare.claimed(PROMPT) == 0


def test_a_state_is_one_block_behind_those_of_attention() -> None:
    stored = computed(("every:16",)).hear()
    assert [type(event) for event in stored] == [BlockStored, BlockStored]
    for event in stored:
        assert isinstance(event, BlockStored)
        assert event.kv_cache_spec_kind == STATE_KIND
        assert (event.block_size, event.num_groups, event.kv_cache_spec_sliding_window) == (4, 2, None)
        assert len(msgspec.msgpack.decode(bytes(event.token_ids))) == 4
        assert event.parent_block_hash is not None


def test_a_part_of_a_state_is_no_state() -> None:
    heard = computed(("every:32",))
    cache = heard.cache
    cache.free(list(cache.running()))
    lease = cache.hold_cached(PROMPT[:32])
    parts = [int(block) for block in lease.block_ids if cache.block(int(block)).group == 1]
    cache.pool.free_blocks(lease)
    heard.hear()
    assert (len(parts), heard.claimed(PROMPT)) == (4, 32)
    taken = []
    while all(cache.block(block).is_cached for block in parts):
        taken.append(cache.pool.get_new_blocks(1))
    for one in taken:
        cache.pool.free_blocks(one)
    assert 0 < sum(cache.block(block).is_cached for block in parts) < 4
    assert cache.num_cached_tokens([*PROMPT, 0]) == 0
    assert [type(event) for event in heard.hear()] == [BlockRemoved]
    assert heard.claimed(PROMPT) == 0
