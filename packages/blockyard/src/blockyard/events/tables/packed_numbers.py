"""Reads msgpack lists of numbers into arrays, without a Python object per number."""

from typing import Any, Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from ...core.arrays import zeros_i64
from ...core.tokens import PackedTokens, are_tokens, pack_items, pack_tokens
from ...errors import InvalidArgument

LAST_FIXINT: Final[i64] = 127
FIXARRAY: Final[i64] = 0x90
ARRAY_16: Final[i64] = 0xDC
ARRAY_32: Final[i64] = 0xDD
BIN_8: Final[i64] = 0xC4
BIN_32: Final[i64] = 0xC6
UINT_8: Final[i64] = 0xCC
UINT_16: Final[i64] = 0xCD
UINT_32: Final[i64] = 0xCE
UINT_64: Final[i64] = 0xCF
INT_8: Final[i64] = 0xD0
INT_64: Final[i64] = 0xD3
FIRST_NEGATIVE_FIXINT: Final[i64] = 0xE0
BYTE: Final[i64] = 256
SPAN_32: Final[i64] = 4294967296
HALF_32: Final[i64] = 2147483648
LOW_32: Final[i64] = 4294967295
LOW_40: Final[i64] = 1099511627775
#: Bytes of a word.
WORD: Final = 8
LAST_TOKEN: Final = 2**31 - 1
NO_TOKEN: Final = "token_ids holds an invalid token; tokens are integers from 0 to 2**31 - 1"
#: Fewest numbers for which numpy is faster.
MANY: Final[i64] = 64
#: Dtypes of rows of unsigned integers of one width, by tag, as `NumberWriter` writes them.
_FORMS: Final = {
    tag: np.dtype([("tag", "u1"), ("number", number)]) for tag, number in ((0xCD, ">u2"), (0xCE, ">u4"), (0xCF, ">u8"))
}


def num_items(packed: bytes) -> int:
    """Return the length of a msgpack array. O(1). Raises `InvalidArgument` for anything else."""
    tag = packed[0] if packed else 0
    if tag & 0xF0 == FIXARRAY:
        return tag & 15
    if tag not in (ARRAY_16, ARRAY_32):
        raise InvalidArgument("block_hashes or token_ids is not a list")
    return int.from_bytes(packed[1 : 3 if tag == ARRAY_16 else 5], "big")


def _words_of(packed: bytes) -> vec[i64]:
    """Return the bytes as big-endian 64-bit words, followed by a word of zeros."""
    padded = packed + bytes(2 * WORD - len(packed) % WORD)
    return vec[i64](np.frombuffer(padded, dtype=">i8").astype(np.int64))


def _first_item(packed: bytes) -> i64:
    tag: i64 = packed[0]
    return 3 if tag == ARRAY_16 else 5 if tag == ARRAY_32 else 1


def read_tokens(packed: bytes, block_size: int) -> PackedTokens:
    """Return the tokens of a well-formed msgpack array in packed form. O(tokens).

    Raises `InvalidArgument` if it is empty or has anything but integers from 0 to 2**31 - 1.
    """
    count: i64 = num_items(packed)
    if count == 0:
        raise InvalidArgument("token_ids is empty; it must have at least 1 token")
    numbers = _of_one_width(packed, count)
    if numbers is not None:
        if numbers.itemsize == WORD and int(numbers.max()) > LAST_TOKEN:
            raise InvalidArgument(NO_TOKEN)
        given = numbers.astype(np.int32)
        if np.minimum.reduce(given) < 0:  # from 2**31 on
            raise InvalidArgument(NO_TOKEN)
        return pack_tokens(given, block_size, False, True)
    tokens = _integers(packed, count)
    if not are_tokens(tokens):
        raise InvalidArgument(NO_TOKEN)
    return PackedTokens(pack_items(tokens, block_size), count)


def _of_one_width(packed: bytes, count: i64) -> "np.typing.NDArray[Any] | None":
    """Return the array if it has many unsigned integers of the same width, else None. O(1) for most others."""
    first = _first_item(packed)
    form = _FORMS.get(packed[first]) if count >= MANY else None
    if form is None or len(packed) != first + count * form.itemsize:
        return None
    rows = np.frombuffer(packed, form, offset=int(first))
    return rows["number"] if (rows["tag"] == packed[first]).all() else None


def _integers(packed: bytes, count: i64) -> vec[i64]:
    """Return integers of any width as signed 64-bit numbers: 2**63 and more become negative."""
    words = _words_of(packed)
    numbers = zeros_i64(int(count))
    at = _first_item(packed)
    for place in range(count):
        # The five bytes from `at` on, from its word and the next one.
        bits = 8 * (at & 7)
        five = ((words[at >> 3] << bits) >> 24) & LOW_40
        five |= ((words[(at >> 3) + 1] >> 32) & LOW_32) >> (56 - bits)
        tag = five >> 32
        if tag in (UINT_16, UINT_32):
            wide = tag - UINT_16
            numbers[place] = (five & LOW_32) >> (16 - 16 * wide)
            at += 3 + 2 * wide
        else:
            numbers[place] = _integer(words, at)
            at += _size(tag)
    return numbers


def read_names(packed: bytes) -> vec[i64]:
    """Return 64 bits of each name in a well-formed msgpack array of integers or bytes; for bytes, the last eight.

    O(bytes). Raises `InvalidArgument` for anything else.
    """
    count: i64 = num_items(packed)
    numbers = _of_one_width(packed, count)
    if numbers is not None:
        return vec[i64](numbers.astype(np.int64))
    words = _words_of(packed)
    names = zeros_i64(int(count))
    at = _first_item(packed)
    for index in range(count):
        tag = _byte(words, at)
        if tag >= BIN_8 and tag <= BIN_32:
            width = _power_of_two(tag - BIN_8)
            length = _number(words, at + 1, width)
            used = min(length, WORD)
            at += 1 + width + length
            names[index] = _number(words, at - used, used)
        else:
            names[index] = _integer(words, at)
            at += _size(tag)
    return names


def _byte(words: vec[i64], at: i64) -> i64:
    return (words[at >> 3] >> (56 - 8 * (at & 7))) & 255


def _integer(words: vec[i64], at: i64) -> i64:
    """Return the integer at a position as a signed 64-bit number: 2**63 and more become negative."""
    tag = _byte(words, at)
    if tag <= LAST_FIXINT:
        return tag
    if tag >= FIRST_NEGATIVE_FIXINT:
        return tag - BYTE
    if tag >= UINT_8 and tag <= UINT_64:
        return _number(words, at + 1, _power_of_two(tag - UINT_8))
    if tag >= INT_8 and tag <= INT_64:
        size = _power_of_two(tag - INT_8)
        number = _number(words, at + 1, size)
        if size < WORD and _byte(words, at + 1) >= 128:
            number -= _power_of_two(8 * size)
        return number
    raise InvalidArgument("block_hashes or token_ids holds an item that is not a number")


def _size(tag: i64) -> i64:
    """Return the bytes of an integer with this tag."""
    if tag <= LAST_FIXINT or tag >= FIRST_NEGATIVE_FIXINT:
        return 1
    return 1 + _power_of_two(tag - UINT_8 if tag <= UINT_64 else tag - INT_8)


def _power_of_two(exponent: i64) -> i64:
    power: i64 = 1
    while exponent > 0:
        exponent -= 1
        power *= 2
    return power


def _number(words: vec[i64], at: i64, size: i64) -> i64:
    """Return the value of big-endian bytes; eight of them as a signed number."""
    number: i64 = 0
    for place in range(at, at + min(size, 4)):
        number = number * BYTE + _byte(words, place)
    if size <= 4:
        return number
    if size == WORD and number >= HALF_32:
        number -= SPAN_32
    for place in range(at + 4, at + size):
        number = number * BYTE + _byte(words, place)
    return number
