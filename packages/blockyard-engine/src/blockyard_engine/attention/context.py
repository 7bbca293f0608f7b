"""Attention for context parallel ranks: each rank keeps some tokens of every sequence.

Every rank computes the whole model and has all queries. It writes its own part of the new keys and values and attends
to the keys that it keeps. Then the ranks' outputs are merged, in one exchange a layer: each output is weighted by the
sum of its exponentials (online softmax: Milakov and Gimelshein, arXiv 1805.02867), as in ring attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from blockyard.storage import ContextShard, IntArray, KVCache, TableAddresses

from .interface import GroupTables, StepShape, hidden_keys
from .latent import LATENT
from .softmax import Extras


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float | None,
    extras: Extras,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output over these keys and the logarithm of its sum of exponentials, in float32.

    query is (B, kv_heads, group, T, size), key and value (B, keys, kv_heads, their size); hidden, bool (B, T, keys), is
    True if a token must not attend to a key. Returns (B, kv_heads, group, T, value_size) and (B, kv_heads, group, T);
    without keys, zeros and -inf. Sinks are one more logit without a value: pass them on one rank only.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.matmul(query, key.permute(0, 2, 3, 1)[:, :, None]).float() * scale
    if extras.softcap is not None:
        logits = torch.tanh(logits / extras.softcap) * extras.softcap
    logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
    if extras.sinks is not None:
        sinks = extras.sinks.float().reshape(1, *query.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    sums = torch.logsumexp(logits, dim=-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))
    finite_sums = sums.masked_fill(torch.isneginf(sums), 0.0)
    weights = torch.exp(logits - finite_sums[..., None])[..., : key.shape[1]]
    return torch.matmul(weights, value.transpose(1, 2)[:, :, None].float()), sums


def merge(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Merge partial outputs (parts, ..., size) by their sums (parts, ...) into the output over all keys, (..., size).

    At least one part must have keys for each token.
    """
    weights = torch.softmax(sums, dim=0)
    return (outputs * weights[..., None]).sum(dim=0)


class Gatherer(Protocol):
    """Exchanges tensors between the ranks."""

    def all_gather(self, tensor: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along the last dimension; rank i has counts[i] elements there."""


@dataclass(frozen=True, slots=True)
class ContextRank:
    """A rank's share of the tokens, and its connection to the other ranks."""

    shard: ContextShard
    group: Gatherer

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.shard.size

    @property
    def interleave(self) -> int:
        """Number of consecutive tokens on one rank."""
        return self.shard.interleave


class ContextBackend:
    """`AttentionBackend` of a context parallel rank, over its own KV cache."""

    name: ClassVar[str] = "context"
    extras: ClassVar[frozenset[str]] = frozenset({"softcap", "s_aux", LATENT})

    def __init__(self, kv_cache: KVCache, context: ContextRank) -> None:
        self._kv_cache = kv_cache
        self._context = context

    @classmethod
    def refusal(cls, kv_cache: KVCache) -> str | None:  # noqa: ARG003  # written out in torch, it runs everywhere
        return None

    def begin(self, shape: StepShape) -> ContextStep:
        return ContextStep(self._kv_cache, self._context, shape)


class ContextStep:
    """Attention of one step, for every layer."""

    def __init__(self, kv_cache: KVCache, context: ContextRank, shape: StepShape) -> None:
        self._kv_cache = kv_cache
        self._context = context
        self._groups = [_GroupStep(kv_cache, context.shard, shape, rows) for rows in shape.groups]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """Compute a layer's attention (`Attend`). O(tokens kept here) for decodes, times the new tokens for chunks."""
        group = self._groups[self._kv_cache.places.group(layer)]
        self._kv_cache.write(layer, key[group.own], value[group.own], group.slots)
        extras = Extras.of(others)
        if self._context.shard.rank and extras.sinks is not None:
            extras = Extras(extras.softcap, None, extras.is_latent)  # only rank 0 adds the sinks
        size = key.shape[2] if extras.is_latent else value.shape[2]
        part = query.new_empty((query.shape[1], query.shape[0], size + 1), dtype=torch.float32)
        for rows in group.rows:
            rows.attend(layer, query, part, scaling, extras)
        return self._merged(part).to(query.dtype)

    def _merged(self, part: torch.Tensor) -> torch.Tensor:
        """Merge all ranks' parts, (T, heads, size + 1) each, whose last element is the sum."""
        num_ranks, width = self._context.size, part.shape[2]
        parts = self._context.group.all_gather(part, [width] * num_ranks).unflatten(2, (num_ranks, width))
        parts = parts.movedim(2, 0)
        return merge(parts[..., :-1], parts[..., -1])


class _GroupStep:
    """A step in one layer group: the new tokens to write here and their slots, and the rows to read."""

    def __init__(self, kv_cache: KVCache, shard: ContextShard, shape: StepShape, rows: GroupTables) -> None:
        is_own = shard.is_own(rows.slot_mapping)
        self.own = torch.from_numpy(np.flatnonzero(is_own)).to(kv_cache.device)
        self.slots = kv_cache.slots(shard.local_slots(rows.slot_mapping[is_own]))
        is_decode = shape.num_scheduled == 1
        batches = [np.flatnonzero(is_decode)] if is_decode.any() else []
        batches += [np.array([row]) for row in np.flatnonzero(~is_decode)]
        self.rows = [_Rows(kv_cache, shard, shape, rows, batch) for batch in batches]


class _Rows:
    """Sequences with equally many new tokens in a step, read by one padded gather."""

    def __init__(
        self, kv_cache: KVCache, shard: ContextShard, shape: StepShape, rows: GroupTables, batch: IntArray
    ) -> None:
        num_new = int(shape.num_scheduled[batch[0]])
        lengths = shard.num_local(shape.seq_lens[batch])
        tokens = shape.starts[batch][:, None] + np.arange(num_new)
        self._kv_cache = kv_cache
        self._tokens = torch.from_numpy(tokens.reshape(-1)).to(kv_cache.device)
        self._num_seqs, self._num_new = tokens.shape
        self._tables: TableAddresses | None = None
        width = 0
        if lengths.any():
            # A rank may have no token of a short sequence: its row is read as one hidden token.
            self._tables = kv_cache.tables(rows.block_tables[batch], np.maximum(lengths, 1))
            width = self._tables.width_tokens
        own = shape.num_computed[batch][:, None] + np.arange(num_new)
        hidden = hidden_keys(shard.positions(width), own, rows.sliding_window)
        self._hidden = torch.from_numpy(hidden).to(kv_cache.device)

    def attend(
        self, layer: int, query: torch.Tensor, part: torch.Tensor, scaling: float | None, extras: Extras
    ) -> None:
        """Write output and sum of these rows' tokens to `part`."""
        if self._tables is None and extras.sinks is None:
            part[self._tokens] = 0.0
            part[self._tokens, :, -1] = float("-inf")
            return
        key, value = extras.keys_and_values(*self._read(layer))
        mine = query[:, self._tokens].unflatten(1, (self._num_seqs, self._num_new)).transpose(0, 1)
        grouped = mine.unflatten(1, (key.shape[2], -1))
        output, sums = partial_attention(grouped, key, value, self._hidden, scaling, extras)
        both = torch.cat((output, sums[..., None]), dim=-1)  # (seqs, kv_heads, group, new, size + 1)
        part[self._tokens] = both.flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def _read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._tables is not None:
            return self._kv_cache.gather(layer, self._tables)
        cache = self._kv_cache
        empty = cache.data.new_empty((self._num_seqs, 0, cache.num_kv_heads, cache.head_size))
        return empty, empty.new_empty((*empty.shape[:3], cache.value_size))
