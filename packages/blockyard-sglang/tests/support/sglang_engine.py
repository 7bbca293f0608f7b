"""What SGLang's scheduler does with a prefix cache, call by call: admit, compute in chunks, decode, finish, abort,
retract. A slot of its memory holds what was written there, so that a wrong hit is read.
"""

from __future__ import annotations

import zlib
from array import array
from types import SimpleNamespace
from typing import Any

import torch

from blockyard_testing.slot_memory import SlotMemory

from .small_sglang import HAS_SGLANG, sglang_here

sglang_here()

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

LONGEST = 512
NUM_ROWS = 12


def new_allocator(num_pages: int, page_size: int) -> Any:
    if not HAS_SGLANG:
        from .small_sglang import BaseTokenToKVPoolAllocator

        return BaseTokenToKVPoolAllocator(num_pages * page_size, page_size)
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if page_size == 1:
        return TokenToKVPoolAllocator(num_pages, torch.float16, "cpu", None, need_sort=False)
    return PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, torch.float16, "cpu", None, need_sort=False)


def new_rows() -> Any:
    if HAS_SGLANG:
        return ReqToTokenPool(NUM_ROWS, LONGEST, "cpu", enable_memory_saver=False)
    return ReqToTokenPool(NUM_ROWS, LONGEST)


def key_of(tokens: Any, extra_key: str | None = None, salt: str | None = None, limit: int | None = None) -> Any:
    return RadixKey(array("q", tokens), extra_key, limit=limit, cache_salt=salt)


def new_request(rid: str, tokens: list[int], extra_key: str | None = None, salt: str | None = None) -> Any:
    """A request as the cache sees it. computed: how many tokens have their keys and values."""
    kv = SimpleNamespace(req_pool_idx=None, cache_protected_len=0, cache_inserted_len=0, swa_evict_floor=0)
    return SimpleNamespace(
        rid=rid, extra_key=extra_key, cache_salt=salt, priority=0, kv=kv, lock=None, last_node=None, prefix_len=0,
        origin_input_ids=array("q", tokens), full_untruncated_fill_ids=array("q", tokens), computed=0, allocated=0,
    )  # fmt: skip


class Engine:
    """One cache, its allocator, its table of rows, and the memory behind them."""

    def __init__(self, make_cache: Any, num_pages: int, page_size: int, **params: Any) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.allocator, self.rows = new_allocator(num_pages, page_size), new_rows()
        self.cache = make_cache(CacheInitParams(False, self.rows, self.allocator, page_size, **params))
        self.free_rows = list(range(1, NUM_ROWS))
        self.memory = SlotMemory()

    def match(self, req: Any) -> int:
        """As SGLang does it for each waiting request in each round: all but the last token may be hit."""
        tokens = req.full_untruncated_fill_ids
        key = key_of(tokens, req.extra_key, req.cache_salt, limit=len(tokens) - 1)
        result = self.cache.match_prefix(MatchPrefixParams(key=key))
        req.last_node, req.prefix_len = result.last_device_node, result.device_prefix_len
        return int(result.device_prefix_len)

    def lacking(self, req: Any, count: int) -> int:
        """Tokens to be evicted before `count` more can be computed for a request that has been matched or runs."""
        have = req.allocated if req.lock is not None else req.prefix_len
        pages = -(-(max(req.computed, req.prefix_len) + count) // self.page_size) - have // self.page_size
        return max(0, pages * self.page_size - self.allocator.available_size())

    def evict(self, num_tokens: int) -> int:
        return int(self.cache.evict_for_alloc(EvictParams(num_tokens=num_tokens)).num_tokens_evicted)

    def admit(self, req: Any) -> None:
        """Lock what was matched, and write it into a row."""
        temporary = self.cache.lock(req.last_node)
        req.lock = self.cache.lock(req.last_node)
        self.cache.unlock(temporary)
        req.kv.req_pool_idx = self.free_rows.pop()
        slots = self.cache.prefix_device_indices(req)
        self.rows.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), slots.to(torch.int32))
        req.kv.cache_protected_len = req.computed = req.allocated = req.prefix_len
        self._use(req, slots, req.prefix_len, req.prefix_len)

    def compute(self, req: Any, count: int) -> bool:
        """Slots for `count` more tokens, and their keys and values; False where no page is left."""
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        missing = -(-(req.computed + count) // self.page_size) * self.page_size - req.allocated
        if missing > 0:
            slots = self.allocator.alloc(missing)
            if slots is None:
                return False
            self.rows.write((req.kv.req_pool_idx, slice(req.allocated, req.allocated + missing)), slots.to(torch.int32))
            req.allocated += missing
        self._use(req, row, req.computed + count, req.computed)
        req.computed += count
        return True

    def _use(self, req: Any, slots: torch.Tensor, count: int, first: int) -> None:
        """Write a request's tokens from the `first` to the `count`th, and read all of them."""
        root = zlib.crc32(repr((req.extra_key, req.cache_salt)).encode())
        tokens = req.full_untruncated_fill_ids[:count]
        self.memory.compute(str(req.rid), tokens, slots[:count].tolist(), first, root)

    def checkpoint(self, req: Any) -> None:
        """Cache what was computed, as between chunks and before a request's end."""
        self.cache.checkpoint(req, up_to=req.computed)
        self._use(req, self.rows.req_to_token[req.kv.req_pool_idx], req.computed, req.computed)

    def release(self, req: Any, *, keep: bool) -> None:
        """A request finishes, or is aborted or retracted without being cached."""
        if keep:
            self.checkpoint(req)
        row, first = self.rows.req_to_token[req.kv.req_pool_idx], req.kv.cache_protected_len
        if first < req.allocated:
            self.allocator.free_segment(row[first : req.allocated].clone(), start_pos=first)
        self.cache.unlock(req.lock)
        req.lock = None
        self.free_rows.append(req.kv.req_pool_idx)
        req.kv.req_pool_idx, req.kv.cache_protected_len, req.kv.cache_inserted_len = None, 0, 0
        req.computed = req.allocated = req.prefix_len = 0

    def sizes(self) -> tuple[int, ...]:
        """Evictable, locked, cached in all, and free in the allocator."""
        cache = self.cache
        sizes = (cache.evictable_size(), cache.protected_size(), cache.total_size(), self.allocator.available_size())
        return tuple(int(size) for size in sizes)
