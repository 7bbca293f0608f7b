"""A rank's way into the group: what all ranks must have in common, its share of the model, its part of the cache.

The share is compared with the whole model before anything is served.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import torch

from blockyard import __version__
from blockyard.config import CacheConfig
from blockyard.errors import ModelError, RankError
from blockyard.sizing import Shard
from blockyard.storage import ContextShard, KVCache
from blockyard.wire import VERSION

from ..attention.context import ContextRank
from ..borrowing import BorrowedModel
from ..checks.trial import OWN_LENGTH, can_afford, require_equal_logits, run_steps
from ..memory.account import weights_bytes
from ..memory.finding import MemoryFinder, meter_of
from ..memory.largest_step import StepSizes
from ..probe import learn_shape
from ..runner import ModelRunner
from ..shape import KVShape
from .group import ProcessGroup, RankGroup
from .sharding import Heads, ModelShard, require_splittable

#: Of a config: what depends on how it was loaded, and on nothing that is computed.
_OF_LOADING = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_SAMPLED = 64


def identity_of(borrowed: BorrowedModel, shape: KVShape, block_size: int) -> dict[str, Any]:
    """Return what a rank has before it joins, in plain values. O(parameters' number), some elements of each."""
    config = json.loads(borrowed.model.config.to_json_string(use_diff=False))
    return {
        "blockyard": __version__,
        "wire version": VERSION,
        "torch": torch.__version__.partition("+")[0],
        "model": type(borrowed.model).__name__,
        "dtype": str(borrowed.dtype).removeprefix("torch."),
        "device type": borrowed.device.type,
        "block_size": block_size,
        "max_model_len": shape.max_model_len,
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "value_size": shape.value_size,
        "windows": list(shape.windows),
        "state_bytes": 0 if shape.states is None else shape.states.num_bytes,
        "config": {name: value for name, value in config.items() if name not in _OF_LOADING},
        "weights (a sample's digest)": _sample_digest(borrowed.model),
    }


def require_same(rank: int, other: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise `RankError`, naming the first difference and both values. own: of rank 0. O(fields)."""
    for name in dict.fromkeys([*own, *other]):
        mine, theirs = own.get(name), other.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            require_same(rank, _named(name, theirs), _named(name, mine))
        elif mine != theirs:
            raise RankError(f"rank {rank} has {name} {theirs!r}; rank 0 has {mine!r}, and all ranks need the same")


def agreed_bytes(identity: dict[str, Any]) -> bytes:
    """Return what steps' digests begin with."""
    return json.dumps(identity, sort_keys=True).encode()


def _named(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{field}": value for field, value in fields.items()}


def _sample_digest(model: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, weights in model.named_parameters():
        flat = weights.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLED)].contiguous().cpu()
        digest.update(f"{name} {tuple(weights.shape)} {weights.dtype}".encode())
        digest.update(sample.view(torch.uint8).numpy())
    return digest.hexdigest()


def require_shareable(borrowed: BorrowedModel, shape: KVShape, shard: Shard, interleave: int) -> None:
    """Raise what `join` raises for a model that cannot be split, before this rank waits for others. O(modules)."""
    if not interleave:
        require_splittable(borrowed.model, Heads.of(borrowed.model, shape.num_kv_heads), shard)


def join(
    borrowed: BorrowedModel, shape: KVShape, shard: Shard, interleave: int, group: RankGroup, is_tried: bool
) -> tuple[BorrowedModel, KVShape]:
    """Return this rank's share of a model, and its shape. All ranks call it at the same time.

    interleave: 0 where ranks share heads and features; else they share tokens, as many neighbouring ones at a time, and
    each has the whole model. is_tried: whether the logits of the ranks' steps are compared with the whole model's, on
    rank 0. Raises `ModelError` for a model that cannot be split, or computes something else when it is;
    `InvalidArgument` for more ranks than attention heads.
    """
    if interleave:
        context = ContextRank(ContextShard(shard.rank, shard.size, interleave), group)
        own, own_shape = borrowed, replace(shape, context=context)
    else:
        own, own_shape = _split(borrowed, shape, shard, group)
    if is_tried and shard.rank == 0:
        require_equal_logits(own, own_shape, OWN_LENGTH, (borrowed, shape))
    elif is_tried:
        run_steps(own, own_shape, OWN_LENGTH)
    return own, own_shape


def _split(borrowed: BorrowedModel, shape: KVShape, shard: Shard, group: RankGroup) -> tuple[BorrowedModel, KVShape]:
    """Return a rank's heads and features."""
    split = ModelShard(borrowed.model, Heads.of(borrowed.model, shape.num_kv_heads), shard, group)
    own = BorrowedModel(split.model)
    own_shape = replace(shape, shard=shard if split.has_own_heads else None)
    seen = learn_shape(own, shape.max_model_len)
    num_expected = len(own_shape.kv_heads)
    if replace(seen, num_kv_heads=shape.num_kv_heads) != shape or seen.num_kv_heads != num_expected:
        raise ModelError(
            f"{type(borrowed.model).__name__} cannot be split over ranks: rank {shard.rank} computes "
            f"{seen.num_kv_heads} heads of keys instead of {num_expected}"
        )
    return own, own_shape


def is_affordable(borrowed: BorrowedModel) -> bool:
    """Return whether the whole model can be compared with, in seconds."""
    return can_afford(borrowed, OWN_LENGTH)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Of an engine's cache, as its arguments say it. num_blocks: None for as many as fit on every rank."""

    block_size: int
    num_blocks: int | None
    num_cpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    logits_per_seq: int
    gpu_memory_utilization: float
    attention_backend: str

    @classmethod
    def of(
        cls,
        block_size: int,
        config: CacheConfig,
        sizes: StepSizes,
        is_sized: bool,
        utilization: float,
        attention_backend: str,
    ) -> CacheSettings:
        """Take those of rank 0. block_size: of a rank's tensors. is_sized: whether its number of blocks is final."""
        return cls(
            block_size,
            config.num_blocks if is_sized else None,
            config.cpu.num_blocks,
            config.max_num_seqs,
            sizes.max_num_batched_tokens,
            sizes.logits_per_seq,
            utilization,
            attention_backend,
        )

    def make(
        self, borrowed: BorrowedModel, shape: KVShape, group: ProcessGroup
    ) -> tuple[CacheConfig, KVCache, ModelRunner]:
        """Config, tensors and runner of a rank other than 0. All ranks find out at the same time how many blocks fit.

        Raises what `Engine` raises for them.
        """

        def runner_on(kv_cache: KVCache) -> ModelRunner:
            return ModelRunner(borrowed, kv_cache, shape, self.attention_backend, self.max_num_seqs)

        spec = shape.spec(self.block_size, borrowed.dtype)
        config = shape.cache_config(
            spec,
            self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_model_len=shape.max_model_len,
            num_cpu_blocks=self.num_cpu_blocks,
        )
        tensors = shape.tensors(spec, borrowed.dtype, borrowed.device)
        if self.num_blocks is None:
            weights = weights_bytes(borrowed.model)
            finder = MemoryFinder(spec, config, tensors, runner_on, weights, self.gpu_memory_utilization)
            sizes = StepSizes(self.max_num_batched_tokens, self.max_num_seqs, shape.max_model_len, self.logits_per_seq)
            config, _ = finder.find(meter_of(borrowed.device), sizes)
        config = replace(config, num_blocks=group.least(config.num_blocks))
        kv_cache = KVCache(config.num_blocks, self.block_size, num_cpu_blocks=self.num_cpu_blocks, **tensors)
        return config, kv_cache, runner_on(kv_cache)
