"""The caller's arrays that plans are written to."""

from typing import Any

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...arguments import shown
from ...errors import BlockyardError, InvalidArgument
from ..arrays import view_i64, zeros_i64
from ..sequences.block_table import BlockTable
from .batch import Batch


def writable_array(name: str, value: object, num_dimensions: int) -> npt.NDArray[Any]:
    """Return the memory of `value` as a numpy array, without copying.

    Raises `InvalidArgument` unless it is int32 or int64, contiguous, writable and has `num_dimensions` dimensions.
    """
    array = _shared_array(name, value)
    if array.dtype != np.int32 and array.dtype != np.int64:
        raise InvalidArgument(f"{name} has items of type {array.dtype}; int32 or int64 is needed")
    if array.ndim != num_dimensions:
        raise InvalidArgument(f"{name} has shape {array.shape}; {num_dimensions} dimensions are needed")
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"{name} has strides {array.strides}; it must be C-contiguous")
    if not array.flags.writeable:
        raise InvalidArgument(f"{name} is read-only; pass a writable array")
    return array


def _shared_array(name: str, value: object) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    try:
        if hasattr(value, "numpy"):
            return _of_tensor(name, value)
        return np.asarray(memoryview(value))  # type: ignore[arg-type]
    except (BlockyardError, MemoryError):
        raise
    except Exception as error:
        refusal = InvalidArgument(
            f"{name} is {shown(value)}, whose memory cannot be written here: {error}; give an array or a CPU tensor"
        )
        refusal.__cause__ = error
        raise refusal


def _of_tensor(name: str, tensor: Any) -> npt.NDArray[Any]:
    """Return a tensor's `numpy()`, if that shares the tensor's memory."""
    array = tensor.numpy()
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"{name} has a numpy() that returns {shown(array)}; it must return an array")
    if array.size > 0 and not np.shares_memory(array, tensor.numpy()):
        raise InvalidArgument(f"{name} has a numpy() that returns a copy; it must share the tensor's memory")
    return array


class FilledStep:
    """A step with its padded size.

    `slots` has the slots of all tokens; it is empty if they have to be computed.
    """

    def __init__(
        self,
        batch: Batch,
        table: BlockTable,
        slots: vec[i64],
        num_tokens: i64,
        padded_seqs: i64,
        padded_tokens: i64,
    ) -> None:
        self.batch = batch
        self.table = table
        self.slots = slots
        self.num_tokens = num_tokens
        self.padded_seqs = padded_seqs
        self.padded_tokens = padded_tokens


class Target:
    """An array of the caller that a step is written to. Only `write` changes the array."""

    def __init__(self, name: str, value: object, num_dimensions: int) -> None:
        self.name = name
        self.array = writable_array(name, value, num_dimensions)

    def require(self, step: FilledStep) -> None:
        """Raise `InvalidArgument` unless there is room for the padded step."""
        raise NotImplementedError("a Target must have require()")

    def lay_out(self, step: FilledStep) -> None:
        """Prepare the items that `write` copies."""

    def write(self, step: FilledStep) -> None:
        """Write the padded step into the array."""
        raise NotImplementedError("a Target must have write()")

    def forget(self) -> None:
        """Assume nothing about the contents that an earlier step wrote."""

    def is_of_group(self) -> bool:
        """Return whether the contents differ between layer groups."""
        return False


class Column(Target):
    """A one-dimensional array of the caller, and the items to copy into it."""

    def __init__(self, name: str, value: object) -> None:
        super().__init__(name, value, 1)
        self.length: i64 = len(self.array)
        self.is_narrow = self.array.dtype == np.int32
        self._items = zeros_i64(0)
        self._view = view_i64(self._items)
        #: Views of the array and of the buffer that the last step was copied between.
        self._target = self.array[:0]
        self._source = self._view[:0]

    def require(self, step: FilledStep) -> None:
        needed = self.num_needed(step)
        if self.length < needed:
            raise InvalidArgument(f"{self.name} has room for {self.length}; this step needs {needed}")

    def num_needed(self, step: FilledStep) -> i64:
        """Return the number of items of a padded step; one per token unless overridden."""
        return step.padded_tokens

    def room(self, length: i64) -> vec[i64]:
        """Return a buffer for at least `length` items."""
        if length > len(self._items):
            self._items = zeros_i64(int(max(length, 2 * i64(len(self._items)))))
            self._view = view_i64(self._items)
            self._source = self._view[:0]
        return self._items

    def require_narrow(self, length: i64) -> None:
        """Raise `InvalidArgument` if one of the first items does not fit 32 bits. None is negative."""
        items = self._items
        bits: i64 = 0
        for index in range(length):
            bits |= items[index]
        if bits >> 31 != 0:
            raise InvalidArgument(f"{self.name} is int32; a slot of this step is 2**31 or more, int64 is needed")

    def copy(self, length: i64, padded: i64, padding: i64) -> None:
        """Copy the first items to the caller's array, and `padding` after them."""
        items = self._items
        for index in range(length, padded):
            items[index] = padding
        if padded != i64(len(self._source)):
            self._target = self.array[: int(padded)]
            self._source = self._view[: int(padded)]
        self._target[...] = self._source
