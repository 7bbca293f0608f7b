"""vLLM's two schedulers on Blockyard: `--scheduler-cls blockyard.integrations.vllm.AsyncScheduler`.

vLLM has no factory for its block manager. So while a scheduler is being made, and only then, the two names by which
vLLM's own code makes one lead here; after that nothing of vLLM is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager as StockManager
from vllm.v1.core.sched import scheduler as stock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler

from . import pool
from .contract import require_known_vllm
from .manager import KVCacheManager, why_not
from .misses import MissCauses
from .options import Options, options_of

# Below the one logger that vLLM gives handlers to.
logger = init_logger(f"vllm.{__name__}")
_MAKING = threading.RLock()


def make_manager(options: Options, has_connector: bool = False, **given: Any) -> Any:
    """The block manager of one scheduler, by the level that the options and the model allow.

    has_connector: KV connectors may hold blocks by id, which level "tokens" has no call for.
    Raises ValueError where the level that was asked for, or an option, does not serve the model.
    """
    reason = why_not(**given) or ("a KV connector may hold blocks by id" if has_connector else "")
    if options.level == "tokens" and reason:
        raise ValueError(f"blockyard: level 'tokens' does not serve this model: {reason}")
    if options.level == "names" or reason:
        if options.only_for_tokens:
            raise ValueError(f"blockyard: {options.only_for_tokens[0]} is not there on level 'names' ({reason})")
        logger.info("blockyard: hits are proved by vLLM's hashes (level 'names'): %s", reason or "asked for")
        return named_manager(options, **given)
    logger.info("blockyard: hits are proved by tokens (level 'tokens'), eviction %s", options.eviction_policy)
    return KVCacheManager(**given, options=options)


class NamedManager(StockManager):
    """vLLM's own manager, which says why prompts were not found."""

    def get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's answer; why it found no more is noted."""
        found = super().get_computed_blocks(request, *args, **kwargs)
        self._misses.ask(request, found[1])
        return found

    def get_computed_blocks_for_connector(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        found = super().get_computed_blocks_for_connector(request, *args, **kwargs)
        self._misses.ask(request, found[1])
        return found

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """A request is admitted: what was noted counts."""
        super().record_prefix_cache_stats(request, num_hits)
        self._misses.admit(request)

    @property
    def _misses(self) -> MissCauses:
        found: MissCauses = self.block_pool.misses  # type: ignore[attr-defined]
        return found


def named_manager(options: Options, **given: Any) -> Any:
    """vLLM's own manager on our pool."""
    misses = None
    if options.miss_causes:
        size = given["hash_block_size"]
        others = {group.kv_cache_spec.block_size for group in given["kv_cache_config"].kv_cache_groups} - {size}
        if others:
            raise ValueError(
                f"blockyard: miss_causes is not there for blocks of {min(others)} tokens where hashes have {size}"
            )
        misses = MissCauses(options.miss_causes, size)
    attributes = {"eviction_policy": options.eviction_policy, "misses": misses}
    made = type("BlockPool", (pool.BlockPool,), attributes)
    with _leading_here(kv_cache_coordinator, "BlockPool", made):
        return (NamedManager if misses else StockManager)(**given)


@contextmanager
def _leading_here(module: Any, name: str, made: Callable[..., Any]) -> Iterator[None]:
    """Let a name of one of vLLM's modules lead to ours, in one thread at a time."""
    with _MAKING:
        before = getattr(module, name)
        setattr(module, name, made)
        try:
            yield
        finally:
            setattr(module, name, before)


@contextmanager
def _managers_for(vllm_config: Any) -> Iterator[None]:
    require_known_vllm()
    options = options_of(vllm_config.additional_config)
    has_connector = vllm_config.kv_transfer_config is not None
    with _leading_here(stock, "KVCacheManager", partial(make_manager, options, has_connector)):
        yield


class Scheduler(stock.Scheduler):
    """vLLM's scheduler; its block manager is Blockyard's."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with _managers_for(vllm_config):
            super().__init__(vllm_config, *args, **kwargs)


class AsyncScheduler(StockAsyncScheduler):
    """vLLM's asynchronous scheduler; its block manager is Blockyard's."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with _managers_for(vllm_config):
            super().__init__(vllm_config, *args, **kwargs)
