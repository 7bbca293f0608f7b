"""Hand-overs of hybrid models by a sender whose cache has several steps in flight.

The program is that of `core.test_states_world`: sequences run, fail, are forked, cut and freed while two to four steps
are open. An offer's blocks are read meanwhile, and must have the keys, values and states of its tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from blockyard import (
    BlockyardError,
    CacheConfig,
    CacheSalt,
    KVCacheManager,
    LayerGroup,
    StateConfig,
    StateSpec,
    StepPlan,
)
from blockyard_engine.parallel import HandoffSender, HeadShards, Offer, PeerInfo, StaleOffer
from blockyard_testing import seeds
from blockyard_testing.state_memory import StateMemory
from blockyard_testing.states_world import World

TTL = 60


class Memory(StateMemory):
    """Keys, values and states: a slot has the name of its token, and a block belongs to one group or to a state."""

    def __init__(self, cache: KVCacheManager, salts: dict[int, object]) -> None:
        super().__init__(cache)
        self.salts = salts
        self.sizes = [group.block_size for group in cache.config.layer_groups]
        #: By group and slot.
        self.keys_and_values: dict[tuple[int, int], Any] = {}

    def empty(self, block: int, group: int) -> None:
        for other, size in enumerate(self.sizes):
            for slot in range(block * size, (block + 1) * size) if other != group else ():
                self.keys_and_values.pop((other, slot), None)

    def prepare(self, plan: StepPlan) -> None:
        for (source, target), group in zip(plan.copies.tolist(), plan.copy_groups.tolist(), strict=True):
            self.empty(target, group)
            for place in range(self.sizes[group]):
                name = self.keys_and_values.get((group, source * self.sizes[group] + place))
                self.keys_and_values[group, target * self.sizes[group] + place] = name
        super().prepare(plan)

    def run(self, plan: StepPlan, seqs: list[int], known: dict[int, list[int]]) -> None:
        super().run(plan, seqs, known)
        ends = np.cumsum(plan.num_scheduled).tolist()
        for group, part in enumerate(plan.groups):
            for seq, start, count, end in zip(
                seqs, plan.num_computed.tolist(), plan.num_scheduled.tolist(), ends, strict=True
            ):
                for place, slot in enumerate(part.slot_mapping[end - count : end].tolist()):
                    self.empty(slot // self.sizes[group], group)
                    self.keys_and_values[group, slot] = self.salts[seq], tuple(known[seq][: start + place + 1])
        for blocks in plan.states.save_blocks.tolist():
            for block in blocks:
                self.empty(block, -1)


class SendingWorld(World):
    """A world whose offers are held and read whatever the steps in flight do."""

    def __init__(self, draw: random.Random, config: CacheConfig) -> None:
        super().__init__(draw, config, False)
        self.memory = Memory(self.cache, self.salts)
        groups = range(len(config.layer_groups))
        shape: dict[str, Any] = {"dtype": "float32", "num_layers": len(groups), "head_size": 1}
        layers = tuple((group,) for group in groups)
        peer = PeerInfo.of(config, "here", 1, shards=HeadShards.even(1), layer_groups=layers, **shape)
        self.sender = HandoffSender(self.cache, peer, TTL)
        self.offers: list[tuple[Offer, object]] = []
        self.counts: Counter[str] = Counter()

    def offer(self) -> None:
        seq = self.draw.choice([*self.tokens])
        is_taken = self.draw.random() < 0.4
        call = self.sender.take_over if is_taken else self.sender.offer
        keys = (CacheSalt(str(self.salts[seq])),) if self.salts[seq] else ()
        try:
            offer = call(seq, self.now, keys)
        except BlockyardError as error:
            self.counts[type(error).__name__] += 1
            return
        assert offer.token_ids.tolist() == self.tokens[seq]
        self.offers.append((offer, self.salts[seq]))
        self.counts["offers"] += 1
        if is_taken:
            del self.tokens[seq]

    def read(self) -> None:
        """Read all that an offer names; then end, renew or keep it."""
        if not self.offers:
            return
        offer, salt = self.draw.choice(self.offers)
        try:
            self.require_right(offer, salt)
        except StaleOffer:
            self.counts["ended before it was read"] += 1
            self.offers.remove((offer, salt))
            return
        self.counts[f"read with {min(len(self.flying), 3)} steps open"] += 1
        self.draw.choice([self.sender.release, lambda number: self.sender.renew(number, self.now), id])(offer.id)

    def require_right(self, offer: Offer, salt: object) -> None:
        sender, memory, tokens = self.sender, self.memory, tuple(offer.token_ids.tolist())
        assert sender.require_held(offer.id, self.now) is offer
        for group, (table, size) in enumerate(zip(offer.tables, memory.sizes, strict=True)):
            for place in range(offer.num_computed):
                block = int(table[place // size])
                name = memory.keys_and_values.get((group, block * size + place % size))
                assert not block or name == (salt, tokens[: place + 1])
        assert memory.slots[sender.state_slot(offer.id, self.now)] == tokens[: offer.num_computed]
        if offer.checkpoint_tokens:
            blocks = sender.checkpoint_blocks(offer.id, self.now).tolist()
            assert [memory.blocks[block] for block in blocks] == [
                (tokens[: offer.checkpoint_tokens], part) for part in range(len(blocks))
            ]
            self.counts["kept states there" if blocks else "kept states gone"] += 1

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            acts = [self.step] * 8 + [self.admit] * 3 + [self.read] * 4 + [self.lease, self.retain, self.hint]
            if self.tokens:
                acts += [self.free, self.fork, self.cut] + [self.offer] * 3
            self.draw.choice(acts)()
            self.now += 1
            self.sender.expire(self.now)
            self.sender.check()
            if self.draw.random() < 0.3:
                self.cache.check()
        while self.flying:
            self.land()
        self.sender.close()
        for lease in self.leases:
            self.cache.pool.free_blocks(lease)
        self.cache.free([*self.tokens])
        self.cache.check()
        assert self.cache.num_used_blocks == 0


def config(draw: random.Random) -> CacheConfig:
    size = draw.choice([1, 4])
    groups = [LayerGroup(size, token_bytes=8)]
    if draw.random() < 0.4:
        groups.append(LayerGroup(size * draw.choice([1, 2]), draw.choice([0, 9]), token_bytes=8))
    state = StateSpec(checkpoint_every=draw.choice([size, 8]), state_bytes=draw.choice([1, 8 * size, 24 * size]))
    groups.insert(draw.randrange(len(groups) + 1), state)
    return CacheConfig(
        draw.choice([60, 200, 1000]),
        groups=tuple(groups),
        max_num_seqs=draw.choice([4, 12]),
        max_model_len=200,
        states=StateConfig(
            order=draw.choice(["index", "lru"]),
            checkpoints=draw.choice([("branch", "ends", "pow2"), ("last",), ("every:8",)]),
            cut_chunks=draw.random() < 0.7,
        ),
        max_steps_in_flight=draw.choice([2, 3, 4]),
        partial_hits=False,
    )


def test_offers_are_read_while_several_steps_are_open() -> None:
    draw = random.Random(f"{seeds.run_seed()} offers in flight")
    counts: Counter[str] = Counter()
    num_worlds = 0
    wanted = (*(f"read with {number} steps open" for number in range(4)), "kept states there", "kept states gone")
    while num_worlds < seeds.draws(30, 3) or not all(counts[name] for name in wanted):
        world = SendingWorld(draw, config(draw))
        try:
            world.run(150)
        except Exception as error:
            error.add_note(f"world {num_worlds} of this seed")
            raise
        counts += world.counts
        num_worlds += 1
    seeds.lines.append(f"offers in flight: {dict(counts)}")
