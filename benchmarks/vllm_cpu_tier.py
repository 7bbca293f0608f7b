"""`python benchmarks/vllm_cpu_tier.py TRACE...`, by vLLM's interpreter with Blockyard on its path: hits of a CPU tier.

The prompts of a trace, one after another, ask vLLM's own `CPUOffloadingManager` for their chunks: looked up, loaded,
stored and finished as its connector does it, a chunk being what the trace names. `lru` and `arc` are vLLM's; the others
ours, through `cache_policy_module_path`. With `--gpu N` a prefix cache of N chunks in order of last use stands before
it, and the tier sees what that one misses. `--from SHARE` counts the hits of the later part alone, after the former has
filled and taught the tier.

TRACE is a file or a generator of the lab (`chat:requests=4000,seed=31`). Prints Markdown: tokens found in the tier, in
percent of what it was asked for, and microseconds a chunk.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from blockyard_lab.traces import open_trace

MODULE = "blockyard_vllm.cpu_policy"
THEIRS = ("lru", "arc")
POLICIES = (*THEIRS, "LRU", "ARC", "s3fifo", "density")
SHARES = (0.01, 0.03, 0.1, 0.3)


def prompts_of(source: str) -> list[list[OffloadKey]]:
    """The keys of each prompt's chunks, in vLLM's form."""
    return [
        [make_offload_key(int(number).to_bytes(32, "big"), 0) for number in request.hash_ids]
        for request in open_trace(source)
        if request.hash_ids is not None
    ]


class Front:
    """A prefix cache in GPU memory, in order of last use; of no size, it has nothing."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._cached: OrderedDict[OffloadKey, None] = OrderedDict()

    def num_hits(self, keys: list[OffloadKey]) -> int:
        """And all of them are cached now."""
        hits = next((place for place, key in enumerate(keys) if key not in self._cached), len(keys))
        for key in reversed(keys):
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > self._num_chunks:
            self._cached.popitem(last=False)
        return hits


def serve(manager: CPUOffloadingManager, keys: list[OffloadKey], start: int, name: str) -> int:
    """One request, of which the GPU has `start` chunks: how many more the tier has."""
    context = ReqContext(name)
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, 512 * (place + 1))
    manager.on_new_request(context)
    end = start
    while end < len(keys) and manager.lookup(keys[end], context) is LookupResult.HIT:
        end += 1
    if end > start:
        manager.prepare_load(keys[start:end], context)
        manager.complete_load(keys[start:end], context)
    if end < len(keys):
        output = manager.prepare_store(keys[end:], context)
        if output is not None and output.keys_to_store:
            manager.complete_store(output.keys_to_store, context)
    manager.on_request_finished(context)
    return end - start


def replay(prompts: list[list[OffloadKey]], policy: str, num_chunks: int, gpu: int, first: int) -> tuple[float, float]:
    """The share of hits of the requests from `first` on, and microseconds a chunk of all."""
    manager = CPUOffloadingManager(num_chunks, policy, None if policy in THEIRS else MODULE)
    front, asked, found, total = Front(gpu), 0, 0, 0
    began = time.perf_counter()
    for number, keys in enumerate(prompts):
        start = front.num_hits(keys)
        hits = serve(manager, keys, start, str(number))
        total += len(keys)
        if number >= first:
            asked += len(keys) - start
            found += hits
    return 100 * found / max(asked, 1), 1e6 * (time.perf_counter() - began) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--gpu", type=int, default=0, metavar="CHUNKS")
    parser.add_argument("--from", type=float, default=0.0, dest="start", metavar="SHARE")
    given = parser.parse_args()
    for source in given.traces:
        prompts = prompts_of(source)
        num_contents = len({key for keys in prompts for key in keys})
        sizes = [max(int(share * num_contents), 1) for share in SHARES]
        print(f"\n**{source.rpartition('/')[2]}**: {len(prompts):,} requests, {num_contents:,} different chunks\n")
        print(f"| chunks | {' | '.join(f'{size:,}' for size in sizes)} | us a chunk |\n|{'---|' * (len(sizes) + 2)}")
        for policy in POLICIES:
            rows = [replay(prompts, policy, size, given.gpu, int(given.start * len(prompts))) for size in sizes]
            cells = [f"{rate:.2f}" for rate, _ in rows] + [f"{rows[-1][1]:.1f}"]
            print(f"| {policy} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
