"""vLLM's two schedulers on Blockyard: `--scheduler-cls blockyard_vllm.AsyncScheduler`.

vLLM has no factory for its block manager. So while a scheduler is being made, and only then, the two names by which
vLLM's own code makes one lead here; after that nothing of vLLM is changed.
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

from .manager import KVCacheManager, why_not
from .named import NamedManager, leading_here, named_manager
from .options import Options, options_of, require_known_vllm
from .states import first_stop

# A child of vLLM's logger, so that its handlers apply.
logger = init_logger(f"vllm.{__name__}")


def make_manager(options: Options, has_connector: bool = False, **given: Any) -> Any:
    """Return the block manager of one scheduler, by the level that the options and the model allow.

    has_connector: KV connectors may hold blocks by id, which level "tokens" has no call for.
    Raises ValueError where the level that was asked for, or an option, does not serve the model.
    """
    reason = why_not(**given) or ("a KV connector may hold blocks by id" if has_connector else "")
    if options.level == "tokens" and reason:
        raise ValueError(f"blockyard: level 'tokens' does not serve this model: {reason}")
    if options.state_checkpoints and options.level == "tokens":
        raise ValueError(
            "blockyard: state_checkpoints is not there on level 'tokens', which only serves full attention"
        )
    if options.state_checkpoints and has_connector:
        raise ValueError("blockyard: state_checkpoints is not there with a KV connector (--kv-transfer-config)")
    if options.level == "names" or reason or options.state_checkpoints:
        if options.only_for_tokens:
            name = options.only_for_tokens[0]
            instead = "; vLLM's --kv-events-config is" if name == "events" else ""
            raise ValueError(
                f"blockyard: {name} is not there on level 'names' ({reason or 'which was asked for'}){instead}"
            )
        logger.info("blockyard: hits are proved by vLLM's hashes (level 'names'): %s", reason or "asked for")
        return named_manager(options, **given)
    if options.events and not given.get("enable_caching", True):
        raise ValueError("blockyard: events is set, but prefix caching is off: there is nothing to tell")
    logger.info("blockyard: hits are proved by tokens (level 'tokens'), eviction %s", options.eviction_policy)
    return KVCacheManager(**given, options=options)


class PoolEvents:
    """Publishes what the pool of one scheduler holds.

    endpoint: of the first data-parallel rank; the others have addresses of their own (`address_of`).
    Raises `PublisherError` and `InvalidArgument` for an address that is bad or in use.
    """

    def __init__(self, pool: BlockPool, endpoint: str, rank: int) -> None:
        self.publisher = KVEventPublisher(pool, address_of(endpoint, rank), data_parallel_rank=rank)
        logger.info(
            "blockyard: KV events of the pool on %s, replays on %s",
            self.publisher.endpoint,
            self.publisher.replay_endpoint,
        )

    def publish(self) -> None:
        """Tell what happened. A publisher that has failed is said so once, and the engine serves on."""
        try:
            self.publisher.publish()
        except PublisherError:
            logger.exception("blockyard: KV events of the pool are published no more")

    def close(self) -> None:
        """Send what is left. A second call does nothing."""
        self.publisher.close()


def address_of(endpoint: str, rank: int) -> str:
    """Where a data-parallel rank publishes: two TCP ports each, the second for replays; of a path a name of its own."""
    base, colon, port = endpoint.rpartition(":")
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    return f"{base}{colon}{int(port) + 2 * rank}" if port.isdecimal() and int(port) else endpoint


class OnBlockyard:
    """A mixin that puts Blockyard's block manager into a scheduler of vLLM's, or one derived from it.

    Name it before the scheduler: `class Ours(OnBlockyard, TheirScheduler)`. While the scheduler is made, the name
    `KVCacheManager` leads to ours in the module of each of its classes that has vLLM's under this name. Raises
    TypeError if the scheduler stands before the mixin, ValueError if it makes another block manager.
    """

    kv_cache_manager: Any
    #: None where the option `events` is not given.
    pool_events: PoolEvents | None = None

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
        with ExitStack() as led:
            for module in modules:
                if getattr(module, "KVCacheManager", None) is StockManager:
                    led.enter_context(leading_here(module, "KVCacheManager", make))
            super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        made = type(self.kv_cache_manager)
        if not issubclass(made, (KVCacheManager, NamedManager)):
            raise ValueError(
                f"blockyard: {type(self).__name__} made a {made.__module__}.{made.__name__}; its block manager must be "
                "vLLM's KVCacheManager, imported by this name into the module of one of its classes"
            )
        if options.state_checkpoints:
            self.kv_cache_manager.places.queue = self.waiting  # type: ignore[attr-defined]
        if options.events:
            rank = vllm_config.parallel_config.data_parallel_index
            self.pool_events = PoolEvents(self.kv_cache_manager.pool, options.events, rank)

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Return how many tokens the next chunk of a hybrid model's prompt has: vLLM's number, or to the first stop."""
        count: int = super()._mamba_block_aligned_split(  # type: ignore[misc]
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        return first_stop(request, start, start + count) - start

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Does as vLLM's; the step's events go out with it, as vLLM's own do."""
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Does as vLLM's; no step need follow for it to be told."""
        was_reset: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
        return was_reset

    def shutdown(self) -> None:
        """Does as vLLM's; the last events are sent."""
        super().shutdown()  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
            self.pool_events.close()


class Scheduler(OnBlockyard, stock.Scheduler):
    """vLLM's scheduler; its block manager is Blockyard's."""


class AsyncScheduler(OnBlockyard, StockAsyncScheduler):
    """vLLM's asynchronous scheduler; its block manager is Blockyard's."""
