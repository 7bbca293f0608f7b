"""The parts of SGLang 0.5.23 that the adapter meets, small: the same names and arguments, no more than they have to do.

`sglang_here()` puts them where SGLang is not installed; where it is, SGLang itself is used. A test compares their
arguments with the adapter's contract, so they cannot drift from it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from abc import ABC, abstractmethod
from array import array
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch

HAS_SGLANG = importlib.util.find_spec("sglang") is not None


@dataclasses.dataclass
class MatchPrefixParams:
    key: Any
    cow_mamba: bool = False
    req: Any = None


@dataclasses.dataclass
class InsertParams:
    key: Any = None
    value: Any = None
    mamba_value: Any = None
    mamba_keep_idx: Any = None
    c128_value: Any = None
    prev_prefix_len: int = 0
    swa_branching_seqlen: Any = None
    inserted_len: int = 0
    priority: int = 0
    session_id: Any = None
    track_adopted_ranges: bool = False
    rotation_base: Any = None
    component_evicted_seqlens: dict[Any, int] = dataclasses.field(default_factory=dict, kw_only=True)


@dataclasses.dataclass
class InsertResult:
    prefix_len: int
    total_len: int = 0
    last_device_node: Any = None
    mamba_exist: bool = False
    swa_branch_inserted: bool = False
    rotation_tail_declined: bool = False
    inserted_host_node: Any = None
    host_insert_dropped: bool = False
    adopted_ranges: Any = None
    cache_actions: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class EvictParams:
    num_tokens: int = 0
    swa_num_tokens: int = 0
    mamba_num: int = 0


@dataclasses.dataclass
class EvictResult:
    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0


@dataclasses.dataclass
class DecLockRefParams:
    node_id: Any = None


@dataclasses.dataclass
class IncLockRefResult:
    delta: Any = None
    node_id: Any = None
    skipped_lock_components: tuple[Any, ...] = ()
    component_lock_uuids: dict[Any, Any] = dataclasses.field(default_factory=dict)
    component_host_lock_uuids: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def to_dec_params(self) -> DecLockRefParams:
        return DecLockRefParams(self.node_id)


@dataclasses.dataclass
class DecLockRefResult:
    delta: Any = None


@dataclasses.dataclass
class TreeLock:
    node: Any
    receipt: Any
    swa_released: bool = False


class MatchResult(NamedTuple):
    device_prefix_len: int
    last_device_node: Any
    last_host_node: Any
    best_match_node: Any
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    swa_branching_seqlen: Any = None
    mamba_host_hit_length: int = 0
    mamba_branching_seqlen: Any = None
    cache_protected_len: Any = None
    full_kv_hit_length: int = 0
    cache_actions: Any = ()
    last_visited_node_id: Any = None
    full_device_match_len: Any = None


class BasePrefixCache(ABC):
    metrics_collector = None

    def init_metrics_collector(self) -> None:
        self.metrics_collector = self

    def update_eviction_metrics(self, num_evicted: int, start_time: float) -> None:
        self.num_counted = getattr(self, "num_counted", 0) + num_evicted

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def match_prefix(self, params: Any) -> Any: ...

    def touch_prefix(self, key: Any) -> None:  # noqa: B027 (SGLang has it so)
        ...

    def dfs_weight_order(self, node_handles: Any) -> list[int]:
        raise NotImplementedError

    def root_node_handle(self, extra_key: Any = None) -> Any:
        return self.root_node  # type: ignore[attr-defined]

    @abstractmethod
    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None: ...

    def free_kv_row(self, kv: Any, ranges: Any) -> None:
        raise NotImplementedError

    @abstractmethod
    def evict(self, params: Any) -> Any: ...

    def evict_for_alloc(self, params: Any, *, allocation_reclaim_satisfied: Any = None) -> Any:
        return self.evict(params)

    @abstractmethod
    def inc_lock_ref(self, node: Any) -> Any: ...

    @abstractmethod
    def dec_lock_ref(self, node: Any, params: Any = None) -> Any: ...

    def lock(self, node: Any) -> Any:
        return TreeLock(node, self.inc_lock_ref(node).to_dec_params())

    def unlock(self, lock: Any) -> None:
        if lock is not None:
            self.dec_lock_ref(lock.node, lock.receipt)

    def path_device_indices(self, node: Any) -> Any:
        raise NotImplementedError

    def prefix_device_indices(self, req: Any) -> Any:
        path = self.path_device_indices(req.last_node)
        assert len(path) >= req.prefix_len
        return path[: req.prefix_len]

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def total_size(self) -> int:
        raise NotImplementedError

    def pretty_print(self) -> None:
        raise NotImplementedError

    def supports_prefix_sharing(self) -> bool:
        return True


class RadixKey:
    def __init__(
        self,
        token_ids: array[int],
        extra_key: str | None = None,
        is_bigram: bool = False,
        limit: int | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.token_ids, self.extra_key, self.is_bigram = token_ids, extra_key, is_bigram
        self.cache_salt, self.limit = cache_salt or None, limit

    def __len__(self) -> int:
        return len(self.token_ids) if self.limit is None else min(self.limit, len(self.token_ids))


class BaseTokenToKVPoolAllocator:
    """Pages from 1 on, page_size slots each."""

    def __init__(self, size: int, page_size: int) -> None:
        self.size, self.page_size, self.device = size, page_size, "cpu"
        self.free_pages = torch.arange(1, size // page_size + 1)

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        return self.free_pages

    def alloc(self, need_size: int) -> torch.Tensor | None:
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        assert start_pos % self.page_size == 0
        pages = free_index[:: self.page_size].to(torch.int64) // self.page_size
        assert not set(pages.tolist()) & set(self.free_pages.tolist()), "freed twice"
        self.free_pages = torch.cat((self.free_pages, pages))


class ReqToTokenPool:
    def __init__(self, size: int, max_context_len: int) -> None:
        self.req_to_token = torch.zeros((size, max_context_len), dtype=torch.int32)

    def write(self, indices: Any, values: torch.Tensor) -> None:
        self.req_to_token[indices] = values


@dataclasses.dataclass
class CacheInitParams:
    disable: bool
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    page_size: int
    is_eagle: bool = False
    tp_cache_group: Any = None
    attn_cp_cache_group: Any = None
    attn_tp_cache_group: Any = None
    pp_cache_group: Any = None
    eviction_policy: str = "lru"
    eviction_policy_config: Any = None
    enable_metrics: bool = False
    enable_kv_cache_events: bool = False
    dynamo_kv_event_format: bool = False
    kv_event_lora_names: Any = None
    enable_session_radix_cache: bool = False
    enable_mamba_extra_buffer: bool = False
    enable_mamba_extra_buffer_lazy: bool = False
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    chunked_prefill_size: Any = None
    sliding_window_size: Any = None
    swa_gates_prefix_match: bool = True
    decoder_swa_bounded_replay: bool = False
    draft_swa_window: int = 0
    tree_components: Any = None
    component_registry_override: Any = None
    mtp_draft_device_pools: Any = ()
    sidecar_draft_device_pools: Any = ()
    mtp_draft_mamba_pools: Any = ()
    tree_core_backend: Any = dataclasses.field(default=None, kw_only=True)


@dataclasses.dataclass
class TreeCacheBuildContext:
    server_args: Any
    params: Any
    is_hybrid_swa: bool
    is_hybrid_ssm: bool
    enable_hierarchical_cache: bool
    disable_radix_cache: bool
    tp_worker: Any
    model_config: Any
    tp_size: int
    tp_rank: int
    tp_group: Any
    full_tokens_per_layer: Any = None
    is_dsa: bool = False


FACTORIES: dict[str, Any] = {}


def register_radix_cache_backend(name: str, factory: Any) -> None:
    if name in FACTORIES:
        raise ValueError(f"{name!r} is already registered")
    FACTORIES[name] = factory


#: A server's settings, as far as the adapter asks.
SETTINGS: dict[str, Any] = {}


class Settings:
    def __getattr__(self, name: str) -> Any:
        return SETTINGS.get(name, "null" if name == "disaggregation_mode" else False)


def sglang_here() -> None:
    """Where SGLang is not installed, put this in its place."""
    if HAS_SGLANG or "sglang" in sys.modules:
        return
    policies = ["lru", "lfu", "slru", "priority", "tlru"]
    names = globals()
    modules: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.choices": {
            "RADIX_EVICTION_POLICY_CHOICES": policies,
            "add_radix_eviction_policy_choices": policies.extend,
        },
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.base_prefix_cache": names,
        "sglang.srt.mem_cache.radix_cache": names,
        "sglang.srt.mem_cache.allocator": names,
        "sglang.srt.mem_cache.memory_pool": names,
        "sglang.srt.mem_cache.cache_init_params": names,
        "sglang.srt.mem_cache.registry": names | {"get_radix_cache_factory": FACTORIES.get},
        "sglang.srt.runtime_context": {"get_memory": Settings, "get_disagg": Settings},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update({key: value for key, value in content.items() if not key.startswith("__")})
        if name == "sglang":
            module.__version__ = "0.5.23"  # type: ignore[attr-defined]
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
