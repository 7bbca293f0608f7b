"""What the adapter was written for: the arguments of each method of vLLM that it replaces or calls.

A vLLM whose methods differ is refused with their names (`integrations.signatures`).
"""

from __future__ import annotations

from ..signatures import moved_methods

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
