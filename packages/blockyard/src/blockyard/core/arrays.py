"""Integer arrays of fixed length, and read-only numpy views of them."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

CACHE_LINE_BYTES: Final = 64


#: Zeros are copied from pages that the operating system maps but never fills. The C library maps each request of this
#: size separately, so that making a large array leaves no hole of its size in the heap.
MAPPED_ITEMS: Final = 2**23
SMALL_ITEMS: Final = 2**16

#: A slice of a vec is a copy, and costs a tenth of a numpy array for a few items.
FEW_ITEMS: Final = 1024
_FEW_ZEROS_I64: Final = vec[i64]([0] * FEW_ITEMS)
_FEW_ZEROS_I32: Final = vec[i32]([i32(0)] * FEW_ITEMS)


def zeros_i64(length: int) -> vec[i64]:
    """Return a vec of `length` zeros. Copying it from a numpy buffer is 20 times faster than from a list."""
    if length <= FEW_ITEMS:
        return _FEW_ZEROS_I64[:length]
    return vec[i64](np.zeros(_source_items(length), dtype=np.int64)[:length])


def zeros_i32(length: int) -> vec[i32]:
    """Return a vec of `length` zeros."""
    if length <= FEW_ITEMS:
        return _FEW_ZEROS_I32[:length]
    return vec[i32](np.zeros(2 * _source_items(length), dtype=np.int32)[:length])


def _source_items(length: int) -> int:
    return length if length <= SMALL_ITEMS else max(length, MAPPED_ITEMS)


def filled_i64(value: i64, length: i64) -> vec[i64]:
    """Return a vec with `length` items of `value`."""
    items = zeros_i64(int(length))
    if value != 0:
        for index in range(length):
            items[index] = value
    return items


def zeros_float(length: int) -> vec[float]:
    """Return a vec of `length` zeros."""
    return vec[float](np.zeros(length))


def grown_float(items: vec[float], length: int) -> vec[float]:
    """Return a new vec with `items`, padded with zeros to `length`; never shorter than `items`."""
    grown = zeros_float(max(length, len(items)))
    for index in range(i64(len(items))):
        grown[index] = items[index]
    return grown


def view_i64(items: vec[i64]) -> npt.NDArray[np.int64]:
    """Return a read-only numpy view, int64 (len,), without a copy. It shows later changes."""
    return np.frombuffer(memoryview(items), dtype=np.int64)


def view_i32(items: vec[i32]) -> npt.NDArray[np.int32]:
    """Return a read-only numpy view, int32 (len,), without a copy. It shows later changes."""
    return np.frombuffer(memoryview(items), dtype=np.int32)


def grown_i64(items: vec[i64], length: int) -> vec[i64]:
    """Return a new vec with `items`, padded with zeros to `length`; never shorter than `items`."""
    grown = zeros_i64(max(length, len(items)))
    for index in range(i64(len(items))):
        grown[index] = items[index]
    return grown


def grown_i32(items: vec[i32], length: int) -> vec[i32]:
    """Return a new vec with `items`, padded with zeros to `length`; never shorter than `items`."""
    grown = zeros_i32(max(length, len(items)))
    for index in range(i64(len(items))):
        grown[index] = items[index]
    return grown


def clear_i64(items: vec[i64]) -> None:
    """Set all items to 0, in place."""
    for index in range(i64(len(items))):
        items[index] = 0


def clear_i32(items: vec[i32]) -> None:
    """Set all items to 0, in place."""
    for index in range(i64(len(items))):
        items[index] = 0


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    size = 1
    while size < least:
        size *= 2
    return size


def words_to_cache_line(items: vec[i64]) -> int:
    """Return how many leading words to skip so that the next word starts a cache line.

    A vec's items begin 40 bytes into a cache line. Rows of 64 bytes that start there would each straddle two lines, and
    a lookup in a large pool would wait for both.
    """
    address = int(view_i64(items).__array_interface__["data"][0])
    return (-address % CACHE_LINE_BYTES) // 8
