"""What the cache does not serve, refused by name before a server starts."""

from __future__ import annotations

from typing import Any

from ... import InvalidArgument
from ...policies import POLICIES

#: Options in SGLang's groups that put another cache in the place of this one, or a tier under it.
TIERS = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker", "enable_hierarchical_cache")
#: Words before a policy's name: a floor under it.
GUARDS = ("guarded", "strict")


def require_supported(context: Any) -> None:
    """Raise `InvalidArgument` for a server that the cache cannot serve. context: SGLang's `TreeCacheBuildContext`."""
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
    """Raise `InvalidArgument` for what this cache cannot be made with. params: SGLang's `CacheInitParams`."""
    _refuse(params.disable, "--disable-radix-cache: there is nothing to put a pool in the place of")
    _refuse(params.is_eagle, "speculative decoding with EAGLE, whose keys are pairs of tokens")
    _refuse(params.sliding_window_size is not None, "a model with sliding windows")
    _refuse(params.enable_kv_cache_events, "--kv-events-config: the cache tells of no events")
    _refuse(params.enable_session_radix_cache, "--enable-session-radix-cache")
    _refuse(bool(params.eviction_policy_config), "--radix-eviction-policy-config: our policies have no parameters")
    _refuse(params.pp_size > 1, "pipeline parallelism")
    _refuse(params.attn_cp_size > 1, "context parallelism")
    pages = params.token_to_kv_pool_allocator.page_size
    _refuse(pages != params.page_size, f"an allocator with pages of {pages} tokens for a cache of {params.page_size}")
    require_policy(params.eviction_policy)


def require_policy(name: str) -> None:
    """Raise `InvalidArgument` for a policy of SGLang's that the pool has not got."""
    guard, _, policy = name.rpartition(":")
    if policy not in POLICIES or (guard and guard not in GUARDS):
        raise InvalidArgument(
            f"--radix-eviction-policy is {name}; with --radix-cache-backend blockyard it must be one of "
            f"{', '.join(sorted(POLICIES))}, with 'guarded:' or 'strict:' before it if you like"
        )


def _refuse(is_asked: bool, what: str) -> None:
    if is_asked:
        raise InvalidArgument(f"--radix-cache-backend blockyard does not serve {what}")
