"""A prefix index with known keys, and tokens solved for so that their hashes collide.

Hashes are secret only as long as their seed is. Here the seed is known, which is the strongest attacker there is; and
one family of tokens (`twin_under_any_seed`) collides under every seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from librt.vecs import vec
from mypy_extensions import i32

from blockyard.core.hashing import HASH_MASK, hash_keys, root_hash
from blockyard.core.prefix_index import ID_BITS, ID_MASK, PrefixIndex
from blockyard.core.tokens import pack_tokens

Block = tuple[int, ...]
HASH_SPAN = HASH_MASK + 1


def words_of(tokens: Sequence[int]) -> list[int]:
    return list(pack_tokens(list(tokens), len(tokens)).words)


def tokens_of(words: Sequence[int]) -> Block | None:
    """The tokens packed in these words, or None where a half is no token."""
    tokens = tuple(half for word in words for half in (word % 2**32, word >> 32))
    return tokens if all(token < 2**31 for token in tokens) else None


def random_block(draw: random.Random, block_size: int = 4) -> Block:
    return tuple(draw.randrange(2**31) for _ in range(block_size))


def twin_of(block: Block, keys: Sequence[int], draw: random.Random) -> Block:
    """Another block of four tokens with the same sum of words times keys, so with the same hash after any chain."""
    total = sum(word * key for word, key in zip(words_of(block), keys, strict=True))
    while True:
        first = words_of(random_block(draw, 2))[0]
        second = (total - first * keys[0]) * pow(keys[1], -1, HASH_SPAN) % HASH_SPAN
        twin = tokens_of([first, second])
        if twin is not None and twin != block:
            return twin


def twin_under_any_seed(block: Block) -> Block:
    """2**30 more in an odd place is 2**62 more in its word, which no key can tell: all sums are modulo 2**62."""
    assert block[1] < 2**30
    return (block[0], block[1] + 2**30, *block[2:])


class Chains:
    """A PrefixIndex over four-token blocks with a dict beside it, and block ids given out in order."""

    def __init__(self, num_blocks: int = 64, seed: int = 11) -> None:
        self.index = PrefixIndex(num_blocks, 4, seed)
        self.keys = list(hash_keys(seed, 2))
        self.root = int(self.index.root(()))
        self.next_block = 1

    def hash_of(self, block: Block, chain: int | None = None) -> int:
        packed = pack_tokens(list(block), 4)
        self.index.hash_run(packed.words, 0, 1, root_hash(self.root))
        assert chain is None
        return int(self.index.hashes[0])

    def home_of(self, block: Block) -> int:
        """Where a first block's slot would be if nothing stood in its way."""
        return (self.hash_of(block) >> ID_BITS) >> self.index._home_shift

    def add(self, prompt: Sequence[Block]) -> int:
        """Index the last block of `prompt` after the others, which are there; returns its id."""
        block = self.next_block
        self.next_block += 1
        self.put(prompt, block)
        return block

    def put(self, prompt: Sequence[Block], block: int) -> None:
        index, before = self.index, len(prompt) - 1
        packed = pack_tokens([token for part in prompt for token in part], 4)
        assert index.find_prefix(packed.words, 0, before, self.root) == before
        parent = index.identity[2 * index.found[before - 1]] if before else self.root
        chain = index.chain_hash[index.found[before - 1]] if before else root_hash(self.root)
        index.hash_run(packed.words, before, before + 1, chain)
        index.insert_run(packed.words, before, before + 1, vec[i32]([0] * before + [block]), 0, parent, 0)

    def find(self, prompt: Sequence[Block]) -> list[int]:
        if not prompt:
            return []
        packed = pack_tokens([token for part in prompt for token in part], 4)
        found = self.index.find_prefix(packed.words, 0, len(prompt), self.root)
        return list(self.index.found)[:found]

    def slots(self) -> list[int]:
        """Which block stands in each slot, 0 for none."""
        return [slot & ID_MASK for slot in self.index._slots]


def random_blocks(draw: random.Random, count: int) -> list[Block]:
    return [random_block(draw) for _ in range(count)]


def blocks_at(chains: Chains, homes: dict[int, int], draw: random.Random) -> list[Block]:
    """So many random blocks with each of these home slots."""
    wanted, blocks = dict(homes), []
    while any(wanted.values()):
        block = random_block(draw)
        home = chains.home_of(block)
        if wanted.get(home, 0) > 0:
            wanted[home] -= 1
            blocks.append(block)
    return blocks
