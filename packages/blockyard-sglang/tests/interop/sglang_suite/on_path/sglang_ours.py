"""A pytest plug-in: `RadixCache.create_simulated` of SGLang's tests makes our cache, on pages 1 to 999."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang_before import give_indices

from blockyard_sglang.cache import BlockPoolCache


def create_simulated(
    disable: bool = False,
    mock_allocator: Any = None,
    page_size: int = 1,
    enable_kv_cache_events: bool = False,
    **options: Any,
) -> BlockPoolCache:
    """As SGLang's, with an allocator that has sizes."""
    allocator = mock_allocator or Mock()
    allocator.device = torch.device("cpu")
    allocator.size, allocator.page_size = 999 * page_size, page_size
    params = CacheInitParams(
        disable, None, allocator, page_size, enable_kv_cache_events=enable_kv_cache_events, **options
    )
    return BlockPoolCache(params)


if not hasattr(MatchResult, "device_indices"):
    give_indices(BlockPoolCache)
RadixCache.create_simulated = create_simulated
