"""The bytes of a transfer: reads keys and values from one rank's tensors and writes them to another's.

Both sides cut a lane into the same pieces, in the same order, whatever their block sizes and layouts. A piece is one
message. Needs torch: `pip install 'blockyard[engine]'`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from blockyard.arguments import require_int, shown
from blockyard.errors import InvalidArgument
from blockyard.storage import KVCache, KVLayout, StateSlots

from .runs import IntArray, Lane

#: A layer of at least this many bytes is its own message, sent without a copy if its blocks are contiguous.
_LARGE = 2**20


class Piece(Protocol):
    """Some of a lane's keys and values, as one message."""

    @property
    def num_elements(self) -> int:
        """Elements of the message."""

    def view(self) -> torch.Tensor | None:
        """Return the memory itself, flat, if it is contiguous; else None."""

    def read(self, out: torch.Tensor) -> None:
        """Copy the data into `out`, flat."""

    def write(self, message: torch.Tensor) -> None:
        """Copy a message to its destination."""


class KVPort:
    """Access of a transfer to one rank's tensors, in pieces.

    Raises `InvalidArgument` for a size outside 1 KiB to 1 GiB.

    Args:
        kv_cache: the tensors.
        piece_bytes: approximate bytes of a piece; equal on both sides.
        slots: states of a hybrid model's sequences.
    """

    def __init__(self, kv_cache: KVCache, piece_bytes: int = 4 * 2**20, slots: StateSlots | None = None) -> None:
        if not isinstance(kv_cache, KVCache):
            raise InvalidArgument(f"kv_cache is {shown(kv_cache)}; it must be a KVCache")
        self.kv_cache, self.slots = kv_cache, slots
        self._piece_bytes = require_int("piece_bytes", piece_bytes, 2**10, 2**30)
        places = kv_cache.places
        #: The layers of each layer group.
        self._layers = [
            [layer for layer in range(kv_cache.num_layers) if places.group(layer) == group]
            for group in range(places.num_groups)
        ]

    def pieces(self, lane: Lane) -> Iterator[Piece]:
        """Yield the pieces of a lane, group by group. Raises `InvalidArgument` for slots or heads that do not exist."""
        cache = self.kv_cache
        if not 0 <= lane.first_head <= lane.first_head + lane.num_heads <= cache.num_kv_heads:
            end = lane.first_head + lane.num_heads
            raise InvalidArgument(f"the lane has heads {lane.first_head} to {end}; kv_cache has {cache.num_kv_heads}")
        if len(lane.slots) != len(self._layers):
            raise InvalidArgument(f"the lane has {len(lane.slots)} layer groups; kv_cache has {len(self._layers)}")
        cache.finish_moves()
        for slots, layers, whole in zip(lane.slots, self._layers, lane.whole_blocks, strict=True):
            self._require_slots(slots)
            first, last = self._whole(lane.start, len(slots)) if whole else (0, 0)
            yield from self._tokens(lane, layers, slots[:first])
            yield from self._blocks(layers, slots[first : last : cache.block_size] // cache.block_size)
            yield from self._tokens(lane, layers, slots[last:])

    def pieces_of_state(self, state: torch.Tensor) -> Iterator[Piece]:
        """Yield the pieces of a state's bytes, uint8 (n,), which are contiguous."""
        for start in range(0, len(state), self._piece_bytes):
            yield _StatePiece(state[start : start + self._piece_bytes])

    def _require_slots(self, slots: IntArray) -> None:
        size, count = self.kv_cache.block_size, self.kv_cache.num_blocks
        if len(slots) and not size <= slots.min() <= slots.max() < size * count:
            raise InvalidArgument(
                f"the lane has slots {slots.min()} to {slots.max()}; those of kv_cache are {size} to {size * count - 1}"
            )

    def _whole(self, start: int, count: int) -> tuple[int, int]:
        """Return first and end of the tokens in whole blocks, among `count` tokens from position `start` on."""
        size = self.kv_cache.block_size
        first = -start % size
        last = (start + count) // size * size - start
        return (first, last) if last > first else (0, 0)

    def _tokens(self, lane: Lane, layers: list[int], slots: IntArray) -> Iterator[Piece]:
        cache = self.kv_cache
        width = lane.num_heads * (cache.head_size + cache.value_size)
        heads = slice(lane.first_head, lane.first_head + lane.num_heads)
        for some, each in self._cut(layers, slots, width):
            yield _TokenPiece(cache, each, some, heads)

    def _blocks(self, layers: list[int], block_ids: IntArray) -> Iterator[Piece]:
        cache = self.kv_cache
        width = cache.block_size * cache.num_kv_heads * (cache.head_size + cache.value_size)
        for some, each in self._cut(layers, block_ids, width):
            yield _BlockPiece(cache, [cache.places.place(layer) for layer in each], some)

    def _cut(self, layers: list[int], items: IntArray, width: int) -> Iterator[tuple[IntArray, list[int]]]:
        """Yield items and layers of each piece: a part of a large layer, or several small layers."""
        item_bytes = width * self.kv_cache.data.element_size()
        most = max(self._piece_bytes // item_bytes, 1)
        for start in range(0, len(items), most):
            some = items[start : start + most]
            layer_bytes = len(some) * item_bytes
            together = 1 if layer_bytes >= _LARGE else max(self._piece_bytes // layer_bytes, 1)
            for number in range(0, len(layers), together):
                yield some, layers[number : number + together]


class _BlockPiece:
    """Whole blocks of some layers, in their own layout."""

    def __init__(self, cache: KVCache, places: list[int], block_ids: IntArray) -> None:
        self._layers = [cache.data[place].flatten(1) for place in places]
        self._first, self._count = int(block_ids[0]), len(block_ids)
        self._is_run = bool((np.diff(block_ids) == 1).all())
        self._ids = torch.from_numpy(block_ids).to(cache.device)
        self._width = int(self._layers[0].shape[1])

    @property
    def num_elements(self) -> int:
        return len(self._layers) * self._count * self._width

    def view(self) -> torch.Tensor | None:
        if len(self._layers) > 1 or not self._is_run:
            return None
        return self._layers[0][self._first : self._first + self._count].flatten()

    def read(self, out: torch.Tensor) -> None:
        for layer, part in self._cut(out):
            torch.index_select(layer, 0, self._ids, out=part)

    def write(self, message: torch.Tensor) -> None:
        for layer, part in self._cut(message):
            layer.index_copy_(0, self._ids, part)

    def _cut(self, message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's blocks and their part of the message."""
        for layer, part in zip(self._layers, message.view(len(self._layers), self._count, self._width), strict=True):
            yield _as_words(layer), _as_words(part)


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks, a row each, as 8-byte words if possible: torch copies half-precision rows half as fast."""
    is_even = blocks.shape[1] * blocks.element_size() % 8 == 0 and blocks.data_ptr() % 8 == 0
    return blocks.view(torch.int64) if is_even else blocks


class _TokenPiece:
    """Some heads of single tokens, of some layers: a layer's keys, then its values, each (tokens, heads, size)."""

    def __init__(self, cache: KVCache, layers: list[int], slots: IntArray, heads: slice) -> None:
        blocks, offsets = np.divmod(slots, cache.block_size)
        self._blocks = torch.from_numpy(blocks).to(cache.device)
        self._offsets = torch.from_numpy(offsets).to(cache.device)
        parts = [part for layer in layers for part in (cache.key_cache(layer), cache.value_cache(layer))]
        if cache.layout is KVLayout.HND:
            parts = [part.transpose(1, 2) for part in parts]
        #: (blocks, tokens, heads, size) each.
        self._parts = [part[:, :, heads] for part in parts]
        self._count = len(slots)

    @property
    def num_elements(self) -> int:
        return sum(self._count * part.shape[2] * part.shape[3] for part in self._parts)

    def view(self) -> torch.Tensor | None:
        return None

    def read(self, out: torch.Tensor) -> None:
        for part, chunk in self._cut(out):
            chunk.copy_(part[self._blocks, self._offsets])

    def write(self, message: torch.Tensor) -> None:
        for part, chunk in self._cut(message):
            part[self._blocks, self._offsets] = chunk

    def _cut(self, message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for part in self._parts:
            end = start + self._count * part.shape[2] * part.shape[3]
            yield part, message[start:end].view(self._count, *part.shape[2:])
            start = end


class _StatePiece:
    """Some bytes of a state."""

    def __init__(self, part: torch.Tensor) -> None:
        self._part = part

    @property
    def num_elements(self) -> int:
        return len(self._part)

    def view(self) -> torch.Tensor:
        return self._part

    def read(self, out: torch.Tensor) -> None:
        out.copy_(self._part)

    def write(self, message: torch.Tensor) -> None:
        self._part.copy_(message)


def checksum_of(message: torch.Tensor, before: int = 0) -> int:
    """Return the CRC-32 of a message's bytes, continued from `before`. O(bytes)."""
    return zlib.crc32(message.detach().cpu().contiguous().view(torch.uint8).numpy(), before)
