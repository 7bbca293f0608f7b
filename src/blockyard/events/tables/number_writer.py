"""Writes lists of numbers in msgpack with numpy, without a Python object for each number."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...core.arrays import grown_i64, view_i64, zeros_i64

FEWEST_ITEMS: Final = 64
LAST_FIXARRAY: Final = 15
FIXARRAY: Final = 0x90
ARRAY_16: Final = b"\xdc"
ARRAY_32: Final = b"\xdd"
SPAN_16: Final[i64] = 2**16
SPAN_32: Final[i64] = 2**32


class WordList:
    """Words, one behind another, in memory that is used again after `clear`."""

    def __init__(self) -> None:
        self._items = zeros_i64(FEWEST_ITEMS)
        self.count: i64 = 0
        #: The bits that any of them has.
        self.bits: i64 = 0

    def add(self, word: i64) -> None:
        """O(1), amortized."""
        if self.count == i64(len(self._items)):
            self._items = grown_i64(self._items, 2 * len(self._items))
        self._items[self.count] = word
        self.bits |= word
        self.count += 1

    def add_run(self, words: vec[i64], start: i64, size: i64) -> None:
        """Adds `size` words from `start` on. O(size), amortized."""
        at = self.count
        if at + size > i64(len(self._items)):
            self._items = grown_i64(self._items, 2 * int(at + size))
        items, bits = self._items, self.bits
        for place in range(size):
            word = words[start + place]
            items[at + place] = word
            bits |= word
        self.bits = bits
        self.count = at + size

    def clear(self) -> None:
        """Begins anew."""
        self.count = self.bits = 0

    def view(self) -> npt.NDArray[np.int64]:
        """The words, until some are added. O(1)."""
        return view_i64(self._items)[: int(self.count)]


class _Rows:
    """Numbers of one width, each behind its tag. Their memory is used again for the next ones.

    A number is written as the signed one of the same bits, which is what remains of it in fewer bits.
    """

    def __init__(self, tag: int, width: str) -> None:
        self._tag = tag
        self._width = np.dtype(width)
        self._row = np.dtype([("tag", "u1"), ("number", ">" + width)])
        self.size = self._row.itemsize
        self._make(FEWEST_ITEMS)

    def _make(self, count: int) -> None:
        rows = np.empty(count, self._row)
        rows["tag"] = self._tag
        self._numbers = rows["number"]
        self.bytes = rows.view(np.uint8).data

    def write(self, numbers: npt.NDArray[Any]) -> None:
        """O(numbers)."""
        count = len(numbers)
        if count > len(self._numbers):
            self._make(2 * count)
        self._numbers[:count] = numbers.astype(self._width, copy=False)


class NumberWriter:
    """Writes numbers from 0 to 2**63 - 1, each as wide as the largest needs, so that any run of them can be a list.

    msgpack allows a number to be wider than it has to be, and numbers of one width are rows of an array.
    """

    def __init__(self) -> None:
        self._narrow, self._middle, self._wide = _Rows(0xCD, "i2"), _Rows(0xCE, "i4"), _Rows(0xCF, "i8")
        self._rows = self._narrow

    def write(self, numbers: npt.NDArray[Any], bits: i64) -> None:
        """Numbers in place of those before. bits: those that any of them has. O(numbers)."""
        self._rows = self._narrow if bits < SPAN_16 else self._middle if bits < SPAN_32 else self._wide
        self._rows.write(numbers)

    def part(self, first: int, last: int) -> bytes:
        """The list of the numbers from `first` up to `last`. O(bytes)."""
        size = self._rows.size
        return _head(last - first) + self._rows.bytes[first * size : last * size]


def _head(count: int) -> bytes:
    """How a list of so many items begins."""
    if count <= LAST_FIXARRAY:
        return bytes((FIXARRAY + count,))
    return ARRAY_16 + count.to_bytes(2, "big") if count < SPAN_16 else ARRAY_32 + count.to_bytes(4, "big")
