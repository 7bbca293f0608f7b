"""The fast chained hash that finds candidate blocks. The index then verifies their tokens and identity.

A block's hash is a multilinear function with half the multiplications (Lemire and Kaser, "Strongly universal string
hashing is fast", 2014): a sum over words of (key + word) * (other key + second token) with secret keys, whose terms are
independent. The terms of two words differ by a constant and key * d2 + other key * (d1 + d2 * 2**32), where d1 and d2,
below 2**31, are the differences of their tokens. So for random keys, two different blocks have equal upper 31 bits with
a probability of about 2**-31, whatever their tokens are. A multiply and a fold chain the sum to the previous hash.

A sum of word * key would be two operations per word cheaper (2 ns per block of 16). But adding 2**30 to a second token
would not change it under any seed, and adding 2**17 not under one seed in 2**13, so a client could write any number of
prompts with one hash without knowing the seed.
"""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

#: Hashes have 62 bits. Sums and products are masked before any shift or comparison, so that 64-bit wrap-around
#: (compiled) and unbounded integers (interpreted) agree.
HASH_MASK: Final[i64] = 4611686018427387903
HASH_BITS: Final = 62
#: Packed words of a block of 16 tokens.
WORDS_OF_16_TOKENS: Final[i64] = 8
FOLD_MULTIPLIER: Final[i64] = 2971215073198273613


#: Position of the second token in a word.
TOKEN_SHIFT: Final = 32


def hash_keys(seed: int, num_words: int) -> vec[i64]:
    """Return two random keys of 62 bits for each word of a block, drawn from `seed`."""
    return vec[i64](np.random.default_rng(seed).integers(1, 2**HASH_BITS - 1, 2 * num_words, dtype=np.int64))


def root_hash(identity: i64) -> i64:
    """Return the initial hash of a root, spread over the table."""
    return fold(identity * 40503 & HASH_MASK)


def fold(value: i64) -> i64:
    """Mix 62 bits: high bits into the low ones, then all into the top."""
    return ((value ^ (value >> 32)) * FOLD_MULTIPLIER) & HASH_MASK


def hash_rows(words: vec[i64], start: i64, keys: vec[i64], chain: i64, out: vec[i64], first: i64, last: i64) -> i64:
    """Write the chained hashes of rows `first` to `last` of `words` (row 0 at `start`) to `out`; return the last.

    O(words).
    """
    num_words = i64(len(keys)) >> 1
    if num_words == WORDS_OF_16_TOKENS:
        return _hash_rows_of_16(words, start, keys, chain, out, first, last)
    position = start + first * num_words
    for row in range(first, last):
        total: i64 = 0
        for index in range(num_words):
            word = words[position + index]
            total += (keys[2 * index] + word) * (keys[2 * index + 1] + (word >> TOKEN_SHIFT))
        value = (chain + total) & HASH_MASK
        chain = ((value ^ (value >> 32)) * FOLD_MULTIPLIER) & HASH_MASK
        out[row] = chain
        position += num_words
    return chain


def _hash_rows_of_16(
    words: vec[i64], start: i64, keys: vec[i64], chain: i64, out: vec[i64], first: i64, last: i64
) -> i64:
    """Hash blocks of 16 tokens, the most common size, unrolled: a third faster."""
    a0, a1, a2, a3, a4, a5, a6, a7 = keys[0], keys[2], keys[4], keys[6], keys[8], keys[10], keys[12], keys[14]
    b0, b1, b2, b3, b4, b5, b6, b7 = keys[1], keys[3], keys[5], keys[7], keys[9], keys[11], keys[13], keys[15]
    at = start + first * WORDS_OF_16_TOKENS
    for row in range(first, last):
        w0, w1, w2, w3 = words[at], words[at + 1], words[at + 2], words[at + 3]
        w4, w5, w6, w7 = words[at + 4], words[at + 5], words[at + 6], words[at + 7]
        total = (a0 + w0) * (b0 + (w0 >> TOKEN_SHIFT))
        total += (a1 + w1) * (b1 + (w1 >> TOKEN_SHIFT))
        total += (a2 + w2) * (b2 + (w2 >> TOKEN_SHIFT))
        total += (a3 + w3) * (b3 + (w3 >> TOKEN_SHIFT))
        total += (a4 + w4) * (b4 + (w4 >> TOKEN_SHIFT))
        total += (a5 + w5) * (b5 + (w5 >> TOKEN_SHIFT))
        total += (a6 + w6) * (b6 + (w6 >> TOKEN_SHIFT))
        total += (a7 + w7) * (b7 + (w7 >> TOKEN_SHIFT))
        value = (chain + total) & HASH_MASK
        chain = ((value ^ (value >> 32)) * FOLD_MULTIPLIER) & HASH_MASK
        out[row] = chain
        at += WORDS_OF_16_TOKENS
    return chain
