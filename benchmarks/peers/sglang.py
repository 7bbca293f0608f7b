"""SGLang's own RadixCache with pages of 16 tokens, its paged allocator, and its table of request rows."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from sglang import __version__
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from ..workload import BLOCK_SIZE
from .peer import Peer
from .rows import NUM_SEQS

LONGEST_ROW = 2048


@dataclass
class Holding:
    """What a running request holds: a locked node of the tree, and pages that are not in the tree."""

    node: TreeNode
    loose: torch.Tensor


class SGLang(Peer):
    """Tokens are held in an array; a key wraps it, and a node of the tree stands for a run of pages."""

    name = "SGLang"
    prompt_form = "a buffer"

    def version(self) -> str:
        return f"SGLang {__version__}"

    def open(self, num_blocks: int, order: npt.NDArray[np.int32] | None) -> None:
        size = (num_blocks - 1) * BLOCK_SIZE
        self._allocator = PagedTokenToKVPoolAllocator(size, BLOCK_SIZE, torch.float16, "cpu", None, need_sort=False)
        self._rows = ReqToTokenPool(NUM_SEQS, LONGEST_ROW, "cpu", enable_memory_saver=False)
        self._cache = RadixCache(CacheInitParams(False, self._rows, self._allocator, BLOCK_SIZE))
        if order is not None:
            self._allocator.alloc(size)
            self._allocator.free_page_ids(torch.from_numpy(order.astype(np.int64)))

    def prompt(self, tokens: np.ndarray) -> array:
        return array("q", tokens.astype(np.int64).tobytes())

    def request(self, prompt: array) -> array:
        return prompt

    def look_up(self, prompt: array) -> int:
        return self._match(prompt).device_prefix_len

    def hold_and_release(self, prompt: array) -> int:
        match = self._match(prompt)
        self._cache.path_device_indices(match.last_device_node)
        self._cache.inc_lock_ref(match.last_device_node)
        self._cache.dec_lock_ref(match.last_device_node)
        return match.device_prefix_len

    def admit(self, request: array) -> Holding:
        slots = self._allocate(len(request))
        result = self._cache.insert(InsertParams(key=RadixKey(request), value=slots))
        self._cache.inc_lock_ref(result.last_device_node)
        return Holding(result.last_device_node, slots[:0])

    def free(self, holding: Holding) -> None:
        self._allocator.free(holding.loose)
        self._cache.dec_lock_ref(holding.node)

    def open_batch(self, prompts: list[array]) -> None:
        rows = self._rows.alloc_rows(len(prompts))
        for row, prompt in zip(rows, prompts, strict=True):
            self._rows.write((row, slice(0, len(prompt))), self._allocate(len(prompt)).to(torch.int32))
        self._row_ids = torch.tensor(rows)
        self._outputs: list[list[int]] = []
        self._lengths = torch.tensor([len(prompt) for prompt in prompts])

    def decode_step(self, sampled: list[int]) -> None:
        """Slots and rows of the whole batch. Tokens are kept until a request ends; nothing is published before."""
        self._outputs.append(sampled)
        last = self._rows.req_to_token[self._row_ids, self._lengths - 1]
        longer = self._lengths + 1
        slots = self._allocator.alloc_decode(longer, longer, last)
        self._rows.write((self._row_ids, self._lengths), slots.to(torch.int32))
        self._lengths = longer

    def serve(self, prompt: array, output: list[int]) -> int:
        match = self._match(prompt[:-1])
        num_hit = match.device_prefix_len
        cached = self._cache.path_device_indices(match.last_device_node)
        self._cache.inc_lock_ref(match.last_device_node)
        tokens = prompt + array("q", output)
        num_pages = -(-len(tokens) // BLOCK_SIZE)
        slots = self._allocate(num_pages * BLOCK_SIZE - num_hit)
        kept = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        held = torch.cat((cached, slots))
        result = self._cache.insert(InsertParams(key=RadixKey(tokens), value=held[:kept]))
        self._allocator.free_segment(held[num_hit : result.prefix_len], start_pos=num_hit)
        self._allocator.free_segment(held[kept:], start_pos=kept)
        self._cache.dec_lock_ref(match.last_device_node)
        return num_hit

    def _match(self, prompt: array):
        return self._cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        """Pages for tokens, evicting where too few are free, as SGLang's scheduler does it."""
        lacking = num_tokens - self._allocator.available_size()
        if lacking > 0:
            self._cache.evict(EvictParams(num_tokens=lacking))
        slots = self._allocator.alloc(num_tokens)
        if slots is None:
            raise MemoryError(f"SGLang has no pages left for {num_tokens} tokens")
        return slots
