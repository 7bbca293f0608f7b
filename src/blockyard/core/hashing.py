"""The fast chained hash that finds a candidate block. It proves nothing: the index compares tokens and identity.

The words of a block are hashed by a multilinear function (Lemire and Kaser, "Strongly universal string hashing is
fast", 2014): a sum of products with secret odd keys, whose steps do not wait for one another. A multiply and a
fold then chain the sum to the hash of the block before.

Sums are cut to 62 bits, so of the second token of a word the bits from 2**30 on do not count (and 2**29 counts little).
No vocabulary comes near; token ids of that size that nobody checks cost speed, never a wrong hit.
"""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

#: Hashes have 62 bits. Sums and products are cut to them before any shift or compare, so that 64-bit wrap-around
#: (compiled) and unbounded integers (interpreted) agree.
HASH_MASK: Final[i64] = 4611686018427387903
HASH_BITS: Final = 62
#: Packed words of a block of 16 tokens.
WORDS_OF_16_TOKENS: Final[i64] = 8
FOLD_MULTIPLIER: Final[i64] = 2971215073198273613


def hash_keys(seed: int, num_words: int) -> vec[i64]:
    """One odd key for each word of a block, drawn from `seed`."""
    keys = np.random.default_rng(seed).integers(1, 2**HASH_BITS - 1, num_words, dtype=np.int64)
    return vec[i64](keys | 1)


def root_hash(identity: i64) -> i64:
    """Where the chain of a root starts, so that roots spread over the table."""
    return fold(identity * 40503 & HASH_MASK)


def fold(value: i64) -> i64:
    """Spread 62 bits over 62 bits; high bits reach the low ones first, then all reach the top."""
    return ((value ^ (value >> 32)) * FOLD_MULTIPLIER) & HASH_MASK


def hash_rows(words: vec[i64], start: i64, keys: vec[i64], chain: i64, out: vec[i64], first: i64, last: i64) -> i64:
    """Chain-hash rows `first` to `last` of `words` (row 0 at `start`) into `out`; returns the last hash. O(words)."""
    num_words = i64(len(keys))
    if num_words == WORDS_OF_16_TOKENS:
        return _hash_rows_of_16(words, start, keys, chain, out, first, last)
    position = start + first * num_words
    for row in range(first, last):
        total: i64 = 0
        for word in range(num_words):
            total += words[position + word] * keys[word]
        value = (chain + total) & HASH_MASK
        chain = ((value ^ (value >> 32)) * FOLD_MULTIPLIER) & HASH_MASK
        out[row] = chain
        position += num_words
    return chain


def _hash_rows_of_16(
    words: vec[i64], start: i64, keys: vec[i64], chain: i64, out: vec[i64], first: i64, last: i64
) -> i64:
    """The same for blocks of 16 tokens, the most common ones, written out: a third faster."""
    key0, key1, key2, key3 = keys[0], keys[1], keys[2], keys[3]
    key4, key5, key6, key7 = keys[4], keys[5], keys[6], keys[7]
    position = start + first * WORDS_OF_16_TOKENS
    for row in range(first, last):
        total = words[position] * key0 + words[position + 1] * key1
        total += words[position + 2] * key2 + words[position + 3] * key3
        total += words[position + 4] * key4 + words[position + 5] * key5
        total += words[position + 6] * key6 + words[position + 7] * key7
        value = (chain + total) & HASH_MASK
        chain = ((value ^ (value >> 32)) * FOLD_MULTIPLIER) & HASH_MASK
        out[row] = chain
        position += WORDS_OF_16_TOKENS
    return chain
