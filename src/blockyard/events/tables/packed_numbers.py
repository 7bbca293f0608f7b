"""Lists of numbers in msgpack: written from arrays and read into arrays, without a Python object for each number."""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64, u8

from ...core.arrays import zeros_i64
from ...core.tokens import PackedTokens, words_per_block
from ...errors import InvalidArgument

LAST_FIXINT: Final[i64] = 127
LAST_FIXARRAY: Final[i64] = 15
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
SPAN_16: Final[i64] = 65536
SPAN_32: Final[i64] = 4294967296
HALF_32: Final[i64] = 2147483648
LOW_32: Final[i64] = 4294967295
LOW_40: Final[i64] = 1099511627775
#: Bytes of a word.
WORD: Final = 8
TOKEN_BITS: Final = 31
LAST_TOKEN: Final[i64] = 2147483647
#: The longest head of an array, in bytes.
HEAD: Final[i64] = 5
#: The longest number, in bytes.
LONGEST: Final[i64] = 9
FEWEST_BYTES: Final = 256


class NumberWriter:
    """A msgpack array of numbers from 0 on, in the making. Its memory is used again for the next one."""

    def __init__(self) -> None:
        self._bytes = vec[u8](np.zeros(FEWEST_BYTES, dtype=np.uint8))
        self._at = HEAD
        self.count: i64 = 0

    def add(self, number: i64) -> None:
        """One number. O(1), amortized."""
        self._make_room(LONGEST)
        if number <= LAST_FIXINT:
            self._bytes[self._at] = u8(number & 255)
            self._at += 1
        elif number < SPAN_16:
            self._put(UINT_16, number, 2)
        elif number < SPAN_32:
            self._put(UINT_32, number, 4)
        else:
            self._put(UINT_64, number, 8)
        self.count += 1

    def _put(self, tag: i64, number: i64, size: i64) -> None:
        self._bytes[self._at] = u8(tag & 255)
        for place in range(size):
            self._bytes[self._at + size - place] = u8(number & 255)
            number >>= 8
        self._at += size + 1

    def add_tokens(self, tokens: vec[i32], start: i64, count: i64) -> None:
        """`count` tokens from `start`, in three or five bytes each. O(count).

        Without a branch on the number: half of them would be guessed wrong.
        """
        self._make_room(5 * count + 2)
        out = self._bytes
        at = self._at
        for index in range(start, start + count):
            token = i64(tokens[index])
            wide = ((SPAN_16 - 1 - token) >> 63) & 1
            shifted = token * (SPAN_16 - (SPAN_16 - 1) * wide)
            out[at] = u8((UINT_16 + wide) & 255)
            out[at + 1] = u8((shifted >> 24) & 255)
            out[at + 2] = u8((shifted >> 16) & 255)
            out[at + 3] = u8((shifted >> 8) & 255)
            out[at + 4] = u8(shifted & 255)
            at += 3 + 2 * wide
        self._at = at
        self.count += count

    def _make_room(self, size: i64) -> None:
        if self._at + size > i64(len(self._bytes)):
            wider = np.zeros(2 * int(self._at + size), dtype=np.uint8)
            wider[: len(self._bytes)] = np.frombuffer(memoryview(self._bytes), dtype=np.uint8)
            self._bytes = vec[u8](wider)

    def take(self) -> bytes:
        """The array, and begin anew. O(bytes)."""
        count, out = self.count, self._bytes
        if count <= LAST_FIXARRAY:
            start = HEAD - 1
            out[start] = u8((FIXARRAY | count) & 255)
        elif count < SPAN_16:
            start = HEAD - 3
            out[start] = u8(ARRAY_16)
        else:
            start = HEAD - 5
            out[start] = u8(ARRAY_32)
        for place in range(start + 1, HEAD):
            out[place] = u8((count >> (8 * (HEAD - 1 - place))) & 255)
        packed = bytes(memoryview(out)[int(start) : int(self._at)])
        self._at = HEAD
        self.count = 0
        return packed


def num_items(packed: bytes) -> int:
    """How many items a msgpack array has. Raises `InvalidArgument` for anything else. O(1)."""
    tag = packed[0] if packed else 0
    if tag & 0xF0 == FIXARRAY:
        return tag & 15
    if tag not in (ARRAY_16, ARRAY_32):
        raise InvalidArgument("block_hashes or token_ids is no list")
    return int.from_bytes(packed[1 : 3 if tag == ARRAY_16 else 5], "big")


def _words_of(packed: bytes) -> vec[i64]:
    """The bytes, eight in a word, the first one highest, and a word of zeros: a vec takes words without a loop."""
    padded = packed + bytes(2 * WORD - len(packed) % WORD)
    return vec[i64](np.frombuffer(padded, dtype=">i8").astype(np.int64))


def _first_item(packed: bytes) -> i64:
    tag: i64 = packed[0]
    return 3 if tag == ARRAY_16 else 5 if tag == ARRAY_32 else 1


def read_tokens(packed: bytes, block_size: int) -> PackedTokens:
    """Tokens as packed words, from one well-formed msgpack array. O(tokens).

    Raises `InvalidArgument` for anything but integers from 0 to 2**31 - 1, or none.
    """
    count: i64 = num_items(packed)
    if count == 0:
        raise InvalidArgument("token_ids is empty; at least 1 token is needed")
    words = _words_of(packed)
    tokens = zeros_i64(int(-(-count // i64(block_size))) * words_per_block(block_size))
    at = _first_item(packed)
    place: i64 = 0
    offset: i64 = 0
    wrong: i64 = 0
    left = count
    while left > 0:  # `for _ in range(count)` would make a Python object each time
        left -= 1
        # The five bytes from `at` on: those of its word, and as many of the next one as are missing.
        bits = 8 * (at & 7)
        five = ((words[at >> 3] << bits) >> 24) & LOW_40
        five |= ((words[(at >> 3) + 1] >> 32) & LOW_32) >> (56 - bits)
        tag = five >> 32
        if tag in (UINT_16, UINT_32):
            wide = tag - UINT_16
            token = (five & LOW_32) >> (16 - 16 * wide)
            at += 3 + 2 * wide
        else:
            token = _integer(words, at)
            at += _size(tag)
        wrong |= token >> TOKEN_BITS
        if offset & 1 == 0:
            tokens[place] = token
        else:
            tokens[place] = tokens[place] + (token & LAST_TOKEN) * SPAN_32
            place += 1
        offset += 1
        if offset == block_size:
            place += offset & 1
            offset = 0
    if wrong != 0:
        raise InvalidArgument("token_ids holds what is no token; a token is an integer from 0 to 2**31 - 1")
    return PackedTokens(tokens, count)


def read_names(packed: bytes) -> vec[i64]:
    """Any 64 bits of each name, from one well-formed msgpack array of integers or bytes, of which the last eight count.

    Raises `InvalidArgument` for anything else. O(bytes).
    """
    count: i64 = num_items(packed)
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
    """The integer that begins at a place; those from 2**63 on as the negative ones of the same bits."""
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
    raise InvalidArgument("block_hashes or token_ids holds what is no number")


def _size(tag: i64) -> i64:
    """Bytes of the integer that begins with this one."""
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
    """Big-endian bytes; eight of them as a signed number."""
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
