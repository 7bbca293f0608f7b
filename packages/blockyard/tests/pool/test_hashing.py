"""The chained hash: compared with the same formula on Python's unbounded integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from librt.vecs import vec
from mypy_extensions import i64

from blockyard.core.index.hashing import FOLD_MULTIPLIER, HASH_BITS, HASH_MASK, fold, hash_keys, hash_rows, root_hash

WORDS = st.integers(0, 2**63 - 1)
HASHES = st.integers(0, HASH_MASK)


def slow_fold(value: int) -> int:
    return ((value ^ (value >> 32)) * FOLD_MULTIPLIER) % 2**62


def slow_hashes(words: list[int], keys: list[int], chain: int) -> list[int]:
    """hash_rows from the paper's formula: fold((chain + sum of (key + word) * (key + half)) mod 2**62), by blocks."""
    hashes, num_words = [], len(keys) // 2
    for start in range(0, len(words), num_words):
        terms = [term for word in words[start : start + num_words] for term in (word, word >> 32)]
        keyed = [key + term for key, term in zip(keys, terms, strict=True)]
        total = sum(first * second for first, second in zip(keyed[::2], keyed[1::2], strict=True))
        chain = slow_fold((chain + total) % 2**62)
        hashes.append(chain)
    return hashes


def hashes_of(words: list[int], keys: list[int], chain: int) -> list[int]:
    num_rows = 2 * len(words) // len(keys)
    out = vec[i64]([0] * num_rows)
    last = hash_rows(vec[i64](words), 0, vec[i64](keys), chain, out, 0, num_rows)
    assert last == (out[num_rows - 1] if num_rows else chain)
    return list(out)


def test_a_hash_has_62_bits() -> None:
    assert HASH_MASK == 2**HASH_BITS - 1 == 2**62 - 1
    assert FOLD_MULTIPLIER % 2 == 1, "an odd multiplier loses nothing"


@settings(max_examples=200, deadline=None)
@given(
    num_words=st.integers(1, 9),
    num_rows=st.integers(0, 5),
    seed=st.integers(0, 2**62 - 1),
    chain=HASHES,
    data=st.data(),
)
def test_wrap_around_and_unbounded_integers_agree(
    num_words: int, num_rows: int, seed: int, chain: int, data: st.DataObject
) -> None:
    """Words of 63 bits times keys of 62: the 64-bit sum overflows at every step, the low 62 bits must not mind."""
    keys = list(hash_keys(seed, num_words))
    words = data.draw(st.lists(WORDS, min_size=num_words * num_rows, max_size=num_words * num_rows))
    assert hashes_of(words, keys, chain) == slow_hashes(words, keys, chain)


def test_the_largest_words_and_keys() -> None:
    keys, words = [2**62 - 1] * 4096, [2**63 - 1] * 2048
    assert hashes_of(words, keys, HASH_MASK) == slow_hashes(words, keys, HASH_MASK)


def test_every_hash_fits_its_bits() -> None:
    keys = list(hash_keys(3, 2))
    for hashed in hashes_of(list(range(2**63 - 400, 2**63)), keys, 0):
        assert 0 <= hashed <= HASH_MASK


def test_a_chain_can_be_taken_up_anywhere() -> None:
    """Lookups hash tile by tile, and a grown sequence goes on from its last block: the hashes must be the same."""
    words, keys = list(range(1, 41)), hash_keys(7, 4)
    whole = hashes_of(words, list(keys), 99)
    for first in range(1, 10):
        out = vec[i64]([-1] * 10)
        last = hash_rows(vec[i64](words), 0, keys, whole[first - 1], out, first, 10)
        assert list(out) == [-1] * first + whole[first:]
        assert last == whole[-1]


def test_a_start_word_skips_what_lies_before() -> None:
    """A block's tokens are hashed where they are stored, in the middle of one large array."""
    words, keys = [5, 6, 7, 8, 9, 10], hash_keys(1, 2)
    out = vec[i64]([0])
    assert hash_rows(vec[i64](words), 2, keys, 3, out, 0, 1) == hashes_of([7, 8], list(keys), 3)[0]
    out = vec[i64]([0, 0])
    hash_rows(vec[i64](words), 2, keys, 3, out, 0, 2)
    assert list(out) == hashes_of(words[2:], list(keys), 3)


def test_the_order_of_words_and_of_blocks_counts() -> None:
    keys = list(hash_keys(0, 2))
    forms = ([1, 2, 3, 4], [2, 1, 3, 4], [3, 4, 1, 2], [1, 2, 4, 3], [1, 3, 2, 4])
    assert len({hashes_of(words, keys, 1)[-1] for words in forms}) == len(forms)


def test_the_same_block_after_another_chain_hashes_otherwise() -> None:
    keys = list(hash_keys(0, 2))
    assert len({hashes_of([1, 2], keys, root_hash(root))[0] for root in range(1, 1000)}) == 999


def test_zero_words_still_move_the_chain() -> None:
    """A run of blocks of token 0 must not stand still at one slot of the table."""
    keys = list(hash_keys(0, 8))
    assert len(set(hashes_of([0] * 800, keys, root_hash(1)))) == 100


@pytest.mark.parametrize("num_words", [1, 8, 2048])
def test_keys_are_secret_and_repeatable(num_words: int) -> None:
    keys = list(hash_keys(42, num_words))
    assert keys == list(hash_keys(42, num_words))
    assert len(keys) == 2 * num_words
    assert all(0 < key < 2**62 for key in keys)
    assert keys != list(hash_keys(43, num_words))
    assert len(set(keys)) == 2 * num_words


@given(values=st.lists(HASHES, unique=True, min_size=2))
def test_fold_keeps_different_values_different(values: list[int]) -> None:
    """Two contents collide only where their sums do: fold itself is a bijection."""
    folded = [fold(value) for value in values]
    assert folded == [slow_fold(value) for value in values]
    assert len(set(folded)) == len(values)


def test_one_prompt_under_many_roots_spreads_over_the_table() -> None:
    """Roots are small consecutive numbers; a thousand tenants with one prompt must not crowd into a few slots."""
    for seed in range(3):
        keys = list(hash_keys(seed, 8))
        homes = [hashes_of([5] * 8, keys, root_hash(root))[0] >> (HASH_BITS - 8) for root in range(1, 1025)]
        assert len(set(homes)) > 200
        assert max(homes.count(home) for home in set(homes)) < 20
