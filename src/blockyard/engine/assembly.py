"""The parts of an engine, each made from those before it: the model's share, the cache's config, its size, tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..arguments import require_int
from ..config import CacheConfig
from ..core.manager import KVCacheManager
from ..errors import InvalidArgument
from ..sizing import KVCacheSpec
from ..sizing.memory import require_utilization
from ..storage import KVCache
from .borrowing import BorrowedModel
from .cache_options import checked_options
from .decoding.speculation import PromptLookup, require_speculation
from .kv_events import publisher_of
from .memory.account import EngineMemory, swap_blocks, weights_bytes
from .memory.finding import MemoryFinder
from .memory.largest_step import StepSizes
from .memory.meter import meter_of
from .probe import probe_model
from .ranks.leader import OneRank, Ranks
from .ranks.settings import CacheSettings
from .runner import ModelRunner, StepRunner
from .scheduling.preemption import Preemption
from .shape import ModelShape

if TYPE_CHECKING:
    from ..events import KVEventPublisher

#: Blocks of a config whose number is not found yet: the least that there can be.
_FEWEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is asked to be; `Engine` says what each means."""

    num_blocks: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    num_cpu_blocks: int
    swap_space_bytes: int
    preemption: str
    speculation: PromptLookup | None
    attention_backend: str
    cache_options: Mapping[str, Any] | None
    kv_events: str | Mapping[str, Any] | None

    def require_valid(self) -> None:
        """Raise `InvalidArgument` for what the config, which is checked first, does not say."""
        require_speculation(self.speculation)
        require_utilization(self.gpu_memory_utilization)
        if require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**31 - 1) < self.max_num_seqs:
            raise InvalidArgument(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs, "
                f"{self.max_num_seqs}, so that every sequence can decode in every step"
            )

    def config(self, spec: KVCacheSpec, max_model_len: int) -> CacheConfig:
        """The cache's, as far as it is known before its size is."""
        return spec.cache_config(
            _FEWEST if self.num_blocks is None else self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            num_cpu_blocks=swap_blocks(self.swap_space_bytes, self.num_cpu_blocks, spec),
            enable_prefix_caching=self.enable_prefix_caching,
            enable_kv_cache_events=self.kv_events is not None,
            **checked_options(self.cache_options),
        )

    def settings(self, config: CacheConfig, sizes: StepSizes) -> CacheSettings:
        """What the other ranks are told."""
        is_sized, utilization = self.num_blocks is not None, self.gpu_memory_utilization
        return CacheSettings.of(self.block_size, config, sizes, is_sized, utilization, self.attention_backend)


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


def assemble(model: Any, options: EngineOptions, ranks: Ranks | OneRank) -> EngineParts:
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
    ranks.settle(options.settings(config, sizes))
    if options.num_blocks is None:
        config, memory = finder.find(meter_of(borrowed.device), sizes)
    else:
        memory = finder.given()
    config, memory = ranks.agree(config, memory, spec)
    cache = KVCacheManager(config)
    kv_cache = KVCache(config.num_blocks, options.block_size, num_cpu_blocks=config.num_cpu_blocks, **tensors)
    publisher = publisher_of(cache, options.kv_events)
    return EngineParts(borrowed, shape, preemption, memory, cache, kv_cache, publisher, ranks.lead(runner_on(kv_cache)))
