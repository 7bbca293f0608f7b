"""`python -m benchmarks.sglang_cache`, run by SGLang's interpreter with Blockyard on its path: its cache and ours.

Both get the same prompts of 512 tokens, of which one in four begins with a part of an earlier one, in pages of 16 with
SGLang's paged allocator, on the CPU. Microseconds a call, least and median of rounds that take turns. match: what is
cached, and its slots. request: match, lock, take pages, cache all of it as a request that ends does, unlock. evict:
room for one prompt in a cache that is full of them.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from blockyard_sglang.cache import BlockPoolCache

PAGE_SIZE, PROMPT = 16, 512
NUM_PAGES = (1_000, 10_000, 100_000)
ROUNDS, CALLS = 7, 60
ROW = 1


class Side:
    """One cache, filled with prompts."""

    def __init__(self, make_cache: Any, num_pages: int) -> None:
        size = num_pages * PAGE_SIZE
        self.allocator = PagedTokenToKVPoolAllocator(size, PAGE_SIZE, torch.float16, "cpu", None, need_sort=False)
        self.rows = ReqToTokenPool(4, PROMPT, "cpu", enable_memory_saver=False)
        self.cache = make_cache(CacheInitParams(False, self.rows, self.allocator, PAGE_SIZE))

    def match(self, prompt: array[int]) -> int:
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        return len(self.cache.path_device_indices(result.last_device_node))

    def evict(self) -> int:
        return int(self.cache.evict(EvictParams(num_tokens=PROMPT)).num_tokens_evicted)

    def request(self, prompt: array[int]) -> None:
        node = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt, limit=PROMPT - 1))).last_device_node
        lock = self.cache.lock(node)
        cached = self.cache.path_device_indices(node)
        slots = self.allocator.alloc(PROMPT - len(cached))
        self.rows.write((ROW, slice(0, PROMPT)), torch.cat((cached, slots)).to(torch.int32))
        kv = SimpleNamespace(req_pool_idx=ROW, cache_protected_len=len(cached), cache_inserted_len=0, swa_evict_floor=0)
        req = SimpleNamespace(
            rid="r", extra_key=None, cache_salt=None, priority=0, kv=kv, lock=lock, last_node=node,
            origin_input_ids=prompt, full_untruncated_fill_ids=prompt,
        )  # fmt: skip
        self.cache.checkpoint(req, up_to=PROMPT)
        self.cache.unlock(req.lock)


def prompts_of(draw: random.Random, count: int) -> list[array[int]]:
    made: list[array[int]] = []
    for _ in range(count):
        shared = draw.choice(made)[: draw.randrange(PROMPT)] if made and draw.random() < 0.25 else array("q")
        made.append(shared + array("q", draw.choices(range(50_000), k=PROMPT - len(shared))))
    return made


def timed(call: Any, prompts: list[array[int]]) -> float:
    """Microseconds a call, of the thread's own time."""
    start = time.thread_time()
    for prompt in prompts:
        call(prompt)
    return (time.thread_time() - start) / len(prompts) * 1e6


def rows_of(num_pages: int) -> dict[str, list[list[float]]]:
    """For each row the times of SGLang's cache and of ours, a number for each round."""
    draw = random.Random(num_pages)
    sides = [Side(RadixCache, num_pages), Side(BlockPoolCache, num_pages)]
    full = prompts_of(draw, num_pages * PAGE_SIZE // PROMPT)
    for side in sides:
        for prompt in full:
            if side.allocator.available_size() >= PROMPT:
                side.request(prompt)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in ("match", "evict", "request")}
    for number in range(ROUNDS):
        asked = draw.choices(full, k=CALLS)
        new = prompts_of(draw, CALLS // 4)
        for place in (0, 1) if number % 2 else (1, 0):
            side = sides[place]
            times["match"][place].append(timed(side.match, asked))
            evictions = [timed(lambda _, side=side: side.evict(), [prompt]) for prompt in new]
            times["evict"][place].append(statistics.median(evictions))
            times["request"][place].append(timed(side.request, new))
    return times


def main() -> None:
    """Print a table."""
    print("| pages | call | SGLang, us: least, median | ours | SGLang / ours, of medians |\n|---|---|---|---|---|")
    for num_pages in NUM_PAGES:
        for name, (stock, ours) in rows_of(num_pages).items():
            shown = [f"{min(times):,.1f}, {statistics.median(times):,.1f}" for times in (stock, ours)]
            ratio = statistics.median(stock) / statistics.median(ours)
            print(f"| {num_pages:,} | {name} | {shown[0]} | {shown[1]} | {ratio:.2g} |", flush=True)


if __name__ == "__main__":
    main()
