"""One-sided reads of another process's memory: the interface, and the byte ranges of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from blockyard.arguments import require_bool, require_int
from blockyard.errors import InvalidArgument
from blockyard.storage import KVCache
from blockyard.wire import pack, read

from .runs import TokenRuns, TransferPlan

_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """Layout of a rank's keys and values in memory: `KVCache.data` as bytes from `base`.

    Attributes:
        base: address of the first byte.
        num_places: layers in memory (layers of different groups share places).
        num_blocks: blocks of each place.
        block_size: tokens per block.
        num_kv_heads: heads on this rank.
        key_bytes: bytes of a key of one head.
        value_bytes: bytes of a value of one head.
        is_nhd: whether the layout is NHD, else HND.
    """

    base: int
    num_places: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    key_bytes: int
    value_bytes: int
    is_nhd: bool

    def __post_init__(self) -> None:
        for name in ("base", "num_places", "num_blocks", "block_size", "num_kv_heads", "key_bytes", "value_bytes"):
            require_int(name, getattr(self, name), 0 if name == "base" else 1, _LIMIT)
        require_bool("is_nhd", self.is_nhd)
        end = self.base + self.num_places * self.num_blocks * self.block_bytes
        if end > _LIMIT:
            raise InvalidArgument(f"the memory ends at address {end}; the limit is {_LIMIT}")

    @classmethod
    def of(cls, cache: KVCache) -> MemoryShape:
        """Return the layout of a rank's tensors."""
        size = cache.data.element_size()
        return cls(
            cache.data.data_ptr(),
            cache.places.num_places,
            cache.num_blocks,
            cache.block_size,
            cache.num_kv_heads,
            cache.head_size * size,
            cache.value_size * size,
            cache.layout.value == "NHD",
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one place."""
        return self.block_size * self.num_kv_heads * (self.key_bytes + self.value_bytes)

    def places(self, count: int) -> npt.NDArray[np.int64]:
        """Return the addresses of the first `count` places."""
        addresses: npt.NDArray[np.int64] = self.base + np.arange(count) * (self.num_blocks * self.block_bytes)
        return addresses

    def parts(self, slot: int, count: int) -> list[tuple[int, int]]:
        """Return (offset in its place, bytes) of `count` tokens from a slot on.

        Consecutive whole blocks are one part.
        """
        found = []
        size = self.block_size
        end = slot + count
        while slot < end:
            first = slot % size
            whole = (end - slot) // size if first == 0 else 0
            taken = whole * size or min(size - first, end - slot)
            start = slot // size * self.block_bytes
            if whole:
                found.append((start, whole * self.block_bytes))
            else:
                found += [(start + offset, length) for offset, length in self._parts_of_block(first, taken)]
            slot += taken
        return found

    def _parts_of_block(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the parts of some tokens of one block: one each for keys and values, or one for each head."""
        size, heads = self.block_size, self.num_kv_heads
        values = size * heads * self.key_bytes
        parts = []
        for start, width in ((0, self.key_bytes), (values, self.value_bytes)):
            if self.is_nhd:
                parts.append((start + first * heads * width, count * heads * width))
            else:
                parts += [(start + (head * size + first) * width, count * width) for head in range(heads)]
        return parts

    def to_bytes(self, access: str = "") -> bytes:
        """Return the message. access: further data that the transport needs to reach this memory."""
        return pack("memory", {"shape": asdict(self), "access": access})

    @classmethod
    def from_bytes(cls, message: object) -> tuple[MemoryShape, str]:
        """Return the layout in a message, and its `access`. Raises `InvalidArgument`."""
        fields = read("memory", message).fields
        try:
            return cls(**fields["shape"]), str(fields["access"])
        except (KeyError, TypeError) as error:
            raise InvalidArgument(f"message does not describe a memory: {type(error).__name__}: {error}") from None


def byte_runs(
    plan: TransferPlan, source: MemoryShape, target: MemoryShape, num_layers: list[int]
) -> npt.NDArray[np.int64]:
    """Return the byte ranges of a plan: (n, 3) of source address, target address and bytes. O(runs * layers).

    Both sides must have equal block sizes, layouts and heads. Raises `InvalidArgument` if they differ, and for a slot
    or place that one of the sides does not have.

    Args:
        plan: the plan.
        source: the sender's memory.
        target: the receiver's memory.
        num_layers: layers of each layer group.
    """
    _require_same_layout(source, target, max(num_layers, default=0))
    tables = [np.empty((0, 3), np.int64)]
    for runs, count in zip(plan.groups, num_layers, strict=True):
        _require_slots(runs, source, target)
        rows = [
            (old, new, length)
            for first, second, tokens in zip(
                *map(np.ndarray.tolist, (runs.from_slots, runs.to_slots, runs.lengths)), strict=True
            )
            for (old, length), (new, _) in zip(source.parts(first, tokens), target.parts(second, tokens), strict=True)
        ]
        for old_base, new_base in zip(source.places(count), target.places(count), strict=True):
            if rows:
                tables.append(np.array(rows, np.int64) + np.array([old_base, new_base, 0]))
    return np.concatenate(tables)


def _require_same_layout(source: MemoryShape, target: MemoryShape, num_places: int) -> None:
    """Raise unless both sides have the same block layout: otherwise a copy would overwrite other data."""
    for name in ("block_size", "num_kv_heads", "key_bytes", "value_bytes", "is_nhd"):
        there, here = getattr(source, name), getattr(target, name)
        if there != here:
            raise InvalidArgument(f"{name} is {there} at the source, {here} at the target; they must be equal")
    fewest = min(source.num_places, target.num_places)
    if num_places > fewest:
        raise InvalidArgument(
            f"num_layers has a group of {num_places} layers; it must be at most {fewest}, the places of a side"
        )


def _require_slots(runs: TokenRuns, source: MemoryShape, target: MemoryShape) -> None:
    for name, shape, slots in (("source", source, runs.from_slots), ("target", target, runs.to_slots)):
        size = shape.block_size
        if len(slots) and not (slots.min() >= size and (slots + runs.lengths).max() <= size * shape.num_blocks):
            raise InvalidArgument(
                f"the plan has slots {slots.min()} to {(slots + runs.lengths).max() - 1}; those of the {name} are "
                f"{size} to {size * shape.num_blocks - 1}"
            )


class OneSided(ABC):
    """Transport for one-sided reads: the receiver reads the sender's memory.

    After the read, the link asks the sender whether the offer was still held.
    """

    @abstractmethod
    def describe(self) -> bytes:
        """Return the sender's message that describes its memory, made by `MemoryShape.to_bytes`."""

    @abstractmethod
    def connect(self, message: object) -> None:
        """Connect the receiver to the sender's memory by the result of its `describe`."""

    @abstractmethod
    def read(self, plan: TransferPlan) -> None:
        """Fetch the data of a plan. All writes have ended when it returns or raises `HandoffError`."""
