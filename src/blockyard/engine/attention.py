"""A step's attention: every new token's keys and values go to their slots, then each sequence reads its own blocks.

The function registered with transformers is `paged_attention`; `StepAttention` holds what all layers of a step
share. On CPU the fastest of the ways measured (docs/engine.md): decodes are gathered together, padded, into a buffer
made once, and attended in one call with the query heads of a group folded into the query axis, so that keys and
values are never repeated; a prompt, or a chunk of one, is one call a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ModelError
from ..storage import KVCache, TableAddresses

ATTENTION_NAME = "blockyard"
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The rows of a step that attention needs, a sequence each: int64 (B,) but block_tables (B, blocks)."""

    num_computed: IntArray
    num_scheduled: IntArray
    block_tables: NDArray[np.int32]

    @property
    def seq_lens(self) -> IntArray:
        """Tokens of each sequence after the step."""
        return self.num_computed + self.num_scheduled

    @property
    def starts(self) -> IntArray:
        """Where each sequence's new tokens begin among all of the step."""
        starts: IntArray = np.cumsum(self.num_scheduled) - self.num_scheduled
        return starts


class StepAttention:
    """Attention of one step, for every layer: built once, called once a layer in order.

    buffer: from `KVCache.new_buffer`, at least as long as the longest sequence; decodes are divided so that each
    group, padded, fits it. slot_mapping: int64 (T,) of the plan.
    """

    def __init__(
        self, kv_cache: KVCache, buffer: torch.Tensor, slot_mapping: NDArray[np.int64], shape: StepShape
    ) -> None:
        self._kv_cache = kv_cache
        self._slots = kv_cache.slots(slot_mapping)
        capacity = len(buffer) // 2 * kv_cache.block_size
        is_decode = shape.num_scheduled == 1
        groups = group_by_length(np.flatnonzero(is_decode), shape.seq_lens, kv_cache.block_size, capacity)
        self._decodes = [_DecodeGroup(kv_cache, buffer, shape, rows) for rows in groups]
        self._chunks = [_Chunk(kv_cache, buffer, shape, row) for row in np.flatnonzero(~is_decode).tolist()]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],  # noqa: ARG002  # the probe has refused models for which these would matter
    ) -> torch.Tensor:
        """As `Attend` says. O(tokens read), and linear in the new tokens' logits for the chunks."""
        # All tokens are written before any are read: a sequence may join a prefix computed in this very step.
        self._kv_cache.write(layer, key, value, self._slots)
        output = query.new_empty((query.shape[1], query.shape[0], query.shape[2]))
        for group in self._decodes:
            group.attend(layer, query, output, scaling)
        for chunk in self._chunks:
            chunk.attend(layer, query, key, value, output, scaling)
        return output


def group_by_length(rows: IntArray, seq_lens: IntArray, block_size: int, capacity_tokens: int) -> list[IntArray]:
    """Divide decodes into groups padded to their longest: at most half of a group is padding, and it fits the buffer.

    One long sequence beside many short ones would otherwise have all of them read as much as it does.
    """
    descending = rows[np.argsort(-seq_lens[rows], kind="stable")]
    groups: list[IntArray] = []
    start = 0
    for end in range(1, len(descending) + 1):
        longest = int(seq_lens[descending[start]])
        width = -(-longest // block_size) * block_size
        is_full = (end - start + 1) * width > capacity_tokens
        if end == len(descending) or is_full or 2 * int(seq_lens[descending[end]]) < longest:
            groups.append(descending[start:end])
            start = end
    return groups


class _DecodeGroup:
    """Sequences with one new token each, read by one padded gather and one attention call."""

    def __init__(self, kv_cache: KVCache, buffer: torch.Tensor, shape: StepShape, rows: IntArray) -> None:
        seq_lens = shape.seq_lens[rows]
        self._kv_cache = kv_cache
        self._buffer = buffer
        self._tables = kv_cache.tables(shape.block_tables[rows], seq_lens)
        self._tokens = torch.from_numpy(shape.starts[rows]).to(kv_cache.device)
        self._mask = _padding_mask(self._tables, seq_lens, kv_cache)

    def attend(self, layer: int, query: torch.Tensor, output: torch.Tensor, scaling: float | None) -> None:
        key, value = self._kv_cache.gather(layer, self._tables, self._buffer)
        num_kv_heads, head_size = key.shape[2:]
        # Grouped-query attention (Ainslie et al., EMNLP 2023): the heads of a group read the same keys, as if they
        # were several queries of one head.
        own = query.index_select(1, self._tokens).transpose(0, 1)
        folded = own.reshape(len(self._tokens), num_kv_heads, -1, head_size)
        result = torch.nn.functional.scaled_dot_product_attention(
            folded, key.transpose(1, 2), value.transpose(1, 2), attn_mask=self._mask, scale=scaling
        )
        output.index_copy_(0, self._tokens, result.reshape(len(self._tokens), -1, head_size))


class _Chunk:
    """Several new tokens of one sequence: its whole prompt, or a chunk behind what the cache has already."""

    def __init__(self, kv_cache: KVCache, buffer: torch.Tensor, shape: StepShape, row: int) -> None:
        start, length = int(shape.starts[row]), int(shape.num_scheduled[row])
        self._kv_cache = kv_cache
        self._buffer = buffer
        self._new = slice(start, start + length)
        self._tables: TableAddresses | None = None
        self._mask: torch.Tensor | None = None
        self._num_tokens = int(shape.seq_lens[row])
        if shape.num_computed[row] > 0:
            self._tables = kv_cache.tables(shape.block_tables[row : row + 1], shape.seq_lens[row : row + 1])
            self._mask = _causal_mask(length, self._num_tokens, kv_cache)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scaling: float | None,
    ) -> None:
        if self._tables is None:
            past_key, past_value = key[None, self._new], value[None, self._new]
        else:
            past_key, past_value = self._kv_cache.gather(layer, self._tables, self._buffer)
        result = torch.nn.functional.scaled_dot_product_attention(
            query[None, :, self._new],
            past_key[:, : self._num_tokens].transpose(1, 2),
            past_value[:, : self._num_tokens].transpose(1, 2),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=scaling,
            enable_gqa=query.shape[0] != key.shape[1],
        )
        output[self._new] = result[0].transpose(0, 1)


def _padding_mask(tables: TableAddresses, seq_lens: IntArray, kv_cache: KVCache) -> torch.Tensor | None:
    """What to add to the logits, (B, 1, 1, width): minus infinity behind each sequence's end."""
    hidden = np.arange(tables.width_tokens) >= seq_lens[:, None]
    if not hidden.any():
        return None
    return _additive(hidden, kv_cache)[:, None, None]


def _causal_mask(num_new: int, num_tokens: int, kv_cache: KVCache) -> torch.Tensor:
    """What to add to the logits, (num_new, num_tokens): new token i sees all before it and itself."""
    position = np.arange(num_tokens - num_new, num_tokens)
    return _additive(np.arange(num_tokens) > position[:, None], kv_cache)


def _additive(hidden: NDArray[np.bool_], kv_cache: KVCache) -> torch.Tensor:
    mask = torch.zeros(hidden.shape, dtype=kv_cache.dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(kv_cache.device)


class Attend(Protocol):
    """What travels with a call of the model to every layer: see `paged_attention`."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """query (heads, T, head_size), key and value (T, kv_heads, head_size) to output (T, heads, head_size)."""


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    blockyard_attend: Attend | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer: query (1, heads, T, head_size), key and value likewise.

    All T tokens of a step are one row; which sequence each belongs to, `blockyard_attend` knows. It comes with the
    call of the model, which hands keywords that it does not know on to its layers.
    """
    if blockyard_attend is None:
        raise ModelError("the model was called outside an engine's step while its attention was set to 'blockyard'")
    others["attention_mask"] = attention_mask
    tokens_first = key[0].transpose(0, 1), value[0].transpose(0, 1)
    return blockyard_attend(module.layer_idx, query[0], *tokens_first, scaling, others)[None], None
