"""The prefix index: contents, duplicates, roots, its own check(), and a plain dict of prefixes beside it.

What an attacker can do stands in test_prefix_collisions.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from blockyard import BlockLease, BlockPool, CacheSalt, InvariantError, LoRA
from blockyard.core.index.checking import check_index
from blockyard.core.index.prefix_index import PrefixIndex
from blockyard.core.index.room import ID_BITS, ID_MASK
from blockyard_testing.seeds import run_seed

from ..support.hash_chains import Chains, random_block, random_blocks, twin_of

# ---------------------------------------------------------------- contents


def test_equal_tokens_under_different_parents() -> None:
    """Even without collisions: equal second halves of two prompts are no hit."""
    draw, chains = random.Random(4), Chains()
    p, q, c = random_blocks(draw, 3)
    p_id, q_id = chains.add([p]), chains.add([q])
    under_p = chains.add([p, c])
    assert chains.find([q, c]) == [q_id]
    assert chains.find([c]) == []
    assert chains.find([p, c]) == [p_id, under_p]


def test_a_block_at_another_depth_is_another_content() -> None:
    draw, chains = random.Random(5), Chains()
    a = random_block(draw)
    ids = [chains.add([a] * depth) for depth in (1, 2, 3)]
    assert chains.find([a] * 5) == ids
    chains.index.remove(ids[1])
    assert chains.find([a] * 5) == ids[:1]


def test_a_content_published_again_is_a_new_one() -> None:
    """An identity is never used twice: what stood under the old parent block is not found under the new one."""
    draw, chains = random.Random(6), Chains()
    p, c = random_blocks(draw, 2)
    old, child = chains.add([p]), chains.add([p, c])
    identity = chains.index.identity[2 * old]
    chains.index.remove(old)
    assert chains.find([p, c]) == []
    chains.put([p], old)
    assert chains.index.identity[2 * old] > identity
    assert chains.find([p, c]) == [old], "the child hangs on an identity that is gone forever"
    again = chains.add([p, c])
    assert chains.find([p, c]) == [old, again] != [old, child]
    check_index(chains.index)


def test_a_prompt_longer_than_any_before_goes_on_from_what_was_found() -> None:
    """The scratch room for hashes grows here, in the middle of publishing; what was found must survive that.

    Else the new blocks get the hash of another chain: they are cached, cost room, and are never hit.
    """
    tokens = list(range(1, 201))
    for num_cached in (1, 10, 64, 65, 199):
        pool = BlockPool(202, 1)
        lease = pool.get_new_blocks(200)
        pool.cache_full_blocks(lease, tokens[:num_cached])
        pool.cache_full_blocks(lease, tokens, num_cached_blocks=num_cached)
        assert pool.num_cached_tokens(tokens) == 200
        pool.check()


# ---------------------------------------------------------------- duplicates


def ring(index: PrefixIndex, oldest: int) -> list[int]:
    blocks = [oldest]
    while index.rings.next_equal[blocks[-1]] not in (0, oldest):
        blocks.append(index.rings.next_equal[blocks[-1]])
    assert len(blocks) == 1 or [index.rings.prev_equal[block] for block in blocks] == [blocks[-1], *blocks[:-1]]
    return blocks


def test_the_first_lookup_of_a_longer_prompt_than_any_before_finds_its_blocks() -> None:
    pool = BlockPool(1_000, 4)
    for cached, asked in ((10, 100), (60, 300), (200, 900)):
        tokens = np.arange(cached * 10_000, cached * 10_000 + 4 * asked)
        lease = pool.get_new_blocks(cached)
        pool.cache_full_blocks(lease, tokens[: 4 * cached])
        assert list(pool.get_cached_blocks(tokens)) == list(lease)


def test_duplicates_share_an_identity_and_one_slot() -> None:
    draw, chains = random.Random(13), Chains()
    a = random_block(draw)
    ids = [chains.add([a]) for _ in range(4)]
    assert ring(chains.index, ids[0]) == ids
    assert len({chains.index.identity[2 * block] for block in ids}) == 1
    assert [slot for slot in chains.slots() if slot] == ids[:1]
    assert chains.index.num_indexed == 4
    check_index(chains.index)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2), (2, 0, 1, 3)])
def test_the_oldest_duplicate_left_is_hit(order: tuple[int, ...]) -> None:
    """Whichever is removed first, contents after it stay reachable until the last duplicate is removed."""
    draw, chains = random.Random(14), Chains()
    a, c = random_blocks(draw, 2)
    ids = [chains.add([a]) for _ in range(4)]
    child = chains.add([a, c])
    left = list(ids)
    for gone in order:
        chains.index.remove(ids[gone])
        left.remove(ids[gone])
        check_index(chains.index)
        assert chains.find([a, c]) == ([left[0], child] if left else [])
        if left:
            assert ring(chains.index, left[0]) == left
    assert chains.index.num_indexed == 1


def test_new_block_is_the_newest_duplicate() -> None:
    draw, chains = random.Random(15), Chains()
    a = random_block(draw)
    ids = [chains.add([a]) for _ in range(3)]
    chains.index.remove(ids[0])
    chains.put([a], ids[0])
    assert chains.find([a]) == [ids[1]]
    assert ring(chains.index, ids[1]) == [ids[1], ids[2], ids[0]]


def test_duplicates_of_colliding_contents_keep_to_their_own_ring() -> None:
    draw, chains = random.Random(16), Chains()
    a = random_block(draw)
    b = twin_of(a, chains.keys, draw)
    ids = [chains.add([block]) for block in (a, b, a, b, a)]
    assert ring(chains.index, ids[0]) == [ids[0], ids[2], ids[4]]
    assert ring(chains.index, ids[1]) == [ids[1], ids[3]]
    chains.index.remove(ids[0])
    check_index(chains.index)
    assert (chains.find([a]), chains.find([b])) == ([ids[2]], [ids[1]])


# ---------------------------------------------------------------- roots


def cached(pool: BlockPool, tokens: list[int], keys: tuple[object, ...] = ()) -> BlockLease:
    lease = pool.get_new_blocks(len(tokens) // pool.block_size)
    pool.cache_full_blocks(lease, tokens, extra_keys=keys)
    return lease


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
TENANTS: list[tuple[object, ...]] = [
    (),
    (LoRA("a"),),
    (LoRA("b"),),
    (LoRA(""),),
    (CacheSalt("a"),),
    (CacheSalt("b"),),
    (CacheSalt(""),),
    (LoRA("a"), CacheSalt("a")),
    (LoRA("a"), CacheSalt("b")),
    (LoRA("b"), CacheSalt("a")),
]


def test_only_the_same_keys_hit() -> None:
    """Ten tenants, one prompt: each hits its own blocks and nobody else's. LoRA('a') is not CacheSalt('a')."""
    for owner in TENANTS:
        pool = BlockPool(64, 4)
        cached(pool, PROMPT, owner)
        assert [pool.num_cached_tokens(PROMPT, extra_keys=keys) for keys in TENANTS] == [
            8 if keys == owner else 0 for keys in TENANTS
        ]
    pool = BlockPool(64, 4)
    leases = [cached(pool, PROMPT, keys) for keys in TENANTS]
    for lease, keys in zip(leases, TENANTS, strict=True):
        assert list(pool.get_cached_blocks(PROMPT, extra_keys=keys)) == list(lease)
    pool.check()


def test_keys_are_a_set_in_any_order_and_form() -> None:
    pool = BlockPool(64, 4)
    lease = cached(pool, PROMPT, (LoRA("x"), CacheSalt("y")))
    assert list(pool.get_cached_blocks(PROMPT, extra_keys=(CacheSalt("y"), LoRA("x")))) == list(lease)
    assert list(pool.get_cached_blocks(PROMPT, extra_keys=[CacheSalt("y"), LoRA("x")])) == list(lease)
    cached(pool, [9] * 4)
    assert pool.num_cached_tokens([9] * 4, extra_keys=[]) == 4


def test_the_least_recently_used_root_is_forgotten() -> None:
    """A pool of four blocks remembers five roots.

    The first is forgotten by the sixth; its block, still held, is never hit again, and its tenant starts anew.
    """
    pool = BlockPool(4, 1)
    salts = [(CacheSalt(str(number)),) for number in range(6)]
    held = cached(pool, [7], salts[0])
    for keys in salts[1:5]:
        pool.free_blocks(cached(pool, [7], keys))
    assert pool.num_cached_tokens([7], extra_keys=salts[0]) == 1
    pool.free_blocks(cached(pool, [7], salts[5]))
    assert pool.num_cached_tokens([7], extra_keys=salts[0]) == 0
    assert pool.num_cached_blocks == 3, "it stays in the index until it is evicted"
    again = cached(pool, [7], salts[0])
    assert list(pool.get_cached_blocks([7], extra_keys=salts[0])) == list(again) != list(held)
    pool.check()


def test_publishing_under_a_root_keeps_it() -> None:
    pool = BlockPool(4, 1)
    salts = [(CacheSalt(str(number)),) for number in range(6)]
    held = cached(pool, [7], salts[0])
    for keys in salts[1:5]:
        pool.free_blocks(cached(pool, [7], keys))
    pool.free_blocks(cached(pool, [8], salts[0]))
    pool.free_blocks(cached(pool, [7], salts[5]))
    assert pool.num_cached_tokens([7], extra_keys=salts[0]) == 1
    assert pool.num_cached_tokens([7], extra_keys=salts[1]) == 0, "now the second was the least recently used"
    pool.free_blocks(held)


def test_lookup_makes_no_root() -> None:
    """Otherwise anybody could push the other tenants' roots out by asking under a thousand salts."""
    pool = BlockPool(4, 1)
    cached(pool, [7])
    for number in range(20):
        keys = (CacheSalt(str(number)),)
        assert pool.num_cached_tokens([7], extra_keys=keys) == 0
        assert len(pool.get_cached_blocks([7], extra_keys=keys)) == 0
        assert pool.get_cached_block([7], extra_keys=keys) is None
    assert pool.num_cached_tokens([7]) == 1


# ---------------------------------------------------------------- check() sees what is broken


def set_item(name: str, position: int, value: int) -> Callable[[PrefixIndex], None]:
    def corrupt(index: PrefixIndex) -> None:
        getattr(index.rings if name.endswith("_equal") else index, name)[position] = value

    return corrupt


def flip_lowest_bit(name: str, position: int) -> Callable[[PrefixIndex], None]:
    def corrupt(index: PrefixIndex) -> None:
        getattr(index, name)[position] ^= 1

    return corrupt


def flip_bit_of_token(block: int) -> Callable[[PrefixIndex], None]:
    def corrupt(index: PrefixIndex) -> None:
        index.rows.words[index.rows.start_of(block)] ^= 1

    return corrupt


def empty_slot_of(block: int) -> Callable[[PrefixIndex], None]:
    def corrupt(index: PrefixIndex) -> None:
        for position, slot in enumerate(list(index._slots)):
            if slot & ID_MASK == block:
                index._slots[position] = 0

    return corrupt


def move_slot_of(block: int) -> Callable[[PrefixIndex], None]:
    """As far as a run of five can reach, and further: no probe that begins at home comes there."""

    def corrupt(index: PrefixIndex) -> None:
        slots = list(index._slots)
        position = next(position for position, slot in enumerate(slots) if slot & ID_MASK == block)
        index._slots[position] = 0
        index._slots[(position + 20) % len(slots)] = slots[position]

    return corrupt


def count_one_more(name: str) -> Callable[[PrefixIndex], None]:
    def corrupt(index: PrefixIndex) -> None:
        setattr(index, name, getattr(index, name) + 1)

    return corrupt


#: Blocks 1, 2 and 3 cache a and two duplicates of it, 4 caches a+c, 5 caches b. Contents 2, 3 and 4 under root 1.
CORRUPTIONS = {
    "a token changed": (flip_bit_of_token(5), "index: the hash of block 5 does not follow from its parent's"),
    "a duplicate's token changed": (flip_bit_of_token(3), "I5: a lookup of block 3's tokens does not find block"),
    "a hash changed": (set_item("chain_hash", 5, 1), "I5: a lookup of block 5's tokens does not find block"),
    "a slot emptied": (empty_slot_of(5), "index: the blocks that the table, neighbours and rings lead to"),
    "a slot moved": (move_slot_of(4), "I5: a lookup of block 4's tokens does not find block"),
    "a slot for a block that is not cached": (set_item("identity", 2 * 5, 0), "index: 4 blocks have content"),
    "a count too high": (count_one_more("num_indexed"), "index: 5 blocks have content, but num_indexed is 6"),
    "a content without a slot": (set_item("identity", 2 * 9, 2), "index: 6 blocks have content, but num_indexed is 5"),
    "a content id from the future": (
        set_item("identity", 2 * 5, 99),
        "I5: block 5 has content 99, which must be above its parent 1 and",
    ),
    "a content before its parent": (
        set_item("identity", 2 * 4 + 1, 8),
        "I5: block 4 has content 3, which must be above its parent 8 and",
    ),
    "a duplicate with a content of its own": (
        set_item("identity", 2 * 2, 3),
        "I5: block 2 is in the ring of block 1, but has another",
    ),
    "a ring that skips one": (
        set_item("next_equal", 1, 3),
        "index: the blocks that the table, neighbours and rings lead to",
    ),
    "a ring that leads elsewhere": (
        set_item("next_equal", 3, 5),
        "index: the blocks that the table, neighbours and rings lead to",
    ),
    "an owner nobody counted": (set_item("owner", 5, 1), "I3: 1 blocks have an owner, but num_pending is 0"),
    "an owner too many counted": (count_one_more("num_pending"), "I3: 0 blocks have an owner, but num_pending is 1"),
    # None of these is seen by a walk along slots and next_equal alone, and each is a wrong answer later.
    "a root's hash that is not the chain's": (flip_lowest_bit("chain_hash", 5), "index: the hash of block 5 does not"),
    "a child's hash that is not the chain's": (flip_lowest_bit("chain_hash", 4), "index: the hash of block 4 does not"),
    "a ring with a wrong way back": (set_item("prev_equal", 3, 1), "index: block 3 points back to 1 in the ring"),
    "a duplicate under another parent": (
        set_item("identity", 2 * 3 + 1, 2),
        "I5: block 3 is in the ring of block 1, but has another",
    ),
    "a ring link at a block that is not cached": (set_item("prev_equal", 9, 5), "9"),
    "a slot beyond the pool": (set_item("_slots", 0, (1 << ID_BITS) + 1000), "index: the table leads to block 1000"),
    "a ring beyond the pool": (set_item("next_equal", 2, 1000), "index: a ring leads to block 1000"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_check_finds_a_broken_index(what: str) -> None:
    corrupt, message = CORRUPTIONS[what]
    draw, chains = random.Random(19), Chains(num_blocks=32)
    a, b, c = random_blocks(draw, 3)
    for prompt in ([a], [a], [a], [a, c], [b]):
        chains.add(prompt)
    assert [chains.index.identity[2 * block] for block in range(1, 6)] == [2, 2, 2, 3, 4]
    assert chains.slots()[0] == 0
    check_index(chains.index)
    corrupt(chains.index)
    with pytest.raises(InvariantError, match=message):
        check_index(chains.index)


# ---------------------------------------------------------------- a pool and a dict of prefixes


def test_random_pool_agrees_with_a_dict_of_prefixes() -> None:
    """Prompts over three tokens, blocks of two, twelve of them: everything is shared, revived and evicted all the time.

    The dict maps (keys, all tokens up to the end of a block) to the blocks that hold it, oldest first.
    """
    draw = random.Random(run_seed() + 2)
    pool, model = BlockPool(13, 2), PoolModel(13)
    leases: list[tuple[BlockLease, list[int]]] = []
    hits = evictions = 0
    for _ in range(1500):
        tokens = [draw.choice((1, 1, 2)) for _ in range(draw.randint(1, 10))]
        keys = draw.choice(((), (), (CacheSalt("s"),)))
        action = draw.randrange(5)
        if len(leases) > 3 or (action == 0 and leases):
            lease, blocks = leases.pop(draw.randrange(len(leases)))
            pool.free_blocks(lease)
            model.free(blocks)
        elif action == 1:
            lease = pool.get_cached_blocks(tokens, extra_keys=keys)
            assert list(lease) == model.hit(keys, tokens)
            hits += len(lease)
            leases.append((lease, list(lease)))
        elif action <= 3 and len(tokens) // 2 <= len(model.queue):
            count = len(tokens) // 2
            blocks = model.allocate(count)
            lease = pool.get_new_blocks(count)
            assert list(lease) == blocks
            pool.cache_full_blocks(lease, tokens, extra_keys=keys)
            model.publish(keys, tokens, blocks)
            leases.append((lease, blocks))
            evictions = pool.num_evicted_blocks
        elif leases:
            lease, blocks = draw.choice(leases)
            if draw.random() < 0.3:
                leases.append((pool.touch(lease), blocks))
                model.touch(blocks)
        pool.check()
        assert pool.free_block_ids().tolist() == model.queue
        assert pool.num_cached_blocks == len(model.prefix_of)
        assert pool.num_cached_tokens(tokens, extra_keys=keys) == 2 * len(model.find(keys, tokens))
    assert hits > 50
    assert evictions > 50


class PoolModel:
    """BlockPool as a list and two dicts."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(1, num_blocks))
        self.ref_cnt = [0] * num_blocks
        self.blocks_of: dict[tuple[object, tuple[int, ...]], list[int]] = {}
        self.prefix_of: dict[int, tuple[object, tuple[int, ...]]] = {}

    def find(self, keys: object, tokens: list[int]) -> list[int]:
        blocks = []
        for end in range(2, len(tokens) + 1, 2):
            if (keys, tuple(tokens[:end])) not in self.blocks_of:
                break
            blocks.append(self.blocks_of[keys, tuple(tokens[:end])][0])
        return blocks

    def hit(self, keys: object, tokens: list[int]) -> list[int]:
        blocks = self.find(keys, tokens)
        self.touch(blocks)
        return blocks

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.ref_cnt[block] == 0:
                self.queue.remove(block)
            self.ref_cnt[block] += 1

    def allocate(self, count: int) -> list[int]:
        blocks, self.queue = self.queue[:count], self.queue[count:]
        for block in blocks:
            self.ref_cnt[block] = 1
            if block in self.prefix_of:
                self.evict(block)
        return blocks

    def evict(self, block: int) -> None:
        prefix = self.prefix_of.pop(block)
        if block not in self.blocks_of.get(prefix, []):
            return
        self.blocks_of[prefix].remove(block)
        if not self.blocks_of[prefix]:
            for other in [key for key in self.blocks_of if key[0] == prefix[0]]:
                if other[1][: len(prefix[1])] == prefix[1]:
                    del self.blocks_of[other]

    def publish(self, keys: object, tokens: list[int], blocks: list[int]) -> None:
        for position, block in enumerate(blocks):
            prefix = (keys, tuple(tokens[: 2 * position + 2]))
            self.blocks_of.setdefault(prefix, []).append(block)
            self.prefix_of[block] = prefix

    def free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                self.queue.insert(len(self.queue) if block in self.prefix_of else 0, block)
