"""vLLM's two schedulers on Blockyard: `--scheduler-cls blockyard.integrations.vllm.AsyncScheduler`.

vLLM has no factory for its block manager. So while a scheduler is being made, and only then, the two names by which
vLLM's own code makes one lead here; after that nothing of vLLM is changed.

The table says what it was written for: the arguments of each method of vLLM that the adapter replaces or calls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched import scheduler as stock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler

from ... import BlockPool
from ...events import KVEventPublisher, PublisherError
from ..signatures import moved_methods
from .manager import KVCacheManager, why_not
from .named import leading_here, named_manager
from .options import Options, options_of

VLLM_VERSIONS = ("0.32", "0.33")
POOL = "vllm.v1.core.block_pool:BlockPool"
MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
BLOCKS = "vllm.v1.core.kv_cache_manager:KVCacheBlocks"
#: Of one kind of layers: level "names" says in advance when these would change nothing.
GROUP = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"

_COMMON = {
    f"{POOL}.get_cached_block": "self, block_hash, kv_cache_group_ids",
    f"{POOL}.get_new_blocks": "self, num_blocks",
    f"{POOL}._notify_reuse": "self, blocks",
    f"{POOL}._maybe_evict_cached_block": "self, block",
    f"{POOL}._remove_cached_block_hashes": "self, block",
    f"{POOL}._insert_block_hash": "self, block_hash_with_group_id, block, num_tokens",
    f"{POOL}.touch": "self, blocks",
    f"{POOL}.free_blocks": "self, ordered_blocks",
    f"{POOL}.unpin_blocks": "self, blocks, on_reuse",
    f"{POOL}.evict_blocks": "self, block_ids",
    f"{POOL}.reset_prefix_cache": "self",
    f"{POOL}.get_num_free_blocks": "self",
    f"{POOL}.get_usage": "self",
    f"{POOL}.take_events": "self",
    f"{MANAGER}.allocate_slots": "self, request, num_new_tokens, num_new_computed_tokens=, new_computed_blocks=, "
    "num_lookahead_tokens=, num_external_computed_tokens=, delay_cache_blocks=, num_encoder_tokens=, "
    "full_sequence_must_fit=, reserved_blocks=, has_scheduled_reqs=, skip_zeroing_group_ids=",
    f"{MANAGER}.free": "self, request",
    f"{MANAGER}.remove_skipped_blocks": "self, request_id, processed_computed_tokens, num_prompt_tokens=",
    f"{MANAGER}.pop_blocks_for_free": "self, request",
    f"{MANAGER}.evict_blocks": "self, block_ids",
    f"{MANAGER}.reset_prefix_cache": "self",
    f"{MANAGER}.take_events": "self",
    f"{MANAGER}.get_blocks": "self, request_id",
    f"{MANAGER}.get_block_ids": "self, request_id",
    f"{MANAGER}.get_block_ids_for_computed_tokens": "self, request_id, num_computed_tokens",
    f"{MANAGER}.estimate_cached_tokens": "self, request",
    f"{MANAGER}.cache_blocks": "self, request, num_computed_tokens",
    f"{MANAGER}.create_kv_cache_blocks": "self, blocks",
    f"{MANAGER}.truncate_computed_blocks": "self, blocks, num_computed_tokens",
    f"{MANAGER}.take_new_block_ids": "self",
    f"{MANAGER}.record_blocks_for_zeroing": "self, request_id, start_token",
    f"{MANAGER}.take_kv_cache_block_copies": "self",
    f"{MANAGER}.take_boundary_state_offloads": "self",
    f"{MANAGER}.finalize_partial_tail_offloads": "self, request",
    f"{MANAGER}.new_step_starts": "self",
    f"{MANAGER}.record_prefix_cache_stats": "self, request, num_hits",
    f"{MANAGER}.make_prefix_cache_stats": "self",
    f"{BLOCKS}.get_block_ids": "self, allow_none=, group_ids=",
    f"{BLOCKS}.get_unhashed_block_ids": "self",
    f"{BLOCKS}.get_unhashed_block_ids_all_groups": "self",
    f"{BLOCKS}.new_empty": "self",
    f"{GROUP}.get_num_blocks_to_allocate": "self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, "
    "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap=, prefill_end=",
    f"{GROUP}.allocate_new_blocks": "self, request_id, num_tokens, num_tokens_main_model",
    f"{GROUP}.cache_blocks": "self, request, num_tokens, retention_interval=, replay_boundaries",
    f"{GROUP}.remove_skipped_blocks": "self, request_id, processed_computed_tokens, num_prompt_tokens=",
}
_MANAGER_0_32 = (
    "self, kv_cache_config, max_model_len, scheduler_block_size, hash_block_size, max_in_flight_tokens=, "
    "enable_caching=, use_eagle=, num_prefill_lookahead=, log_stats=, enable_kv_cache_events=, dcp_world_size=, "
    "pcp_world_size=, metrics_collector=, watermark=, enable_mamba_shared_prefix_checkpoint="
)
_POOL_0_32 = (
    "self, num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=, metrics_collector=, medium="
)

CONTRACTS: dict[str, dict[str, str]] = {
    "0.32": _COMMON
    | {
        f"{POOL}.__init__": _POOL_0_32,
        f"{MANAGER}.__init__": _MANAGER_0_32,
        f"{MANAGER}.get_computed_blocks": "self, request",
        f"{MANAGER}.get_computed_blocks_for_connector": "self, request",
    },
    "0.33": _COMMON
    | {
        f"{POOL}.__init__": _POOL_0_32.replace("medium=", "num_hash_lookahead_tokens=, medium="),
        f"{MANAGER}.__init__": _MANAGER_0_32.replace("use_eagle=, ", "use_eagle=, num_hash_lookahead_tokens=, "),
        f"{MANAGER}.get_computed_blocks": "self, request, max_cache_hit_length=",
        f"{MANAGER}.get_computed_blocks_for_connector": "self, request, max_cache_hit_length=",
    },
}


def require_known_vllm() -> None:
    """Raise RuntimeError where no contract fits the installed vLLM; the text names the methods that moved."""
    import vllm

    version = ".".join(vllm.__version__.split(".")[:2])
    closest = CONTRACTS.get(version, CONTRACTS[VLLM_VERSIONS[-1]])
    moved = moved_methods(closest)
    if moved:
        raise RuntimeError(
            f"blockyard.integrations.vllm was written for vLLM {', '.join(VLLM_VERSIONS)}; in vLLM {vllm.__version__} "
            f"these differ: {'; '.join(moved)}"
        )


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
    if options.level == "names" or reason:
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
    """What both of vLLM's schedulers get: the block manager, and where they are asked for the pool's own events."""

    kv_cache_manager: Any
    #: None where the option `events` is not given.
    pool_events: PoolEvents | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        require_known_vllm()
        options = options_of(vllm_config.additional_config)
        has_connector = vllm_config.kv_transfer_config is not None
        with leading_here(stock, "KVCacheManager", partial(make_manager, options, has_connector)):
            super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        if options.events:
            rank = vllm_config.parallel_config.data_parallel_index
            self.pool_events = PoolEvents(self.kv_cache_manager.pool, options.events, rank)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; the step's events go out with it, as vLLM's own do."""
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM's; no step need follow for it to be told."""
        was_reset: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
        return was_reset

    def shutdown(self) -> None:
        """vLLM's; the last events are sent."""
        super().shutdown()  # type: ignore[misc]
        if self.pool_events is not None:
            self.pool_events.publish()
            self.pool_events.close()


class Scheduler(OnBlockyard, stock.Scheduler):
    """vLLM's scheduler; its block manager is Blockyard's."""


class AsyncScheduler(OnBlockyard, StockAsyncScheduler):
    """vLLM's asynchronous scheduler; its block manager is Blockyard's."""
