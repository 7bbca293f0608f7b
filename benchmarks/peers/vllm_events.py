"""What vLLM's KV events cost: `python -m benchmarks.peers.vllm_events BLOCKS ROUNDS` gives benchmarks.events JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec
import numpy as np
import torch
from vllm import __version__
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from ..workload import BLOCK_SIZE


def manager(on: bool) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(10_000, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        config, 40_000, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE, enable_kv_cache_events=on
    )


def timed(call: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def main() -> None:
    """Medians and leasts are the caller's; these are the seconds of each round."""
    a_step, num_rounds = int(sys.argv[1]), int(sys.argv[2])
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    sampling = SamplingParams(max_tokens=1)
    draw = np.random.default_rng(1)
    managers = {on: manager(on) for on in (False, True)}
    encoder = msgspec.msgpack.Encoder()
    rounds: dict[str, list[float]] = {"off": [], "on": [], "take": [], "encode": []}
    for number in range(8 + num_rounds):
        tokens = draw.integers(0, 100_000, BLOCK_SIZE * a_step).tolist()
        for on, one in managers.items():
            request = Request(f"{number} {on}", tokens, sampling, None, block_hasher=hasher)
            seconds, blocks = timed(lambda one=one, request=request: one.allocate_slots(request, request.num_tokens))
            assert blocks is not None
            one.free(request)
            if number >= 8:
                rounds["on" if on else "off"].append(seconds)
        seconds, events = timed(managers[True].take_events)
        encoding, payload = timed(
            lambda events=events: encoder.encode(KVEventBatch(ts=time.time(), events=events, data_parallel_rank=0))
        )
        assert len(payload) > 30 * a_step
        if number >= 8:
            rounds["take"].append(seconds)
            rounds["encode"].append(encoding)
    json.dump({"version": __version__, "rounds": rounds}, sys.stdout)


if __name__ == "__main__":
    main()
