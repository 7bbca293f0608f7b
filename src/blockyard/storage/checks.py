"""Checks of arrays that callers hand to the data plane; each failure names the argument, its value and the limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgument

IntArray = NDArray[np.int64]


def int_array(name: str, values: object, num_dims: int) -> IntArray:
    """Return `values` (list, numpy array or torch tensor of integers) as an int64 array of `num_dims` dimensions."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.size == 0 and isinstance(values, (list, tuple)):
        array = array.astype(np.int64)  # an empty list has no integers to show its type by
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} has dtype {array.dtype}; it must hold integers")
    if array.ndim != num_dims:
        raise InvalidArgument(f"{name} has shape {array.shape}; it must have {num_dims} dimension(s)")
    return array.astype(np.int64, copy=False)


def require_range(name: str, array: IntArray, low: int, high: int) -> None:
    """Raise unless every entry of `array` is from `low` to `high`; names the first that is not."""
    if array.size == 0 or (low <= array.min() and array.max() <= high):
        return
    flat = array.reshape(-1)
    position = int(np.argmax((flat < low) | (flat > high)))
    raise InvalidArgument(f"{name} holds {int(flat[position])} at position {position}; it must be from {low} to {high}")
