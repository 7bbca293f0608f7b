"""The life of the first requests of a Mooncake trace, one after another: `python -m benchmarks.trace_life TRACE`.

Each hash id of the trace stands for 512 distinct tokens; output tokens never match a later prompt. vLLM 0.32's own
block pool takes 4.4 s for the 1.35 million blocks of the first 1,500 requests of the conversation trace with
100k blocks, and hits 796,160 / 1,361,584 / 5,663,872 tokens with 10k / 100k / 1M blocks.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import blockyard
from blockyard import CacheConfig, KVCacheManager
from blockyard._build import build_name

from .workload import BLOCK_SIZE, SIZES, read_requests


def live(requests: list[tuple[np.ndarray, np.ndarray]], num_blocks: int) -> tuple[int, int, float]:
    """Tokens hit, blocks handled and seconds for all requests in turn."""
    longest = max(len(prompt) + len(output) for prompt, output in requests)
    cache = KVCacheManager(CacheConfig(num_blocks, BLOCK_SIZE, max_num_seqs=1, max_model_len=longest, watermark=0.0))
    num_blocks_handled = 0
    start = time.perf_counter()
    for prompt, output in requests:
        seq = cache.allocate(prompt)
        plan = cache.reserve(seq, len(prompt) - cache.num_computed_tokens(seq))
        cache.commit(seq, plan.num_scheduled, output[:1])
        # As vLLM counts it in this replay, the last token is computed too.
        cache.reserve(seq, len(output))
        cache.commit(seq, len(output), output[1:].reshape(1, -1))
        num_blocks_handled += -(-(len(prompt) + len(output)) // BLOCK_SIZE)
        cache.free(seq)
    seconds = time.perf_counter() - start
    cache.check()
    return cache.stats().num_hit_tokens, num_blocks_handled, seconds


def main() -> None:
    """Print hits and time for 10k, 100k and 1M blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", help="a Mooncake JSONL file")
    parser.add_argument("--requests", type=int, default=1500)
    args = parser.parse_args()
    requests = list(read_requests(args.trace, args.requests))
    print(f"blockyard {blockyard.__version__}, {build_name()}; {len(requests)} requests")
    for num_blocks in SIZES:
        hits, blocks, seconds = live(requests, num_blocks)
        print(
            f"{num_blocks:>9,} blocks: {hits:>9,} tokens hit, {blocks:,} blocks in {seconds:.3f} s, "
            f"{seconds / blocks * 1e9:.0f} ns a block"
        )


if __name__ == "__main__":
    main()
