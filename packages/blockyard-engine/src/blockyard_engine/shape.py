"""The shape of a model's KV cache: layers, heads, windows, states, and special kinds of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from blockyard.config import CacheConfig
from blockyard.groups import StateSpec
from blockyard.sizing import AttentionLayer, KVCacheSpec, Shard

from .attention.context import ContextRank
from .attention.indexed import IndexShape
from .attention.latent import LATENT
from .states.learning import StateShape

#: Placeholder for a number of blocks that is not known yet: the smallest valid one.
_MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of a model's KV cache, on one rank.

    Attributes:
        num_layers: layers with attention.
        num_kv_heads: heads of keys and values of the whole model.
        head_size: elements of a key.
        value_size: elements of a value.
        max_model_len: tokens of the longest sequence.
        windows: tokens that a token attends to in each layer, itself included; 0 for all.
        extras: special features of its attention (`Extras.names`). With "latent", keys are latent vectors and values
            rotated keys, of one head that serves all.
        shard: tensor parallel rank, whose heads are kept; None for all heads.
        context: context parallel rank, whose tokens are kept; None for all tokens.
        states: states that layers keep besides keys and values; None for none.
        index: index keys for selecting tokens; every layer has room for one, even if it reuses another layer's
            selection.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    value_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    windows: tuple[int, ...]
    extras: frozenset[str] = frozenset()
    shard: Shard | None = None
    context: ContextRank | None = None
    states: StateShape | None = None
    index: IndexShape | None = None

    @property
    def kv_heads(self) -> range:
        """KV heads kept on this rank."""
        return range(self.num_kv_heads) if self.shard is None else self.shard.kv_heads(self.num_kv_heads)

    @property
    def index_size(self) -> int:
        """Elements of a token's index key in a layer; 0 for none."""
        return 0 if self.index is None else self.index.size

    def spec(self, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """Return bytes and layer groups of the cache (`blockyard.sizing`)."""
        is_latent = LATENT in self.extras
        sizes = (self.head_size + self.value_size, 0) if is_latent else (self.head_size, self.value_size)
        layers = tuple(
            AttentionLayer(index, self.num_kv_heads, *sizes, window, is_latent, self.index_size)
            for index, window in enumerate(self.windows)
        )
        shard = self.shard or Shard(0, 1)
        return KVCacheSpec(
            layers=layers,
            block_size=block_size,
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=shard.size,
            tensor_parallel_rank=shard.rank,
            context_parallel_size=1 if self.context is None else self.context.size,
            interleave=1 if self.context is None else self.context.interleave,
        )

    def cache_config(self, spec: KVCacheSpec, num_blocks: int | None, **fields: Any) -> CacheConfig:
        """Return the config of a manager; states have their own layer group. Raises as `CacheConfig`.

        `num_blocks` None stands for the smallest valid number; `fields` are further fields of the config.
        """
        needed = _MIN_BLOCKS
        if self.states is not None:
            size = spec.block_size * spec.context_parallel_size
            group = StateSpec(state_bytes=self.states.num_bytes, checkpoint_every=size, name="states")
            fields["groups"] = (*spec.groups, group)
            needed = max(_MIN_BLOCKS, 1 - (-self.states.num_bytes // spec.bytes_per_block))
        return spec.cache_config(needed if num_blocks is None else num_blocks, **fields)

    def tensors(self, spec: KVCacheSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Return the arguments of `KVCache` besides the numbers of blocks and the block size."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "value_size": self.value_size,
            "index_size": self.index_size,
            "dtype": dtype,
            "device": device,
            "layer_groups": [group.layers for group in spec.page_groups],
            "shard": self.shard,
        }
