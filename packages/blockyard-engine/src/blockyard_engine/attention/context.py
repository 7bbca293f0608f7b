"""Attention where each rank keeps some tokens of every sequence (context parallel).

Every rank computes the whole model, and has all queries. It writes those of the new keys and values that are its own,
attends to the keys that it keeps, and the ranks' outputs are merged: one exchange a layer.

Each rank's part has its output and the logarithm of the sum of its exponentials; the outputs are weighted by these. The
rule is that of online softmax (Milakov and Gimelshein, arXiv 1805.02867), as ring attention uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from blockyard.storage import ContextShard, IntArray, KVCache, TableAddresses

from .interface import GroupRows, StepShape, hidden_keys
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
    """Output and log of the sum of exponentials over these keys alone, float32; zeros and -inf where there are none.

    query (B, kv_heads, group, T, size), key and value (B, keys, kv_heads, size); hidden: bool (B, T, keys), true where
    a token must not see a key. Returns (B, kv_heads, group, T, value's size) and (B, kv_heads, group, T). Sinks are
    one more logit without a value: give them on one part only.
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
    weights = torch.exp(logits - _finite(sums)[..., None])[..., : key.shape[1]]
    return torch.matmul(weights, value.transpose(1, 2)[:, :, None].float()), sums


def merge(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Merge parts' outputs (parts, ..., size) and their sums (parts, ...) to the output over all keys, (..., size).

    At least one part must have keys for each token.
    """
    weights = torch.softmax(sums, dim=0)
    return (outputs * weights[..., None]).sum(dim=0)


def _finite(sums: torch.Tensor) -> torch.Tensor:
    """Put 0 in place of minus infinity, from which nothing can be subtracted."""
    return sums.masked_fill(torch.isneginf(sums), 0.0)


class Gatherer(Protocol):
    """What hands every rank the tensors of all."""

    def all_gather(self, tensor: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the ranks' tensors behind each other along the last dimension, of which rank i has counts[i]."""


@dataclass(frozen=True, slots=True)
class ContextRank:
    """A rank's part of the tokens, and its way to the other ranks."""

    shard: ContextShard
    group: Gatherer

    @property
    def size(self) -> int:
        """Count the ranks in all."""
        return self.shard.size

    @property
    def interleave(self) -> int:
        """Return how many neighbouring tokens stay together."""
        return self.shard.interleave


class ContextBackend:
    """`AttentionBackend` of a rank. kv_cache: its own, whose blocks hold its part of the manager's blocks."""

    name: ClassVar[str] = "context"
    extras: ClassVar[frozenset[str]] = frozenset({"softcap", "s_aux", LATENT})

    def __init__(self, kv_cache: KVCache, context: ContextRank) -> None:
        self._kv_cache = kv_cache
        self._context = context

    @classmethod
    def refusal(cls, kv_cache: KVCache) -> str | None:  # noqa: ARG003  # written out in torch, it runs everywhere
        """Return why it cannot serve these tensors: it always can."""
        return None

    def begin(self, shape: StepShape) -> ContextStep:
        """Prepare a step."""
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
        """Does as `Attend` says. O(tokens kept here) for decodes, times the new tokens for chunks."""
        group = self._groups[self._kv_cache.places.group(layer)]
        self._kv_cache.write(layer, key[group.own], value[group.own], group.slots)
        extras = Extras.of(others)
        if self._context.shard.rank and extras.sinks is not None:
            extras = Extras(extras.softcap, None, extras.is_latent)  # they take part once
        size = key.shape[2] if extras.is_latent else value.shape[2]
        part = query.new_empty((query.shape[1], query.shape[0], size + 1), dtype=torch.float32)
        for rows in group.rows:
            rows.attend(layer, query, part, scaling, extras)
        return self._merged(part).to(query.dtype)

    def _merged(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts, (T, heads, size + 1) each with the sum behind the output, as one output."""
        num_ranks, width = self._context.size, part.shape[2]
        parts = self._context.group.all_gather(part, [width] * num_ranks).unflatten(2, (num_ranks, width))
        parts = parts.movedim(2, 0)
        return merge(parts[..., :-1], parts[..., -1])


class _GroupStep:
    """A step in one layer group: which new tokens are written here, and where; and what each row reads."""

    def __init__(self, kv_cache: KVCache, shard: ContextShard, shape: StepShape, rows: GroupRows) -> None:
        is_own = shard.is_own(rows.slot_mapping)
        self.own = torch.from_numpy(np.flatnonzero(is_own)).to(kv_cache.device)
        self.slots = kv_cache.slots(shard.local_slots(rows.slot_mapping[is_own]))
        is_decode = shape.num_scheduled == 1
        batches = [np.flatnonzero(is_decode)] if is_decode.any() else []
        batches += [np.array([row]) for row in np.flatnonzero(~is_decode)]
        self.rows = [_Rows(kv_cache, shard, shape, rows, batch) for batch in batches]


class _Rows:
    """Sequences of a step with as many new tokens each, read by one padded gather."""

    def __init__(
        self, kv_cache: KVCache, shard: ContextShard, shape: StepShape, rows: GroupRows, batch: IntArray
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
            # A rank may keep none of a short sequence: its row is read as one token, and hidden.
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
        key, value = extras.attended(*self._read(layer))
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
