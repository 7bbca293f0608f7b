"""Attention by PyTorch's scaled_dot_product_attention, on any device.

New keys and values are written to their slots, then each sequence reads its blocks. Decodes are gathered together,
padded, into a buffer that is allocated once, and attended in one call (`softmax`) without repeating keys and values; a
prompt or chunk is one call per sequence. On a CPU this was the fastest of the variants measured (docs/engine.md). In a
group with a sliding window only the blocks that the window reaches are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from blockyard.errors import ModelError
from blockyard.storage import KVCache, TableAddresses

from .indexed import INDICES, IndexStep
from .interface import GroupTables, IntArray, ReadRange, StepShape
from .latent import LATENT
from .softmax import Extras, softmax_attention

#: Maximum tokens of a padded gather of decodes, unless a single sequence is longer.
_GATHER_TOKENS = 16384


class SdpaBackend:
    """Backend for any device. Untouched parts of its gather buffer take no memory."""

    name: ClassVar[str] = "sdpa"
    extras: ClassVar[frozenset[str]] = frozenset({"softcap", "s_aux", LATENT, INDICES})

    def __init__(self, kv_cache: KVCache, max_model_len: int) -> None:
        self._kv_cache = kv_cache
        longest = min(max_model_len, kv_cache.num_blocks * kv_cache.block_size)
        self._buffer = kv_cache.new_buffer(max(_GATHER_TOKENS, longest))

    @classmethod
    def refusal(cls, kv_cache: KVCache) -> str | None:  # noqa: ARG003  # others look at its device and what is installed
        return None

    def begin(self, shape: StepShape) -> SdpaStep:
        return SdpaStep(self._kv_cache, self._buffer, shape)


class SdpaStep:
    """Attention of one step, for every layer; called once per layer, in order.

    `buffer` comes from `KVCache.new_buffer` and is at least as long as the longest sequence; batches of decodes fit it.
    """

    def __init__(self, kv_cache: KVCache, buffer: torch.Tensor, shape: StepShape) -> None:
        self._kv_cache = kv_cache
        self._groups = [_GroupStep(kv_cache, buffer, shape, rows) for rows in shape.groups]
        self._index: IndexStep | None = None
        if kv_cache.index_size:
            self._index = IndexStep(
                kv_cache, shape, ReadRange(shape, shape.groups[0], kv_cache.block_size), self._groups[0].slots
            )

    def select(self, indexer: Callable[..., torch.Tensor], given: dict[str, Any], cache_name: str) -> torch.Tensor:
        """Select tokens (`indexed.TokenSelector`), for a model with an index."""
        if self._index is None:
            raise ModelError("the model selects tokens by an index, but its cache has no index keys")
        return self._index.select(indexer, given, cache_name)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """Compute a layer's attention (`Attend`). O(tokens read) for decodes, times the new tokens for chunks."""
        group = self._groups[self._kv_cache.places.group(layer)]
        # Write all tokens before reading any: a sequence may share a prefix that is computed in this step.
        self._kv_cache.write(layer, key, value, group.slots)
        extras = Extras.of(others)
        size = key.shape[2] if extras.is_latent else value.shape[2]
        output = query.new_empty((query.shape[1], query.shape[0], size))
        for decodes in group.decodes:
            decodes.attend(layer, query, output, scaling, extras)
        for chunk in group.chunks:
            chunk.attend(layer, query, key, value, output, scaling, extras)
        return output


class _GroupStep:
    """A step in one layer group: its slots, its decodes in batches, and its chunks."""

    def __init__(self, kv_cache: KVCache, buffer: torch.Tensor, shape: StepShape, rows: GroupTables) -> None:
        self.slots = kv_cache.slots(rows.slot_mapping)
        read_range = ReadRange(shape, rows, kv_cache.block_size)
        is_decode = shape.num_scheduled == 1
        capacity = len(buffer) // 2 * kv_cache.block_size
        batches = group_by_length(np.flatnonzero(is_decode), read_range.lengths, kv_cache.block_size, capacity)
        self.decodes = [_DecodeBatch(kv_cache, buffer, read_range, batch) for batch in batches]
        self.chunks = [_Chunk(kv_cache, buffer, read_range, row) for row in np.flatnonzero(~is_decode).tolist()]


def group_by_length(rows: IntArray, lengths: IntArray, block_size: int, capacity_tokens: int) -> list[IntArray]:
    """Divide decodes into batches padded to their longest: at most half is padding, and each fits the buffer.

    Otherwise one long sequence would make many short ones read as much as it does.
    """
    descending = rows[np.argsort(-lengths[rows], kind="stable")]
    batches: list[IntArray] = []
    start = 0
    for end in range(1, len(descending) + 1):
        longest = int(lengths[descending[start]])
        width = -(-longest // block_size) * block_size
        is_full = (end - start + 1) * width > capacity_tokens
        if end == len(descending) or is_full or 2 * int(lengths[descending[end]]) < longest:
            batches.append(descending[start:end])
            start = end
    return batches


class _DecodeBatch:
    """Sequences with one new token each, read by one padded gather and one attention call."""

    def __init__(self, kv_cache: KVCache, buffer: torch.Tensor, read_range: ReadRange, rows: IntArray) -> None:
        lengths = read_range.lengths[rows]
        self._kv_cache = kv_cache
        self._buffer = buffer
        self._tables = kv_cache.tables(read_range.tables(rows), lengths)
        self._tokens = torch.from_numpy(read_range.shape.starts[rows]).to(kv_cache.device)
        hidden = read_range.hidden(lengths - 1, self._tables.width_tokens)
        is_hidden = hidden.any() or kv_cache.index_size > 0
        self._mask = _additive(hidden, kv_cache)[:, None, None, None] if is_hidden else None

    def attend(
        self, layer: int, query: torch.Tensor, output: torch.Tensor, scaling: float | None, extras: Extras
    ) -> None:
        """Write the attention of these tokens over their gathered blocks to their rows of `output`."""
        key, value = extras.keys_and_values(*self._kv_cache.gather(layer, self._tables, self._buffer))
        own = query.index_select(1, self._tokens).transpose(0, 1)
        single = own.reshape(len(self._tokens), key.shape[2], -1, 1, query.shape[2])
        mask = extras.hide_unselected(self._mask, self._tokens[:, None, None, None], key.shape[1])
        result = softmax_attention(single, key, value, mask, scaling, extras)
        output.index_copy_(0, self._tokens, result.reshape(len(self._tokens), -1, output.shape[2]))


class _Chunk:
    """Several new tokens of one sequence: a prompt, a chunk of one, or a draft."""

    def __init__(self, kv_cache: KVCache, buffer: torch.Tensor, read_range: ReadRange, row: int) -> None:
        start, num_new = int(read_range.shape.starts[row]), int(read_range.shape.num_scheduled[row])
        self._kv_cache = kv_cache
        self._buffer = buffer
        self._new = slice(start, start + num_new)
        self._num_keys = int(read_range.lengths[row])
        self._tables: TableAddresses | None = None
        self._mask: torch.Tensor | None = None
        is_whole = self._num_keys == num_new
        if not is_whole:
            self._tables = kv_cache.tables(read_range.tables(np.array([row])), read_range.lengths[row : row + 1])
        if not is_whole or 0 < read_range.window < num_new or kv_cache.index_size:
            positions = np.arange(self._num_keys - num_new, self._num_keys)
            self._mask = _additive(read_range.hidden(positions, self._num_keys), kv_cache)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scaling: float | None,
        extras: Extras,
    ) -> None:
        """Write the attention of the new tokens over cached and new ones to their rows of `output`."""
        if self._tables is None:
            past = key[None, self._new], value[None, self._new]
        else:
            past = self._kv_cache.gather(layer, self._tables, self._buffer)
        past_key, past_value = extras.keys_and_values(*(part[:, : self._num_keys] for part in past))
        new = query[None, :, self._new].unflatten(1, (key.shape[1], -1))
        mask = extras.hide_unselected(self._mask, self._new, self._num_keys)
        result = softmax_attention(new, past_key, past_value, mask, scaling, extras)
        output[self._new] = result[0].flatten(0, 1).transpose(0, 1)


def _additive(hidden: NDArray[np.bool_], kv_cache: KVCache) -> torch.Tensor:
    """Return an additive mask: minus infinity where `hidden` is True."""
    mask = torch.zeros(hidden.shape, dtype=kv_cache.dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(kv_cache.device)
