"""vLLM's two schedulers on Blockyard: `--scheduler-cls blockyard.integrations.vllm.AsyncScheduler`.

vLLM has no factory for its block manager. So while a scheduler is being made, and only then, the two names by which
vLLM's own code makes one lead here; after that nothing of vLLM is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched import scheduler as stock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler

from .contract import require_known_vllm
from .manager import KVCacheManager, why_not
from .named import leading_here, named_manager
from .options import Options, options_of

# Below the one logger that vLLM gives handlers to.
logger = init_logger(f"vllm.{__name__}")


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


@contextmanager
def _managers_for(vllm_config: Any) -> Iterator[None]:
    require_known_vllm()
    options = options_of(vllm_config.additional_config)
    has_connector = vllm_config.kv_transfer_config is not None
    with leading_here(stock, "KVCacheManager", partial(make_manager, options, has_connector)):
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
