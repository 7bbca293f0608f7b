"""Lists of numbers written in msgpack from arrays, without a Python object or a branch for each number.

Names of a list are as wide as its largest one needs, five or nine bytes; tokens as wide as the largest of eight
neighbours needs, three or five. msgpack allows that, and eight numbers of one width are whole words, which a few shifts
make; a width for each number is four times as slow.
"""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from ...core.arrays import grown_i64, view_i64, zeros_i64
from ...core.tokens import pack_rows, unpack_tokens, words_per_block

UINT_16: Final[i64] = 0xCD
UINT_32: Final[i64] = 0xCE
UINT_64: Final = 0xCF
#: The same in the highest byte of a word, which is signed.
UINT_16_FIRST: Final[i64] = (0xCD - 256) * 2**56
UINT_32_FIRST: Final[i64] = (0xCE - 256) * 2**56
LAST_FIXARRAY: Final[i64] = 15
FIXARRAY: Final[i64] = 0x90
ARRAY_16: Final[i64] = 0xDC
ARRAY_32: Final[i64] = 0xDD
SPAN_16: Final[i64] = 2**16
SPAN_24: Final[i64] = 2**24
SPAN_32: Final[i64] = 2**32
SPAN_40: Final[i64] = 2**40
SPAN_48: Final[i64] = 2**48
SPAN_56: Final[i64] = 2**56
LOW_32: Final[i64] = 2**32 - 1
#: Bits above the low 16 of a token.
ABOVE_16: Final[i64] = 0x7FFF0000
#: Numbers that are written together.
EIGHT: Final[i64] = 8
#: Bytes of a word.
WORD: Final[i64] = 8
FEWEST_ITEMS: Final = 64


class NameWriter:
    """A msgpack array of numbers from 0 to 2**63 - 1, in the making. Its memory is used again for the next one."""

    def __init__(self) -> None:
        self._names = zeros_i64(FEWEST_ITEMS)
        self._out = zeros_i64(FEWEST_ITEMS)
        #: The bits that any of them has.
        self._seen: i64 = 0
        self.count: i64 = 0

    def add(self, name: i64) -> None:
        """One number. O(1), amortized."""
        if self.count == i64(len(self._names)):
            self._names = grown_i64(self._names, 2 * len(self._names))
        self._names[self.count] = name
        self._seen |= name
        self.count += 1

    def drop(self) -> None:
        """Begin anew."""
        self.count = 0
        self._seen = 0

    def take(self) -> memoryview:
        """The array, and begin anew. O(numbers)."""
        count, names = self.count, self._names
        is_wide = self._seen >= SPAN_32
        self.drop()
        if is_wide:
            return memoryview(_head(count) + _nine_bytes_each(names, count))
        _clear_eight(names, count)
        self._out = _with_room(self._out, count)
        at: i64 = 1
        for first in range(0, count, EIGHT):
            _put_32(
                self._out,
                at,
                names[first],
                names[first + 1],
                names[first + 2],
                names[first + 3],
                names[first + 4],
                names[first + 5],
                names[first + 6],
                names[first + 7],
            )
            at += 5
        return _finished(self._out, count, 5 * count)


class TokenWriter:
    """A msgpack array of the tokens of blocks, in the making, from packed words (`core.tokens`)."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._words_a_block: i64 = words_per_block(block_size)
        self._words = zeros_i64(FEWEST_ITEMS)
        self._out = zeros_i64(FEWEST_ITEMS)
        self._num_words: i64 = 0

    def add(self, words: vec[i64], start: i64) -> None:
        """A block's tokens, from word `start` on. O(tokens), amortized."""
        size, at = self._words_a_block, self._num_words
        if at + size + EIGHT > i64(len(self._words)):
            self._words = grown_i64(self._words, 2 * int(at + size + EIGHT))
        own = self._words
        for place in range(size):
            own[at + place] = words[start + place]
        self._num_words = at + size

    def drop(self) -> None:
        """Begin anew."""
        self._num_words = 0

    def take(self) -> memoryview:
        """The array, of one block or more, and begin anew. O(tokens)."""
        count = self._num_words // self._words_a_block * self._block_size
        words = self._words if self._block_size % 2 == 0 else self._without_gaps(int(count))
        _clear_eight(words, self._num_words)
        self.drop()
        self._out = _with_room(self._out, count)
        return _finished(self._out, count, _write_tokens(self._out, words, count))

    def _without_gaps(self, count: int) -> vec[i64]:
        """The words of tokens that stand one behind another, whatever the size of their blocks."""
        rows = view_i64(self._words)[: int(self._num_words)].reshape(-1, int(self._words_a_block))
        eights = np.zeros((-(-count // WORD), WORD), dtype=np.int32)
        eights.reshape(-1)[:count] = unpack_tokens(rows, self._block_size, count)
        return pack_rows(eights)


def _write_tokens(out: vec[i64], words: vec[i64], count: i64) -> i64:
    """Tokens from packed words, eight in a width; returns the bytes that they take."""
    at: i64 = 1
    place: i64 = 0
    missing: i64 = 0
    while 2 * place < count:
        a, b, c, d = words[place], words[place + 1], words[place + 2], words[place + 3]
        place += 4
        missing = 2 * place - count
        either = a | b | c | d
        if (either | (either >> 32)) & ABOVE_16 == 0:
            _put_16(out, at, a & LOW_32, a >> 32, b & LOW_32, b >> 32, c & LOW_32, c >> 32, d & LOW_32, d >> 32)
            at += 3
            missing *= 3
        else:
            _put_32(out, at, a & LOW_32, a >> 32, b & LOW_32, b >> 32, c & LOW_32, c >> 32, d & LOW_32, d >> 32)
            at += 5
            missing *= 5
    return WORD * (at - 1) - (missing if missing > 0 else 0)


def _put_16(out: vec[i64], at: i64, a: i64, b: i64, c: i64, d: i64, e: i64, f: i64, g: i64, h: i64) -> None:
    """Eight numbers below 2**16 as three words, highest byte first."""
    out[at] = UINT_16_FIRST + a * SPAN_40 + UINT_16 * SPAN_32 + b * SPAN_16 + UINT_16 * 256 + (c >> 8)
    out[at + 1] = (
        _signed(c & 255, 128) * SPAN_56 + UINT_16 * SPAN_48 + d * SPAN_32 + UINT_16 * SPAN_24 + e * 256 + UINT_16
    )
    out[at + 2] = _signed(f, 2**15) * SPAN_48 + UINT_16 * SPAN_40 + g * SPAN_24 + UINT_16 * SPAN_16 + h


def _put_32(out: vec[i64], at: i64, a: i64, b: i64, c: i64, d: i64, e: i64, f: i64, g: i64, h: i64) -> None:
    """Eight numbers below 2**32 as five words, highest byte first."""
    out[at] = UINT_32_FIRST + a * SPAN_24 + UINT_32 * SPAN_16 + (b >> 16)
    out[at + 1] = _signed(b & (SPAN_16 - 1), 2**15) * SPAN_48 + UINT_32 * SPAN_40 + c * 256 + UINT_32
    out[at + 2] = _signed(d, 2**31) * SPAN_32 + UINT_32 * SPAN_24 + (e >> 8)
    out[at + 3] = _signed(e & 255, 128) * SPAN_56 + UINT_32 * SPAN_48 + f * SPAN_16 + UINT_32 * 256 + (g >> 24)
    out[at + 4] = _signed(g & (SPAN_24 - 1), 2**23) * SPAN_40 + UINT_32 * SPAN_32 + h


def _clear_eight(items: vec[i64], first: i64) -> None:
    """What is written with the last items, as far as there is any, is zero."""
    for place in range(first, min(first + EIGHT, i64(len(items)))):
        items[place] = 0


def _signed(number: i64, half: i64) -> i64:
    """A number below 2 * half as the signed one of the same bits: the top of a word is signed."""
    return number - 2 * (number & half)


def _nine_bytes_each(names: vec[i64], count: i64) -> bytes:
    rows = np.empty(int(count), dtype=[("tag", "u1"), ("number", ">i8")])
    rows["tag"] = UINT_64
    rows["number"] = view_i64(names)[: int(count)]
    return rows.tobytes()


def _with_room(out: vec[i64], count: i64) -> vec[i64]:
    """At least the words of `count` numbers below 2**32, and one before them for the head."""
    size = 1 + 5 * ((count + EIGHT - 1) // EIGHT)
    return out if size <= i64(len(out)) else zeros_i64(int(2 * size))


def _head_size(count: i64) -> i64:
    return 1 if count <= LAST_FIXARRAY else 3 if count < SPAN_16 else 5


def _head_word(count: i64) -> i64:
    """How an array begins, at the end of a word."""
    if count <= LAST_FIXARRAY:
        return FIXARRAY + count
    return ARRAY_16 * SPAN_16 + count if count < SPAN_16 else ARRAY_32 * SPAN_32 + count


def _head(count: i64) -> bytes:
    return int(_head_word(count)).to_bytes(int(_head_size(count)), "big")


def _finished(out: vec[i64], count: i64, num_bytes: i64) -> memoryview:
    """The bytes of an array of which all but the head is written, from word 1 on. They are copied once, here."""
    out[0] = _head_word(count)
    swapped = view_i64(out)[: int(1 + (num_bytes + WORD - 1) // WORD)].astype(">i8")
    return swapped.view(np.uint8)[int(WORD - _head_size(count)) : int(WORD + num_bytes)].data
