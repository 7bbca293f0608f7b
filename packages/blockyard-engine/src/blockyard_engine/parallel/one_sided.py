"""Reads of another process's memory that do not ask it first: what is read, as runs of bytes, and by what."""

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
    """Where the keys and values of one rank lie: `KVCache.data` as bytes from `base` on, place after place."""

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
            raise InvalidArgument(f"the memory ends at {end}; an address is at most {_LIMIT}")

    @classmethod
    def of(cls, cache: KVCache) -> MemoryShape:
        """Take those of a rank's tensors. key_bytes, value_bytes: of one head of one token."""
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
        """Count the bytes of a block in one place."""
        return self.block_size * self.num_kv_heads * (self.key_bytes + self.value_bytes)

    def places(self, count: int) -> npt.NDArray[np.int64]:
        """Return the address of each of the first `count` places."""
        addresses: npt.NDArray[np.int64] = self.base + np.arange(count) * (self.num_blocks * self.block_bytes)
        return addresses

    def parts(self, slot: int, count: int) -> list[tuple[int, int]]:
        """(offset in its place, bytes) of `count` tokens from a slot on; whole blocks are one part."""
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
        """Yield keys and values of some tokens of one block: one part each, or one for each head."""
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
        """Return the message. access: what else the transport needs to reach this memory."""
        return pack("memory", {"shape": asdict(self), "access": access})

    @classmethod
    def from_bytes(cls, message: object) -> tuple[MemoryShape, str]:
        """Return the shape of a message, and the access. Raises `InvalidArgument`."""
        fields = read("memory", message).fields
        try:
            return cls(**fields["shape"]), str(fields["access"])
        except (KeyError, TypeError) as error:
            raise InvalidArgument(f"message has no whole account of a memory: {error}") from None


def byte_runs(
    plan: TransferPlan, source: MemoryShape, target: MemoryShape, num_layers: list[int]
) -> npt.NDArray[np.int64]:
    """Return what a plan moves between memories of one kind: (n, 3), address at the source, at the target, bytes.

    num_layers: of each layer group. The block size, layout and heads are those of both sides. O(runs * layers).
    Raises `InvalidArgument` for memories of two kinds, and for a slot or place that one of the sides does not have.
    """
    _require_one_kind(source, target, max(num_layers, default=0))
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


def _require_one_kind(source: MemoryShape, target: MemoryShape, num_places: int) -> None:
    """What both sides say of a block is the same: else the lengths of one would be written over more of the other."""
    for name in ("block_size", "num_kv_heads", "key_bytes", "value_bytes", "is_nhd"):
        there, here = getattr(source, name), getattr(target, name)
        if there != here:
            raise InvalidArgument(f"{name} is {there} at the source, {here} at the target; they must be equal")
    fewest = min(source.num_places, target.num_places)
    if num_places > fewest:
        raise InvalidArgument(f"num_layers has a group of {num_places} layers; a side has {fewest} places")


def _require_slots(runs: TokenRuns, source: MemoryShape, target: MemoryShape) -> None:
    for name, shape, slots in (("source", source, runs.from_slots), ("target", target, runs.to_slots)):
        size = shape.block_size
        if len(slots) and not (slots.min() >= size and (slots + runs.lengths).max() <= size * shape.num_blocks):
            raise InvalidArgument(
                f"the plan names slots from {slots.min()} on; the {name} has {size * shape.num_blocks}"
            )


class OneSided(ABC):
    """A transport by which the receiver reads the sender's memory. A link asks afterwards whether it was still held."""

    @abstractmethod
    def describe(self) -> bytes:
        """Return the sender's side: what the receiver needs to read its memory, made by `MemoryShape.to_bytes`."""

    @abstractmethod
    def connect(self, message: object) -> None:
        """Take, at the receiver's side, what `describe` of the sender said."""

    @abstractmethod
    def read(self, plan: TransferPlan) -> None:
        """Fetch what a plan says. Nothing is written any more when it returns or raises. Raises `HandoffError`."""
