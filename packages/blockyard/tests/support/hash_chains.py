"""A prefix index with known keys, and tokens solved for so that their hashes collide.

Hashes are secret only as long as their seed is. Here the seed is known, which is the strongest attacker there is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from librt.vecs import vec
from mypy_extensions import i32

from blockyard.core.index.hashing import HASH_MASK, hash_keys, root_hash
from blockyard.core.index.prefix_index import PrefixIndex
from blockyard.core.index.prompt import Prompt
from blockyard.core.index.room import ID_BITS, ID_MASK
from blockyard.core.tokens import pack_tokens

Block = tuple[int, ...]
HASH_SPAN = HASH_MASK + 1


def random_block(draw: random.Random, block_size: int = 4) -> Block:
    return tuple(draw.randrange(2**31) for _ in range(block_size))


def sum_of(block: Block, keys: Sequence[int]) -> int:
    """The sum over words that the hash of a block of four tokens is made of."""
    first, second = block[0] + (block[1] << 32), block[2] + (block[3] << 32)
    return ((keys[0] + first) * (keys[1] + block[1]) + (keys[2] + second) * (keys[3] + block[3])) % HASH_SPAN


def block_of_sum(total: int, keys: Sequence[int], draw: random.Random) -> Block:
    """A block of four tokens with this sum: the second token of each pair is drawn, the first ones are solved for.

    For given second tokens the sum is linear in the first ones. All pairs of first tokens with one sum form a lattice;
    the point nearest to the middle of what tokens may be is a pair of tokens in every other case or so.
    """
    while True:
        second, fourth = draw.randrange(2**31), draw.randrange(2**31)
        left, right = keys[1] + second, keys[3] + fourth
        if right % 2 == 0:
            continue
        inverse = pow(right, -1, HASH_SPAN)
        constant = (keys[0] + (second << 32)) * left + (keys[2] + (fourth << 32)) * right
        rest = (total - constant) * inverse % HASH_SPAN
        u, v = shortest_basis((1, -left * inverse % HASH_SPAN), (0, HASH_SPAN))
        determinant = u[0] * v[1] - u[1] * v[0]
        x, y = 2**30, 2**30 - rest
        i = round_ratio(x * v[1] - y * v[0], determinant)
        j = round_ratio(u[0] * y - u[1] * x, determinant)
        for di, dj in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            first = (i + di) * u[0] + (j + dj) * v[0]
            third = (i + di) * u[1] + (j + dj) * v[1] + rest
            if 0 <= first < 2**31 and 0 <= third < 2**31:
                return (first, second, third, fourth)


def shortest_basis(u: tuple[int, int], v: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Gauss' reduction of a lattice in the plane."""
    while True:
        if u[0] ** 2 + u[1] ** 2 > v[0] ** 2 + v[1] ** 2:
            u, v = v, u
        times = round_ratio(u[0] * v[0] + u[1] * v[1], u[0] ** 2 + u[1] ** 2)
        if times == 0:
            return u, v
        v = (v[0] - times * u[0], v[1] - times * u[1])


def round_ratio(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def twin_of(block: Block, keys: Sequence[int], draw: random.Random) -> Block:
    """Another block of four tokens with the same sum, so with the same hash after any chain."""
    twin = block_of_sum(sum_of(block, keys), keys, draw)
    return twin if twin != block else twin_of(block, keys, draw)


def twin_of_plain_sums(block: Block) -> Block:
    """2**30 more in an odd place: 2**62 more in its word, which a sum of words times keys could not distinguish."""
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
        self.publish(prompt, [block])

    def publish(self, prompt: Sequence[Block], blocks: Sequence[int]) -> None:
        """Index the last blocks of `prompt` in one go as `blocks`, after the others, which are there."""
        index, before = self.index, len(prompt) - len(blocks)
        packed = pack_tokens([token for part in prompt for token in part], 4)
        found = index.find_under(self.root, Prompt(packed.words, packed.num_tokens, (), {}), before)
        assert len(found) == before
        parent = index.identity[2 * found[before - 1]] if before else self.root
        chain = index.chain_hash[found[before - 1]] if before else root_hash(self.root)
        standing = found[before - 1] if before else 0
        index.hash_run(packed.words, before, len(prompt), chain)
        held = vec[i32]([0] * before + list(blocks))
        index.insert_run(packed.words, before, len(prompt), held, 0, parent, standing, 0)

    def find(self, prompt: Sequence[Block]) -> list[int]:
        if not prompt:
            return []
        packed = pack_tokens([token for part in prompt for token in part], 4)
        return list(self.index.find_under(self.root, Prompt(packed.words, packed.num_tokens, (), {}), len(prompt)))

    def slots(self) -> list[int]:
        """Which block stands in each slot, 0 for none."""
        return [slot & ID_MASK for slot in self.index._slots]


def random_blocks(draw: random.Random, count: int) -> list[Block]:
    return [random_block(draw) for _ in range(count)]


def blocks_at(chains: Chains, homes: dict[int, int], draw: random.Random) -> list[Block]:
    """Random blocks: for each home slot, as many as `homes` asks."""
    wanted, blocks = dict(homes), []
    while any(wanted.values()):
        block = random_block(draw)
        home = chains.home_of(block)
        if wanted.get(home, 0) > 0:
            wanted[home] -= 1
            blocks.append(block)
    return blocks
