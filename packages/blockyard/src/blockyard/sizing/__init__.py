"""The capacity model: bytes per token of a model, and how many blocks and sequences fit.

    from blockyard.sizing import KVCacheSpec, num_gpu_blocks

It counts blocks with the allocator's `LayerGroup` and needs only the standard library. `docs/sizing.md` has examples
and the assumptions.
"""

from .activations import EncoderShape, StepMemory, num_cuda_graphs, step_memory
from .advice import BlockSizeAdvice, CacheBudgetAdvice, advise_block_size, advise_cache_budget
from .encoders import encoder_shape
from .gpus import Gpu, gpu_names, known_gpu
from .known_models import KnownModel, known_model, model_config, model_names
from .layers import AttentionLayer, StateLayer, StatePart, dtype_bytes
from .memory_profile import MemoryProfile, num_cpu_blocks, num_gpu_blocks, profile, require_utilization
from .shape import ModelShape
from .shards import MAX_RANKS, Shard
from .spec import MAX_BYTES, KVCacheSpec, PageGroup
from .weights import ModelWeights, count_parameters, model_weights, num_draft_layers

__all__ = [
    "MAX_BYTES",
    "MAX_RANKS",
    "AttentionLayer",
    "BlockSizeAdvice",
    "CacheBudgetAdvice",
    "EncoderShape",
    "Gpu",
    "KVCacheSpec",
    "KnownModel",
    "MemoryProfile",
    "ModelShape",
    "ModelWeights",
    "PageGroup",
    "Shard",
    "StateLayer",
    "StatePart",
    "StepMemory",
    "advise_block_size",
    "advise_cache_budget",
    "count_parameters",
    "dtype_bytes",
    "encoder_shape",
    "gpu_names",
    "known_gpu",
    "known_model",
    "model_config",
    "model_names",
    "model_weights",
    "num_cpu_blocks",
    "num_cuda_graphs",
    "num_draft_layers",
    "num_gpu_blocks",
    "profile",
    "require_utilization",
    "step_memory",
]
