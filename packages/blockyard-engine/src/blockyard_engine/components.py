"""Builds the components of an engine: patched model, cache config, memory, manager, tensors and runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard import KVCacheManager
from blockyard.arguments import shown
from blockyard.errors import InvalidArgument
from blockyard.storage import KVCache

from .engine_options import EngineOptions, Preemption
from .memory.account import EngineMemory, warn_of_short_pool, weights_bytes
from .memory.largest_step import StepSizes
from .memory.pool_sizing import PoolSizer, meter_of
from .patching import PatchedModel
from .probe import probe_model
from .ranks.joining import CacheSettings
from .ranks.leader import Ranks
from .runner import ModelRunner, StepRunner
from .shape import KVShape

if TYPE_CHECKING:
    from blockyard.events import KVEventPublisher


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """The components that an engine makes its steps with."""

    patched: PatchedModel
    shape: KVShape
    preemption: Preemption
    memory: EngineMemory
    cache: KVCacheManager
    kv_cache: KVCache
    kv_events: KVEventPublisher | None
    runner: StepRunner


def build_components(model: Any, options: EngineOptions, ranks: Ranks) -> EngineComponents:
    """Build the components of rank 0, in step with the other ranks. Raises what `Engine` raises."""
    whole = PatchedModel(model)
    probed = probe_model(whole, options.max_model_len)
    ranks.require_servable(probed)
    patched, shape = ranks.join(whole, probed, options.block_size)
    spec = shape.spec(options.block_size, patched.dtype)
    config = options.config(shape, spec)
    options.require_valid()
    options.require_servable(shape)
    preemption = Preemption.parse(options.preemption, config.cpu.num_blocks)
    tensors = shape.tensors(spec, patched.dtype, patched.device)

    def runner_on(kv_cache: KVCache) -> ModelRunner:
        return ModelRunner(patched, kv_cache, shape, options.attention_backend, config.max_num_seqs)

    utilization = options.gpu_memory_utilization
    sizer = PoolSizer(spec, config, tensors, runner_on, weights_bytes(patched.model), utilization)
    sizes = StepSizes.of(config, options.max_num_batched_tokens, options.speculation)
    settings = (options.is_sized, utilization, options.attention_backend)
    ranks.send_settings(CacheSettings.of(options.block_size, config, sizes, *settings))
    if options.is_sized:
        memory = sizer.fixed()
    else:
        config, memory = sizer.find(meter_of(patched.device), sizes)
    config, memory = ranks.agree_on_size(config, memory, spec)
    config = options.with_tenants(config)
    if options.num_blocks is None:
        warn_of_short_pool(config)
    cache = KVCacheManager(config)
    kv_cache = KVCache(config.num_blocks, options.block_size, num_cpu_blocks=config.cpu.num_blocks, **tensors)
    publisher = publisher_of(cache, options.kv_events)
    return EngineComponents(
        patched, shape, preemption, memory, cache, kv_cache, publisher, ranks.shared_runner(runner_on(kv_cache))
    )


def require_bindable_events(kv_events: object) -> None:
    """Raise for endpoints that a publisher cannot bind, before a model is loaded.

    `publisher_of` reports all other errors in `kv_events`.
    """
    given = {"endpoint": kv_events} if isinstance(kv_events, str) else kv_events
    if isinstance(given, Mapping) and isinstance(given.get("endpoint"), str):
        from blockyard.events import require_bindable

        require_bindable(given["endpoint"], given.get("replay_endpoint"))


def publisher_of(cache: KVCacheManager, kv_events: object) -> KVEventPublisher | None:
    """Return the publisher of a cache's KV events, by an endpoint or a dict of arguments, or None.

    Raises `InvalidArgument`, `PublisherError` for an endpoint that cannot be bound, and `MissingExtra` without pyzmq.
    """
    if kv_events is None:
        return None
    from blockyard.events import KVEventPublisher

    if isinstance(kv_events, str):
        return KVEventPublisher(cache, kv_events)
    if not isinstance(kv_events, Mapping):
        raise InvalidArgument(
            f"kv_events is {shown(kv_events)}; it must be an endpoint or a dict of KVEventPublisher's arguments"
        )
    options: dict[str, Any] = dict(kv_events)
    try:
        return KVEventPublisher(cache, **options)
    except TypeError as error:
        raise InvalidArgument(f"kv_events is {shown(options)}: {error}") from error
