"""Joins a rank to the group: compares the ranks, splits the model, tests the split, and makes the rank's cache."""

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
from ..checks.trial import OWN_LENGTH, can_afford, require_equal_logits, run_steps
from ..memory.account import weights_bytes
from ..memory.largest_step import StepSizes
from ..memory.pool_sizing import PoolSizer, meter_of
from ..patching import PatchedModel
from ..probe import learn_shape
from ..runner import ModelRunner
from ..shape import KVShape
from .group import ProcessGroup, RankGroup
from .sharding import Heads, ModelShard, require_splittable

#: Config fields that depend only on how the model was loaded.
_OF_LOADING = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_SAMPLED = 64


def identity_of(patched: PatchedModel, shape: KVShape, block_size: int) -> dict[str, Any]:
    """Return the properties that must be equal on all ranks, as plain values. O(parameters).

    The weights are represented by a digest of some elements of each.
    """
    config = json.loads(patched.model.config.to_json_string(use_diff=False))
    return {
        "blockyard": __version__,
        "wire version": VERSION,
        "torch": torch.__version__.partition("+")[0],
        "model": type(patched.model).__name__,
        "dtype": str(patched.dtype).removeprefix("torch."),
        "device type": patched.device.type,
        "block_size": block_size,
        "max_model_len": shape.max_model_len,
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_size,
        "value_size": shape.value_size,
        "windows": list(shape.windows),
        "state_bytes": 0 if shape.states is None else shape.states.num_bytes,
        "config": {name: value for name, value in config.items() if name not in _OF_LOADING},
        "weights (a sample's digest)": _sample_digest(patched.model),
    }


def require_same(rank: int, other: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise `RankError` for the first property that differs, with both values. own: of rank 0. O(fields)."""
    for name in dict.fromkeys([*own, *other]):
        mine, theirs = own.get(name), other.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            require_same(rank, _named(name, theirs), _named(name, mine))
        elif mine != theirs:
            raise RankError(f"rank {rank} has {name} {theirs!r}; rank 0 has {mine!r}, and they must be equal")


def agreed_bytes(identity: dict[str, Any]) -> bytes:
    """Return the initial bytes of the steps' digests."""
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


def require_shareable(patched: PatchedModel, shape: KVShape, shard: Shard, interleave: int) -> None:
    """Raise as `join` for a model that cannot be split, before this rank waits for others. O(modules)."""
    if not interleave:
        require_splittable(patched.model, Heads.of(patched.model, shape.num_kv_heads), shard)


def join(
    patched: PatchedModel, shape: KVShape, shard: Shard, interleave: int, group: RankGroup, is_tried: bool
) -> tuple[PatchedModel, KVShape]:
    """Return this rank's share of a model, and its shape. All ranks call it at the same time.

    `interleave` is 0 for tensor parallel ranks; for context parallel ranks, which have the whole model, it is the
    number of consecutive tokens on one rank. With `is_tried`, rank 0 compares the logits of the ranks' steps with the
    whole model's.

    Raises `ModelError` for a model that cannot be split, or whose logits change when it is, and `InvalidArgument` for
    more ranks than attention heads.
    """
    if interleave:
        context = ContextRank(ContextShard(shard.rank, shard.size, interleave), group)
        own, own_shape = patched, replace(shape, context=context)
    else:
        own, own_shape = _split(patched, shape, shard, group)
    if is_tried and shard.rank == 0:
        require_equal_logits(own, own_shape, OWN_LENGTH, (patched, shape))
    elif is_tried:
        run_steps(own, own_shape, OWN_LENGTH)
    return own, own_shape


def _split(patched: PatchedModel, shape: KVShape, shard: Shard, group: RankGroup) -> tuple[PatchedModel, KVShape]:
    split = ModelShard(patched.model, Heads.of(patched.model, shape.num_kv_heads), shard, group)
    own = PatchedModel(split.model)
    own_shape = replace(shape, shard=shard if split.has_own_heads else None)
    seen = learn_shape(own, shape.max_model_len)
    num_expected = len(own_shape.kv_heads)
    if replace(seen, num_kv_heads=shape.num_kv_heads) != shape or seen.num_kv_heads != num_expected:
        raise ModelError(
            f"{type(patched.model).__name__} cannot be split over ranks: rank {shard.rank} computes "
            f"{seen.num_kv_heads} heads of keys instead of {num_expected}"
        )
    return own, own_shape


def is_affordable(patched: PatchedModel) -> bool:
    """Return whether a trial against the whole model takes only seconds."""
    return can_afford(patched, OWN_LENGTH)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Sizes of an engine's cache, as rank 0 sends them; `num_blocks` is None for as many as fit on every rank."""

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
        """Return the settings of rank 0; `is_sized` tells whether the config's number of blocks is final."""
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
        self, patched: PatchedModel, shape: KVShape, group: ProcessGroup
    ) -> tuple[CacheConfig, KVCache, ModelRunner]:
        """Return config, tensors and runner of a rank other than 0; all ranks agree on the number of blocks.

        Raises as `Engine`.
        """

        def runner_on(kv_cache: KVCache) -> ModelRunner:
            return ModelRunner(patched, kv_cache, shape, self.attention_backend, self.max_num_seqs)

        spec = shape.spec(self.block_size, patched.dtype)
        config = shape.cache_config(
            spec,
            self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_model_len=shape.max_model_len,
            num_cpu_blocks=self.num_cpu_blocks,
        )
        tensors = shape.tensors(spec, patched.dtype, patched.device)
        if self.num_blocks is None:
            weights = weights_bytes(patched.model)
            sizer = PoolSizer(spec, config, tensors, runner_on, weights, self.gpu_memory_utilization)
            sizes = StepSizes(self.max_num_batched_tokens, self.max_num_seqs, shape.max_model_len, self.logits_per_seq)
            config, _ = sizer.find(meter_of(patched.device), sizes)
        config = replace(config, num_blocks=group.least(config.num_blocks))
        kv_cache = KVCache(config.num_blocks, self.block_size, num_cpu_blocks=self.num_cpu_blocks, **tensors)
        return config, kv_cache, runner_on(kv_cache)
