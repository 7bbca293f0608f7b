"""The parts of an engine, each made from those before it: the model's share, the cache's config, its size, tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.manager import KVCacheManager
from ..storage import KVCache
from .borrowing import BorrowedModel
from .kv_events import publisher_of
from .memory.account import EngineMemory, warn_of_short_pool, weights_bytes
from .memory.finding import MemoryFinder
from .memory.largest_step import StepSizes
from .memory.meter import meter_of
from .options import EngineOptions, Preemption
from .probe import probe_model
from .ranks.joining import CacheSettings
from .ranks.leader import Ranks
from .runner import ModelRunner, StepRunner
from .shape import ModelShape

if TYPE_CHECKING:
    from ..events import KVEventPublisher


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine steps with."""

    borrowed: BorrowedModel
    shape: ModelShape
    preemption: Preemption
    memory: EngineMemory
    cache: KVCacheManager
    kv_cache: KVCache
    kv_events: KVEventPublisher | None
    runner: StepRunner


def assemble(model: Any, options: EngineOptions, ranks: Ranks) -> EngineParts:
    """Make the parts of rank 0, in step with the other ranks. Raises what `Engine` raises."""
    whole = BorrowedModel(model)
    borrowed, shape = ranks.join(whole, probe_model(whole, options.max_model_len), options.block_size)
    spec = shape.spec(options.block_size, borrowed.dtype)
    config = options.config(spec, shape.max_model_len)
    options.require_valid()
    preemption = Preemption.parse(options.preemption, config.num_cpu_blocks)
    tensors = shape.tensors(spec, borrowed.dtype, borrowed.device)

    def runner_on(kv_cache: KVCache) -> ModelRunner:
        return ModelRunner(borrowed, kv_cache, shape, options.attention_backend)

    utilization = options.gpu_memory_utilization
    finder = MemoryFinder(spec, config, tensors, runner_on, weights_bytes(borrowed.model), utilization)
    sizes = StepSizes.of(config, options.max_num_batched_tokens, options.speculation)
    settings = (options.is_sized, utilization, options.attention_backend)
    ranks.settle(CacheSettings.of(options.block_size, config, sizes, *settings))
    if options.is_sized:
        memory = finder.given()
    else:
        config, memory = finder.find(meter_of(borrowed.device), sizes)
    config, memory = ranks.agree(config, memory, spec)
    if options.num_blocks is None:
        warn_of_short_pool(config)
    cache = KVCacheManager(config)
    kv_cache = KVCache(config.num_blocks, options.block_size, num_cpu_blocks=config.num_cpu_blocks, **tensors)
    publisher = publisher_of(cache, options.kv_events)
    return EngineParts(borrowed, shape, preemption, memory, cache, kv_cache, publisher, ranks.lead(runner_on(kv_cache)))
