"""What an engine knows of its model: the sizes of its cache, its windows, and what its attention asks for."""

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

#: Blocks of a config whose number is not found yet: the least that there can be.
_FEWEST = 2


@dataclass(frozen=True, slots=True)
class KVShape:
    """num_layers layers that each keep num_kv_heads keys and values a token, for max_model_len tokens.

    head_size, value_size: elements of a key and of a value. windows: how many tokens a token attends to in each layer,
    its own included; 0 for all. extras: what its attention asks for beside scaled dot products (`Extras.names`); with
    "latent", keys are latent vectors and values rotated keys, one head that serves all. shard: the rank whose part of
    the heads is kept, where ranks share them; None for all of num_kv_heads. context: the rank whose part of the tokens
    is kept, where ranks share those; None for all. states: what layers keep of a sequence beside keys and values; then
    num_layers counts those that have attention. index: keys by which attention selects tokens; every layer has room for
    one, also where it takes the selection of another.
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
        """Return the KV heads that are kept here."""
        return range(self.num_kv_heads) if self.shard is None else self.shard.kv_heads(self.num_kv_heads)

    @property
    def index_size(self) -> int:
        """Return the elements of a token's index key in a layer; 0 for none."""
        return 0 if self.index is None else self.index.size

    def spec(self, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """Return bytes and layer groups of a cache for it (`blockyard.sizing`)."""
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
        """Return the config of a manager for it; states have a group of their own.

        spec: as `spec` describes it. num_blocks: the fewest that there can be if None. Raises as `CacheConfig`.
        """
        needed = _FEWEST
        if self.states is not None:
            size = spec.block_size * spec.context_parallel_size
            group = StateSpec(state_bytes=self.states.num_bytes, checkpoint_every=size, name="states")
            fields["groups"] = (*spec.groups, group)
            needed = max(_FEWEST, 1 - (-self.states.num_bytes // spec.bytes_per_block))
        return spec.cache_config(needed if num_blocks is None else num_blocks, **fields)

    def tensors(self, spec: KVCacheSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """What `KVCache` takes beside numbers of blocks and their size; spec: the same cache as `spec` describes it."""
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
