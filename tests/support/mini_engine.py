"""A small engine around mini-sglang's interface of a cache manager.

`SmallManagers` schedules with mini-sglang's calls (match, lock, allocate, cache), prompts before decoding, in chunks;
`drive` takes it, or mini-sglang's own managers of prompts and decoding.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from blockyard_testing.slot_memory import SlotMemory
from engines.mini_sglang import CacheManager


class SmallReq:
    """What mini-sglang's requests have."""

    def __init__(self, pending: SimpleNamespace, table_idx: int, cached_len: int, end: int) -> None:
        self.uid, self.table_idx, self.cached_len = pending.uid, table_idx, cached_len
        self.cache_handle = pending.handle
        self.input_ids = pending.input_ids[:end]
        self.device_len = end
        self.max_device_len = end + pending.max_tokens
        self.is_chunk = end < len(pending.input_ids)

    @property
    def can_decode(self) -> bool:
        return not self.is_chunk and self.device_len < self.max_device_len

    def complete_one(self) -> None:
        self.cached_len = self.device_len
        self.device_len += 1

    def append_host(self, next_token: torch.Tensor) -> None:
        self.input_ids = torch.cat([self.input_ids, next_token])


class SmallManagers:
    """Managers of prompts and of decoding in one."""

    def __init__(self, cache: CacheManager, num_rows: int) -> None:
        self.cache = cache
        self.rows = list(range(num_rows))
        self.pending: list[SimpleNamespace] = []
        self.running: list[SmallReq] = []

    @property
    def runnable(self) -> bool:
        return bool(self.pending or self.running)

    def add(self, uid: int, input_ids: torch.Tensor, max_tokens: int) -> None:
        request = SimpleNamespace(uid=uid, input_ids=input_ids, max_tokens=max_tokens, handle=None, chunk=None)
        self.pending.append(request)

    def next_batch(self, budget: int) -> tuple[list[SmallReq], bool]:
        reserved = sum(req.max_device_len - req.device_len + self.cache.page_size for req in self.running)
        batch: list[SmallReq] = []
        while self.pending and budget > 0:
            pending = self.pending[0]
            if pending.handle is None and not self._admit(pending, reserved):
                break
            start = pending.handle.cached_len if pending.chunk is None else pending.chunk.cached_len
            end = min(len(pending.input_ids), start + budget)
            row = self.rows.pop() if pending.chunk is None else pending.chunk.table_idx
            if pending.chunk is None:
                self.cache.page_table[row, :start] = pending.handle.get_matched_indices()
            pending.chunk = SmallReq(pending, row, start, end)
            budget -= end - start
            reserved += len(pending.input_ids) - start + pending.max_tokens
            batch.append(pending.chunk)
            if pending.chunk.is_chunk:
                break
            self.pending.pop(0)
        return (batch, True) if batch else (list(self.running), False)

    def _admit(self, pending: SimpleNamespace, reserved: int) -> bool:
        handle = self.cache.match_req(pending).cuda_handle
        needed = len(pending.input_ids) - handle.cached_len + pending.max_tokens + reserved
        if not self.rows or needed > self.cache.available_size:
            return False
        self.cache.lock(handle)
        if needed > self.cache.available_size:
            self.cache.unlock(handle)
            return False
        pending.handle = handle
        return True

    def filter(self, batch: list[SmallReq]) -> None:
        self.running = [req for req in dict.fromkeys([*self.running, *batch]) if req.can_decode]

    def end(self, req: SmallReq) -> None:
        self.running = [other for other in self.running if other is not req]
        self.rows.append(req.table_idx)


def drive(managers: Any, cache: CacheManager, budget: int) -> dict[int, list[int]]:
    """Run what was added to its end; each request's tokens. Raises `AssertionError` where a slot holds another's."""
    memory = SlotMemory()
    done: dict[int, list[int]] = {}
    for _ in range(10_000):
        if not managers.runnable:
            return done
        batch, is_prefill = managers.next_batch(budget)
        cache.allocate_paged(batch)
        tokens = [_compute(req, cache.page_table, memory) for req in batch]
        for req in batch:
            req.complete_one()
        managers.filter(batch)
        with cache.lazy_free_region():
            for req, token in zip(batch, tokens, strict=True):
                if _is_chunk(req):
                    continue
                req.append_host(torch.tensor([token], dtype=torch.int32))
                if not req.can_decode:
                    managers.end(req)
                    cache.cache_req(req, finished=True)
                    done[req.uid] = req.input_ids.tolist()
                elif is_prefill:
                    cache.cache_req(req, finished=False)
    raise AssertionError("the requests do not end")


def _is_chunk(req: Any) -> bool:
    """Whether a request is a part of a prompt, of which nothing is sampled."""
    return req.is_chunk if isinstance(req, SmallReq) else type(req).__name__ == "ChunkedReq"


def _compute(req: Any, page_table: torch.Tensor, memory: SlotMemory) -> int:
    tokens, places = req.input_ids[: req.device_len].tolist(), page_table[req.table_idx].tolist()
    return memory.compute(f"request {req.uid}", tokens, places, req.cached_len) % 50
