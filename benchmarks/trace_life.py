"""Traces through the manager, one request after another: `python -m benchmarks.trace_life TRACE... [--requests N]`.

Admission, prefix hit, blocks for prompt and output, publishing, free, eviction, in processor time, in which waiting for
other programs does not count. Each hash id of a trace stands for distinct tokens; output tokens never match a later
prompt. A trace is what the lab opens, a file or a generator; FILE@1of2 is the first half of its requests. vLLM 0.32's
own block pool hits 796,160 / 1,361,584 / 5,663,872 tokens with 10k / 100k / 1M blocks in the first 1,500 requests of
Mooncake's conversation trace.

`python -m benchmarks.in_turns` compares two builds by it: hits and evictions equal, the ratio of their times.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass

import blockyard
from blockyard import CacheConfig, KVCacheManager
from blockyard.cli import build_name

from .aging import read_trace
from .measure import HEADERS, Figure, print_json, print_plain
from .workload import BLOCK_SIZE, SIZES, Request


@dataclass(frozen=True)
class Life:
    """What all requests of a trace took; seconds of processor time."""

    seconds: float
    num_blocks: int
    num_hit_tokens: int
    num_evicted_blocks: int


def live(requests: list[Request], num_blocks: int) -> Life:
    """Serve all requests in turn; making their tokens does not count, nor do those that no pool of this size holds."""
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
    cache = KVCacheManager(CacheConfig(num_blocks, BLOCK_SIZE, max_num_seqs=1, max_model_len=longest, watermark=0.0))
    handled = nanoseconds = 0
    for request in requests:
        if request.num_blocks < num_blocks:
            prompt, output = request.prompt(), request.output()
            start = time.process_time_ns()
            seq = cache.allocate(prompt)
            plan = cache.reserve(seq, len(prompt) - cache.num_computed_tokens(seq))
            cache.commit(seq, plan.num_scheduled, output[:1])
            # As vLLM counts it in this replay, the last token is computed too.
            cache.reserve(seq, len(output))
            cache.commit(seq, len(output), output[1:].reshape(1, -1))
            cache.free(seq)
            nanoseconds += time.process_time_ns() - start
            handled += request.num_blocks
    cache.check()
    stats = cache.stats()
    return Life(nanoseconds * 1e-9, handled, stats.num_hit_tokens, stats.num_evicted_blocks)


def part_of(trace: str, num_requests: int | None) -> list[Request]:
    """The requests of `TRACE` or `TRACE@NUMBERofPARTS`, at most that many."""
    part = re.fullmatch(r"(.+)@(\d+)of(\d+)", trace)
    if part is None:
        return read_trace(trace)[:num_requests]
    requests, number, parts = read_trace(part[1]), int(part[2]), int(part[3])
    size = -(-len(requests) // parts)
    return requests[(number - 1) * size : number * size][:num_requests]


def main() -> None:
    """Print hits, evictions and time of each trace in pools of each size."""
    parser = argparse.ArgumentParser(prog="benchmarks.trace_life", description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--requests", type=int, help="the first of each trace (default: all)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=(10_000, 30_000, *SIZES[1:]), help="blocks of the pools"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    show = print_json if args.json else print_plain
    if not args.json:
        print(f"blockyard {blockyard.__version__}, {build_name()}")
        print(HEADERS[show])
    for trace in args.traces:
        requests = part_of(trace, args.requests)
        for num_blocks in args.sizes:
            life = live(requests, num_blocks)
            counts = (
                f"{life.num_hit_tokens:,} tokens hit, {life.num_evicted_blocks:,} of {life.num_blocks:,} blocks evicted"
            )
            each = f"{life.seconds / life.num_blocks * 1e9:.0f} ns a block"
            name = f"{len(requests):,} requests of {trace.rpartition('/')[2]}"
            show(Figure(name, f"{num_blocks:,}", life.seconds * 1e3, "ms", each, counts=counts))


if __name__ == "__main__":
    main()
