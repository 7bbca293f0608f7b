"""vLLM's two schedulers on Blockyard: `--scheduler-cls blockyard_vllm.AsyncScheduler`.

vLLM has no factory for its block manager. So while a scheduler is being constructed, and only then, the two names by
which vLLM's code constructs one are patched. Nothing in vLLM stays changed.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager as StockManager
from vllm.v1.core.sched import scheduler as stock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface

from blockyard import BlockPool
from blockyard.events import KVEventPublisher, PublisherError

from .adapter_options import Options, options_of, require_known_vllm
from .admission_queue import AdmissionQueue
from .manager import KVCacheManager, refusal_reason
from .named import NamedManager, named_manager, patch_name
from .state_checkpoints import first_stop

# A child of vLLM's logger, so that its handlers apply.
logger = init_logger(f"vllm.{__name__}")


def make_manager(options: Options, has_connector: bool = False, **given: Any) -> Any:
    """Return the block manager for one scheduler, on the level that options and model allow.

    Args:
        options: the adapter's options.
        has_connector: whether a KV connector is configured; it may hold blocks by id, which level "tokens" cannot do.
        given: arguments of vLLM's `KVCacheManager`.

    Raises:
        ValueError: if the requested level or an option does not support the model.
    """
    reason = refusal_reason(**given) or ("a KV connector may hold blocks by id" if has_connector else "")
    if options.level == "tokens" and reason:
        raise ValueError(f"blockyard: level is 'tokens', which does not support this model: {reason}")
    if options.state_checkpoints and options.level == "tokens":
        raise ValueError(
            "blockyard: state_checkpoints needs level 'names'; level 'tokens' only supports full attention"
        )
    if options.state_checkpoints and has_connector:
        raise ValueError("blockyard: state_checkpoints does not work with a KV connector (--kv-transfer-config)")
    if options.level == "names" or reason or options.state_checkpoints:
        if options.only_for_tokens:
            name = options.only_for_tokens[0]
            instead = "; use vLLM's --kv-events-config" if name == "events" else ""
            raise ValueError(
                f"blockyard: {name} needs level 'tokens', but this is 'names' ({reason or 'as requested'}){instead}"
            )
        logger.info("blockyard: hits are proved by vLLM's hashes (level 'names'): %s", reason or "as requested")
        return named_manager(options, **given)
    if options.events and not given.get("enable_caching", True):
        raise ValueError("blockyard: events is set, but prefix caching is off: there are no events to publish")
    logger.info("blockyard: hits are proved by tokens (level 'tokens'), eviction %s", options.eviction_policy)
    return KVCacheManager(**given, options=options)


class PoolEvents:
    """Publishes the events of one scheduler's pool.

    If publishing fails, it is logged and stops; serving continues.

    Args:
        pool: the pool.
        endpoint: the option `events`.
        rank: index among data-parallel engines.
    """

    def __init__(self, pool: BlockPool, endpoint: str, rank: int) -> None:
        self.publisher = KVEventPublisher(pool, address_of(endpoint, rank), data_parallel_rank=rank)
        logger.info(
            "blockyard: KV events of the pool on %s, replays on %s",
            self.publisher.endpoint,
            self.publisher.replay_endpoint,
        )

    def publish(self) -> None:
        """Send the events since the last call."""
        try:
            self.publisher.publish()
        except PublisherError:
            logger.exception("blockyard: publishing the pool's KV events has stopped")

    def close(self) -> None:
        """Send all queued events. A second call does nothing."""
        self.publisher.close()


def address_of(endpoint: str, rank: int) -> str:
    """Return where a data-parallel rank publishes.

    Each rank takes two TCP ports (the second for replays); a path gets a suffix.
    """
    base, colon, port = endpoint.rpartition(":")
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    return f"{base}{colon}{int(port) + 2 * rank}" if port.isdecimal() and int(port) else endpoint


class OnBlockyard:
    """Mixin that gives a vLLM scheduler, or one derived from it, Blockyard's block manager.

    Name it before the scheduler: `class Ours(OnBlockyard, TheirScheduler)`. While the scheduler is constructed, the
    name `KVCacheManager` is patched in the module of each of its classes that has vLLM's class under this name.

    Raises:
        TypeError: if the scheduler is named before the mixin.
        ValueError: if the scheduler constructs another block manager.
    """

    kv_cache_manager: Any
    #: None unless the option `events` is set.
    pool_events: PoolEvents | None = None
    #: None unless the option `admission` is set.
    admission: AdmissionQueue | None = None

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for base in cls.__mro__[: cls.__mro__.index(OnBlockyard)]:
            if issubclass(base, SchedulerInterface) and not issubclass(base, OnBlockyard):
                raise TypeError(f"{cls.__name__} names {base.__name__} before OnBlockyard; name OnBlockyard first")

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        require_known_vllm()
        options = options_of(vllm_config.additional_config)
        make = partial(make_manager, options, vllm_config.kv_transfer_config is not None)
        modules = {sys.modules[each.__module__] for each in type(self).__mro__}
        with ExitStack() as stack:
            for module in modules:
                if getattr(module, "KVCacheManager", None) is StockManager:
                    stack.enter_context(patch_name(module, "KVCacheManager", make))
            super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        made = type(self.kv_cache_manager)
        if not issubclass(made, (KVCacheManager, NamedManager)):
            raise ValueError(
                f"blockyard: {type(self).__name__} uses {made.__module__}.{made.__name__}; only schedulers "
                "that create vLLM's KVCacheManager are supported; import it under this name in the scheduler's module"
            )
        if options.admission != "arrival":
            self._order_admission(options, vllm_config.scheduler_config.policy)
        if options.state_checkpoints:
            self.kv_cache_manager.planner.queue = self.waiting  # type: ignore[attr-defined]
        if options.events:
            rank = vllm_config.parallel_config.data_parallel_index
            self.pool_events = PoolEvents(self.kv_cache_manager.pool, options.events, rank)

    def _order_admission(self, options: Options, policy: str) -> None:
        manager = self.kv_cache_manager
        if policy != "fcfs" or not manager.enable_caching:
            raise ValueError(
                f"blockyard: admission is {options.admission!r}, the scheduling policy {policy!r} and prefix caching "
                f"{'on' if manager.enable_caching else 'off'}; it needs policy 'fcfs' and prefix caching"
            )
        self.admission = manager.admission = AdmissionQueue(manager, options.admission, options.admission_lane)
        self.waiting = self.admission

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the steps' time if the order of admission needs it."""
        if self.admission is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.admission.begin_step()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.admission.note_planned(output)
        return output

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Return the tokens of a prompt's next chunk: vLLM's number, or fewer to end at the first checkpoint."""
        count: int = super()._mamba_block_aligned_split(  # type: ignore[misc]
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return first_stop(request, start, start + count) - start

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Publish the step's events after vLLM's own update."""
        if self.admission is not None:
            self.admission.end_step(scheduler_output)
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Publish the reset at once, without waiting for a step."""
        was_reset: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
        return was_reset

    def shutdown(self) -> None:
        """Publish the last events."""
        super().shutdown()  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
            self.pool_events.close()


class Scheduler(OnBlockyard, stock.Scheduler):
    """vLLM's scheduler with Blockyard's block manager."""


class AsyncScheduler(OnBlockyard, StockAsyncScheduler):
    """vLLM's asynchronous scheduler with Blockyard's block manager."""
