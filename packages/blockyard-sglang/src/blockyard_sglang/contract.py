"""The supported version of SGLang, and checks that refuse unsupported servers before they start.

The contract lists the arguments of each SGLang method that the adapter overrides or calls (`blockyard.signatures`).
"""

from __future__ import annotations

from typing import Any

from blockyard import InvalidArgument
from blockyard.engine_versions import SGLANG
from blockyard.policies import POLICIES
from blockyard.signatures import listed, moved_methods, require_version

BASE = "sglang.srt.mem_cache.base_prefix_cache"
CACHE = f"{BASE}:BasePrefixCache"
ALLOCATOR = "sglang.srt.mem_cache.allocator:BaseTokenToKVPoolAllocator"

CONTRACT = {
    f"{CACHE}.init_metrics_collector": "self",
    f"{CACHE}.update_eviction_metrics": "self, num_evicted, start_time",
    f"{CACHE}.reset": "self",
    f"{CACHE}.match_prefix": "self, params",
    f"{CACHE}.touch_prefix": "self, key",
    f"{CACHE}.dfs_weight_order": "self, node_handles",
    f"{CACHE}.root_node_handle": "self, extra_key=",
    f"{CACHE}.checkpoint": "self, req, up_to, kwargs",
    f"{CACHE}.free_kv_row": "self, kv, ranges",
    f"{CACHE}.evict": "self, params",
    f"{CACHE}.evict_for_alloc": "self, params, allocation_reclaim_satisfied=",
    f"{CACHE}.inc_lock_ref": "self, node",
    f"{CACHE}.dec_lock_ref": "self, node, params=",
    f"{CACHE}.lock": "self, node",
    f"{CACHE}.unlock": "self, lock",
    f"{CACHE}.path_device_indices": "self, node",
    f"{CACHE}.prefix_device_indices": "self, req",
    f"{CACHE}.evictable_size": "self",
    f"{CACHE}.protected_size": "self",
    f"{CACHE}.total_size": "self",
    f"{CACHE}.pretty_print": "self",
    f"{CACHE}.supports_prefix_sharing": "self",
    f"{BASE}:MatchPrefixParams": "key, cow_mamba=, req=",
    f"{BASE}:InsertParams": (
        "key=, value=, mamba_value=, mamba_keep_idx=, c128_value=, prev_prefix_len=, swa_branching_seqlen=, "
        "inserted_len=, priority=, session_id=, track_adopted_ranges=, rotation_base=, "
        "component_evicted_seqlens="
    ),
    f"{BASE}:EvictParams": "num_tokens=, swa_num_tokens=, mamba_num=",
    f"{BASE}:MatchResult": (
        "device_prefix_len, last_device_node, last_host_node, best_match_node, host_hit_length=, "
        "swa_host_hit_length=, swa_branching_seqlen=, mamba_host_hit_length=, mamba_branching_seqlen=, "
        "cache_protected_len=, full_kv_hit_length=, cache_actions=, last_visited_node_id=, "
        "full_device_match_len="
    ),
    f"{BASE}:InsertResult": (
        "prefix_len, total_len=, last_device_node=, mamba_exist=, swa_branch_inserted=, "
        "rotation_tail_declined=, inserted_host_node=, host_insert_dropped=, adopted_ranges=, cache_actions="
    ),
    f"{BASE}:EvictResult": "num_tokens_evicted=, swa_num_tokens_evicted=, mamba_num_evicted=",
    f"{BASE}:IncLockRefResult": (
        "delta=, node_id=, skipped_lock_components=, component_lock_uuids=, component_host_lock_uuids="
    ),
    f"{BASE}:IncLockRefResult.to_dec_params": "self",
    f"{BASE}:DecLockRefResult": "delta=",
    f"{BASE}:TreeLock": "node, receipt, swa_released=",
    f"{ALLOCATOR}.free_segment": "self, free_index, start_pos",
    f"{ALLOCATOR}.get_all_free_pages": "self",
    "sglang.srt.mem_cache.memory_pool:ReqToTokenPool.write": "self, indices, values",
    "sglang.srt.mem_cache.radix_cache:RadixKey.__init__": (
        "self, token_ids, extra_key=, is_bigram=, limit=, cache_salt="
    ),
    "sglang.srt.mem_cache.cache_init_params:CacheInitParams": (
        "disable, req_to_token_pool, token_to_kv_pool_allocator, page_size, is_eagle=, tp_cache_group=, "
        "attn_cp_cache_group=, attn_tp_cache_group=, pp_cache_group=, eviction_policy=, "
        "eviction_policy_config=, enable_metrics=, enable_kv_cache_events=, dynamo_kv_event_format=, "
        "kv_event_lora_names=, enable_session_radix_cache=, enable_mamba_extra_buffer=, "
        "enable_mamba_extra_buffer_lazy=, pp_rank=, pp_size=, attn_cp_rank=, attn_cp_size=, "
        "chunked_prefill_size=, sliding_window_size=, swa_gates_prefix_match=, decoder_swa_bounded_replay=, "
        "draft_swa_window=, tree_components=, component_registry_override=, mtp_draft_device_pools=, "
        "sidecar_draft_device_pools=, mtp_draft_mamba_pools=, tree_core_backend="
    ),
    "sglang.srt.mem_cache.registry:register_radix_cache_backend": "name, factory",
    "sglang.srt.mem_cache.registry:TreeCacheBuildContext": (
        "server_args, params, is_hybrid_swa, is_hybrid_ssm, enable_hierarchical_cache, disable_radix_cache, "
        "tp_worker, model_config, tp_size, tp_rank, tp_group, full_tokens_per_layer=, is_dsa="
    ),
}
#: SGLang's options that replace this cache, or put a tier below it.
TIERS = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker", "enable_hierarchical_cache")


def require_known_sglang() -> None:
    """Check the installed SGLang.

    Raises:
        MissingExtra: for an unsupported version.
        RuntimeError: if methods of a supported version differ.
    """
    import sglang

    require_version(SGLANG, "blockyard_sglang")
    moved = moved_methods(CONTRACT)
    if moved:
        raise RuntimeError(
            f"blockyard_sglang needs {SGLANG}: pip install {SGLANG.requirement}; "
            f"in SGLang {sglang.__version__} these methods differ: {listed(moved)}"
        )


def require_supported(context: Any) -> None:
    """Raise `InvalidArgument` for an unsupported server, described by SGLang's `TreeCacheBuildContext`."""
    from sglang.srt.runtime_context import get_disagg, get_memory

    memory, disaggregation = get_memory(), get_disagg()
    _refuse(context.is_hybrid_swa, "a model with sliding windows")
    _refuse(context.is_hybrid_ssm, "a model with states (Mamba and its like)")
    _refuse(bool(getattr(context.model_config, "is_multimodal", False)), "a model with images or sounds")
    _refuse(context.enable_hierarchical_cache, "--enable-hierarchical-cache")
    for name in TIERS:
        _refuse(bool(getattr(memory, name, False)), f"--{name.replace('_', '-')}")
    mode = getattr(disaggregation, "disaggregation_mode", "null")
    _refuse(str(mode) != "null", f"--disaggregation-mode {mode}")


def require_params(params: Any) -> None:
    """Raise `InvalidArgument` for unsupported parameters, SGLang's `CacheInitParams`."""
    _refuse(params.disable, "--disable-radix-cache: it leaves no cache to replace")
    _refuse(params.is_eagle, "speculative decoding with EAGLE, whose keys are pairs of tokens")
    _refuse(params.sliding_window_size is not None, "a model with sliding windows")
    _refuse(params.enable_kv_cache_events, "--kv-events-config: the cache publishes no events")
    _refuse(params.enable_session_radix_cache, "--enable-session-radix-cache")
    _refuse(bool(params.eviction_policy_config), "--radix-eviction-policy-config: its policies have no parameters")
    _refuse(params.pp_size > 1, "pipeline parallelism")
    _refuse(params.attn_cp_size > 1, "context parallelism")
    pages = params.token_to_kv_pool_allocator.page_size
    _refuse(pages != params.page_size, f"an allocator with pages of {pages} tokens for a cache of {params.page_size}")
    require_policy(params.eviction_policy)


def require_policy(name: str) -> None:
    """Raise `InvalidArgument` for a policy that the pool does not have."""
    if name not in POLICIES:
        raise InvalidArgument(
            f"--radix-eviction-policy is {name}; with --radix-cache-backend blockyard it must be one of "
            f"{', '.join(sorted(POLICIES))}"
        )


def _refuse(is_present: bool, what: str) -> None:
    if is_present:
        raise InvalidArgument(f"--radix-cache-backend blockyard does not support {what}")
