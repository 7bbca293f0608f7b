"""Packed tokens: their layout word by word, and the way back. Whatever is refused stands in test_bad_input."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from librt.vecs import vec
from mypy_extensions import i64

from blockyard import InvalidArgument
from blockyard.core.tokens import (
    MAX_TOKEN,
    int64_items,
    int64_vector,
    integer_array,
    pack_tokens,
    store_token,
    token_table,
    unpack_tokens,
    words_per_block,
)

TOKENS = st.lists(st.one_of(st.integers(0, MAX_TOKEN), st.sampled_from([0, 1, MAX_TOKEN])), min_size=1, max_size=40)


def token_array(tokens: Any) -> np.ndarray:
    """What is taken for tokens, by way of the packed words."""
    made = pack_tokens(tokens, 4)
    return unpack_tokens(np.array(list(made.words), dtype=np.int64).reshape(-1, 2), 4, int(made.num_tokens))


def pair(low: int, high: int) -> int:
    return low + (high << 32)


def packed(tokens: Any, block_size: int) -> list[int]:
    return list(pack_tokens(tokens, block_size).words)


# ---------------------------------------------------------------- layout


@pytest.mark.parametrize(("block_size", "words"), [(1, 1), (2, 1), (3, 2), (4, 2), (16, 8), (17, 9), (4096, 2048)])
def test_two_tokens_share_a_word(block_size: int, words: int) -> None:
    assert words_per_block(block_size) == words


def test_the_first_token_is_the_low_half() -> None:
    assert packed([1, 2, 3, 4], 4) == [pair(1, 2), pair(3, 4)]


def test_the_last_block_is_padded_with_zeros() -> None:
    assert packed([1, 2, 3, 4, 5], 4) == [pair(1, 2), pair(3, 4), pair(5, 0), 0]
    assert packed([9], 16) == [9] + [0] * 7


def test_an_odd_block_ends_in_half_a_word() -> None:
    """Each block begins at a word of its own, so that it can be stored, hashed and compared alone."""
    assert packed([1, 2, 3, 4, 5, 6], 3) == [pair(1, 2), 3, pair(4, 5), 6]
    assert packed([1, 2, 3, 4], 3) == [pair(1, 2), 3, 4, 0]
    assert packed([1, 2, 3], 1) == [1, 2, 3]


def test_the_largest_token_in_both_halves() -> None:
    assert packed([MAX_TOKEN, MAX_TOKEN], 2) == [pair(2**31 - 1, 2**31 - 1)]
    assert packed([MAX_TOKEN, 0, 0, MAX_TOKEN], 4) == [2**31 - 1, pair(0, 2**31 - 1)]


def test_the_number_of_tokens_is_that_before_padding() -> None:
    for num_tokens in range(1, 12):
        assert pack_tokens([7] * num_tokens, 5).num_tokens == num_tokens
        assert len(pack_tokens([7] * num_tokens, 5).words) == -(-num_tokens // 5) * 3


@settings(max_examples=200, deadline=None)
@given(tokens=TOKENS, block_size=st.integers(1, 9))
def test_packing_is_exact(tokens: list[int], block_size: int) -> None:
    words = packed(tokens, block_size)
    rows = np.array(words, dtype=np.int64).reshape(-1, words_per_block(block_size))
    assert unpack_tokens(rows, block_size, len(tokens)).tolist() == tokens
    everything = unpack_tokens(rows, block_size, len(rows) * block_size).tolist()
    assert everything[len(tokens) :] == [0] * (len(everything) - len(tokens))
    shorter = unpack_tokens(rows, block_size, len(tokens) - 1)
    assert shorter.tolist() == tokens[:-1]
    assert shorter.dtype == np.int32


@settings(max_examples=100, deadline=None)
@given(tokens=TOKENS, other=TOKENS, block_size=st.integers(1, 9))
def test_different_blocks_have_different_words(tokens: list[int], other: list[int], block_size: int) -> None:
    """The index compares words and calls that comparing tokens; full blocks only, as zeros pad the last one."""
    size = words_per_block(block_size)
    same = tokens[:block_size] == other[:block_size]
    if len(tokens) >= block_size <= len(other):
        assert (packed(tokens, block_size)[:size] == packed(other, block_size)[:size]) == same


@settings(max_examples=200, deadline=None)
@given(tokens=TOKENS, block_size=st.integers(1, 9))
def test_lists_and_arrays_have_the_same_words(tokens: list[int], block_size: int) -> None:
    """Each form is packed by a loop of its own; a list with one of numpy's integers takes the slow one."""
    forms: list[Any] = [np.array(tokens, np.int32), np.array(tokens, np.int64), tuple(tokens), [*tokens]]
    forms[3][-1] = np.int64(tokens[-1])
    assert [packed(form, block_size) for form in forms] == [packed(tokens, block_size)] * 4


@pytest.mark.parametrize("place", range(5))
def test_a_token_below_0_is_seen_in_either_half(place: int) -> None:
    tokens = [5, 6, 7, 8, 9]
    tokens[place] = -3
    for form in (tokens, np.array(tokens, np.int32), np.array(tokens)):
        with pytest.raises(InvalidArgument, match=rf"^token_ids\[{place}\] is -3; a token is from 0"):
            pack_tokens(form, 4)
        made = pack_tokens(form, 4, with_placeholders=True)
        assert made.placeholders == {place: -3}


# ---------------------------------------------------------------- tokens stored one by one


@settings(max_examples=100, deadline=None)
@given(tokens=TOKENS, block_size=st.integers(1, 9), rubbish=st.integers(0, 2**63 - 1))
def test_tokens_stored_one_by_one_lie_as_packed_ones_do(tokens: list[int], block_size: int, rubbish: int) -> None:
    """A decoded block must hash and compare equal to the same block in a prompt, whatever its words held before."""
    size = words_per_block(block_size)
    words = vec[i64]([rubbish] * (len(packed(tokens, block_size)) + 2))
    for position, token in enumerate(tokens):
        store_token(words, 1 + position // block_size * size, position % block_size, token)
    used = (len(tokens) - 1) // block_size * size + ((len(tokens) - 1) % block_size) // 2 + 1
    assert list(words)[1 : used + 1] == packed(tokens, block_size)[:used]
    assert set(list(words)[used + 1 :]) | {words[0]} == {rubbish}


def test_an_even_offset_clears_the_odd_one_behind() -> None:
    words = vec[i64]([pair(5, 6)])
    store_token(words, 0, 0, 7)
    assert list(words) == [7]


def test_an_odd_offset_keeps_the_even_one_before() -> None:
    words = vec[i64]([pair(5, 6)])
    store_token(words, 0, 1, MAX_TOKEN)
    assert list(words) == [pair(5, MAX_TOKEN)]


# ---------------------------------------------------------------- what is taken for tokens


@pytest.mark.parametrize(
    "form",
    [
        [3, 0, MAX_TOKEN],
        (3, 0, MAX_TOKEN),
        [np.int64(3), np.int32(0), np.uint32(MAX_TOKEN)],
        np.array([3, 0, MAX_TOKEN], dtype=np.int32),
        np.array([3, 0, MAX_TOKEN], dtype=np.uint64),
        np.array([MAX_TOKEN, 0, 3])[::-1],
        array.array("i", [3, 0, MAX_TOKEN]),
        memoryview(array.array("q", [3, 0, MAX_TOKEN])),
    ],
    ids=lambda form: type(form).__name__,
)
def test_every_form_becomes_the_same_tokens(form: Any) -> None:
    tokens = token_array(form)
    assert tokens.tolist() == [3, 0, MAX_TOKEN]


@pytest.mark.parametrize("tokens", [[True], [1, False], [True, 2**31], (True, False), [np.True_]])
def test_bools_are_no_tokens(tokens: Any) -> None:
    """A list of bools is a mask that went astray; it is refused as an array of bools is."""
    with pytest.raises(InvalidArgument, match="token_ids"):
        token_array(tokens)


def test_an_error_names_the_first_bad_token() -> None:
    for bad in ([5, -1, -2], np.array([5, -1, -2]), np.array([5, -1, -2], dtype=np.int32)):
        with pytest.raises(InvalidArgument, match=rf"^token_ids\[1\] is -1; a token is from 0 to {MAX_TOKEN}$"):
            token_array(bad)
    with pytest.raises(InvalidArgument, match=rf"^token_ids\[2\] is {2**31}; a token is from 0 to {MAX_TOKEN}$"):
        token_array([1, 2, 2**31])
    with pytest.raises(InvalidArgument, match=r"^token_ids\[1\] is 'x'; a token is an integer"):
        token_array([1, "x"])
    with pytest.raises(InvalidArgument, match=r"^token_ids is empty; at least 1 token is needed$"):
        token_array([])


# ---------------------------------------------------------------- numbers for a batch


def test_one_number_stands_for_all() -> None:
    assert list(int64_vector("n", 7, 3)) == [7, 7, 7]
    assert list(int64_vector("n", 7, 0)) == []
    assert list(int64_vector("n", [1, 2, 3], 3)) == [1, 2, 3]
    assert list(int64_vector("n", np.array([1, 2], dtype=np.uint8), 2)) == [1, 2]


@pytest.mark.parametrize("number", [np.int64(7), np.int32(7), np.uint8(7)])
def test_one_number_of_numpy_stands_for_all(number: Any) -> None:
    """An item of an array is an integer everywhere else (`require_int`), so it is one here."""
    assert list(int64_vector("n", number, 3)) == [7, 7, 7]


def test_as_many_numbers_as_sequences() -> None:
    with pytest.raises(InvalidArgument, match=r"^n has 2 items; it must have one for each of the 3 sequences$"):
        int64_vector("n", [1, 2], 3)
    with pytest.raises(InvalidArgument, match=r"^n has shape \(1, 2\); one dimension is needed$"):
        int64_vector("n", [[1, 2]], 1)
    with pytest.raises(InvalidArgument, match=r"^n is True|^n has shape"):
        int64_vector("n", True, 1)


def test_int64_items_keep_their_values_at_both_ends() -> None:
    for items in (np.array([-(2**63), 2**63 - 1]), np.array([0, 2**63 - 1], dtype=np.uint64)):
        assert list(int64_items("n", items)) == items.tolist()
    with pytest.raises(InvalidArgument, match=rf"^n holds {2**63}; the limit is {2**63 - 1}$"):
        int64_items("n", np.array([2**63], dtype=np.uint64))


def test_big_endian_arrays_keep_their_values() -> None:
    assert integer_array("n", np.array([1, 2], dtype=">i8")).tolist() == [1, 2]
    assert list(int64_items("n", np.array([1, 2], dtype=">i4"))) == [1, 2]


def test_a_table_of_next_tokens() -> None:
    """None is a table without columns, a flat run has one, and rows stand one after another."""
    assert token_table("t", None, 3).columns == 0
    flat = token_table("t", [4, -1, 6], 3)
    assert (list(flat.items), flat.columns) == ([4, -1, 6], 1)
    table = token_table("t", np.array([[1, 2, 3], [4, 5, -1]], dtype=np.int32), 2)
    assert (list(table.items), table.columns) == ([1, 2, 3, 4, 5, -1], 3)
    turned = token_table("t", np.array([[1, 4], [2, 5], [3, -1]]).T, 2)
    assert list(turned.items) == [1, 2, 3, 4, 5, -1]
    assert token_table("t", np.zeros((2, 0), dtype=np.int64), 2).columns == 0


def test_a_table_needs_a_row_a_sequence() -> None:
    with pytest.raises(InvalidArgument, match=r"^t has shape \(2, 3\); it must have one row for each of the 3"):
        token_table("t", np.ones((2, 3), dtype=np.int64), 3)
    with pytest.raises(InvalidArgument, match=r"^t has 2 items; it must have one for each of the 3 sequences$"):
        token_table("t", [1, 2], 3)
