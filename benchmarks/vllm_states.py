"""`python benchmarks/vllm_states.py`, run by vLLM's interpreter with Blockyard on its path: prompts that begin alike.

64 requests of 1,600 shared and 600 other tokens, then of 1,500 and 700 (vllm#45238), one after another, through vLLM's
own manager with a group of attention and one of states ("align": one page for both, chunks end at its multiples), and
through ours: the tokens that the first three hit, how many hit, and the share of all prompt tokens. No model runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager as Stock
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request, RequestStatus

from blockyard.lab import StateReplay

NUM_REQUESTS, NUM_DECODED, BLOCK_SIZE = 64, 16, 16
LOADS = ((1600, 600), (1500, 700))
#: Tokens of a page, as large as a state of one group of layers: 528 for Qwen3.5-4B.
PAGES = (528, 1056, 1568)


def stock_manager(page: int) -> Any:
    """A pool that never runs short."""
    attention = FullAttentionSpec(block_size=page, num_kv_heads=1, head_size=1, dtype=torch.float32)
    shape = (attention.page_size_bytes // 4,)
    states = MambaSpec(block_size=page, shapes=(shape,), dtypes=(torch.float32,), mamba_cache_mode="align")
    groups = [KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["states"], states)]
    return Stock(
        kv_cache_config=KVCacheConfig(num_blocks=4000, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=8192,
        scheduler_block_size=page,
        hash_block_size=page,
        enable_caching=True,
    )


def stock_hits(page: int, shared: int, unique: int) -> list[int]:
    """Each request from begin to end; as vLLM's scheduler does, the last whole page of a prompt ends a chunk."""
    manager, hasher, hits = stock_manager(page), get_request_block_hasher(page, sha256), []
    for number in range(NUM_REQUESTS):
        params = SamplingParams(max_tokens=NUM_DECODED, temperature=0)
        params.update_from_generation_config({}, eos_token_id=0)
        tokens = list(range(shared)) + [10_000 * (number + 1) + token for token in range(unique)]
        request = Request(str(number), tokens, params, None, block_hasher=hasher)
        blocks, hit, _ = manager.get_computed_blocks(request)
        hits.append(hit)
        known: tuple[Any, ...] = (hit, blocks)
        while request.num_computed_tokens < request.num_tokens:
            start = max(request.num_computed_tokens, hit)
            whole = request.num_tokens // page * page
            end = whole if start < whole else request.num_tokens
            manager.new_step_starts()
            assert manager.allocate_slots(request, end - start, *known) is not None
            request.num_computed_tokens, request.status, known = end, RequestStatus.RUNNING, ()
        for _ in range(NUM_DECODED):
            request.append_output_token_ids(7)
            manager.new_step_starts()
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        manager.free(request)
    return hits


def our_hits(shared: int, unique: int) -> list[int]:
    """The same with blocks of 16 tokens, states of 3,152, and the default rules."""
    run = StateReplay("index", ("junction", "ends", "pow2"), 3152, 800_000, max_model_len=4096)
    total, hits = shared + unique, []
    for number in range(NUM_REQUESTS):
        keys = np.arange(1, (total + NUM_DECODED) // BLOCK_SIZE + 1)
        keys[shared // BLOCK_SIZE :] += 10_000 * (number + 1)
        hits.append(run.request(keys, total, total + NUM_DECODED, [], []))
    return hits


def main() -> None:
    """Print a line for each manager and load."""
    init_none_hash(sha256)
    print("| tokens, shared + other | manager | hits of request 1, 2, 3 | requests that hit | of all tokens |")
    print("|---|---|---|---|---|")
    for shared, unique in LOADS:
        rows = {f"vLLM, pages of {page}": stock_hits(page, shared, unique) for page in PAGES}
        for name, hits in (rows | {"ours": our_hits(shared, unique)}).items():
            share = 100 * sum(hits) / (NUM_REQUESTS * (shared + unique))
            first = ", ".join(map(str, hits[:3]))
            count = sum(hit > 0 for hit in hits)
            print(f"| {shared} + {unique} | {name} | {first} | {count} of {NUM_REQUESTS} | {share:.1f} % |")


if __name__ == "__main__":
    main()
