"""`python benchmarks/vllm_managers.py`, run by vLLM's interpreter with Blockyard on its path: no model, three managers.

vLLM's own block manager, and ours on both levels, in turn: N requests with prompts of 100 tokens are admitted and
decode 64 tokens each, all in a step; two thirds of the prompts begin with the same 64 tokens. Microseconds a step,
prompts included, the median of rounds that take turns: of the thread's own time, which other programs' turns do not
count in. In brackets the share of vLLM's, by the medians and by the least. Then the same with a second group of layers
that slide, and with one that keeps states, which level "tokens" does not serve.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager as Stock
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from blockyard_vllm import Options
from blockyard_vllm.scheduler import make_manager

BLOCK_SIZE = 16
LEVELS = ("stock", "tokens", "names")
NUM_BLOCKS = 20_000
PROMPT, SHARED, DECODED, ROUNDS, WINDOW = 100, 64, 64, 5, 48


def config(second: str) -> KVCacheConfig:
    """One group of full attention, perhaps one with a window or with states."""
    shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
    if second == "states":
        states = MambaSpec(BLOCK_SIZE, ((BLOCK_SIZE * 2,),), (torch.float32,), mamba_cache_mode="align")
        groups.append(KVCacheGroupSpec(["layer with a state"], states))
    if second == "a window":
        groups.append(KVCacheGroupSpec(["sliding layer"], SlidingWindowSpec(**shape, sliding_window=WINDOW)))
    interval = 0 if second else None  # vLLM's default
    return KVCacheConfig(NUM_BLOCKS, [], groups, prefix_cache_retention_interval=interval)


def manager_of(level: str, second: str) -> Any:
    """Fresh."""
    given = {"kv_cache_config": config(second), "max_model_len": 8192, "scheduler_block_size": BLOCK_SIZE}
    given |= {"hash_block_size": BLOCK_SIZE, "enable_caching": True}
    return Stock(**given) if level == "stock" else make_manager(Options(level=level), **given)


def requests_of(count: int, seed: int) -> list[Request]:
    """Hashed before the clock runs, as an engine hashes them on arrival."""
    source = random.Random(seed)
    shared = [source.randrange(50_000) for _ in range(SHARED)]
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    made = []
    for number in range(count):
        rest = PROMPT - (SHARED if number % 3 else 0)
        tokens = (shared if number % 3 else []) + [source.randrange(50_000) for _ in range(rest)]
        params = SamplingParams(max_tokens=DECODED, temperature=0)
        params.update_from_generation_config({}, eos_token_id=0)
        made.append(Request(f"{seed}-{number}", tokens, params, None, block_hasher=hasher))
    return made


def serve(manager: Any, requests: list[Request]) -> float:
    """Seconds in the manager from admission to the end."""
    spent = 0.0
    clock = time.thread_time
    for request in requests:
        start = clock()
        blocks, num_hits, _ = manager.get_computed_blocks(request)
        new = request.num_tokens - num_hits
        assert manager.allocate_slots(request, new, num_hits, blocks) is not None
        spent += clock() - start
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
    for _ in range(DECODED):
        for request in requests:
            request.append_output_token_ids(7)
        start = clock()
        for request in requests:
            manager.allocate_slots(request, 1)
        spent += clock() - start
        for request in requests:
            request.num_computed_tokens += 1
    start = clock()
    for request in requests:
        manager.free(request)
    return spent + clock() - start


def row(count: int, second: str) -> str:
    """A line of the table."""
    levels = ("stock", "names") if second else LEVELS
    managers = {level: manager_of(level, second) for level in levels}
    times: dict[str, list[float]] = {level: [] for level in levels}
    for number in range(ROUNDS + 1):
        for level, manager in managers.items():
            seconds = serve(manager, requests_of(count, number))
            if number:
                times[level].append(1e6 * seconds / (DECODED + 1))
    medians = {level: statistics.median(found) for level, found in times.items()}
    least = {level: min(found) for level, found in times.items()}
    cells = [f"{medians['stock']:.1f}"]
    for level in LEVELS[1:]:
        shares = [one[level] / one["stock"] for one in (medians, least) if level in one]
        cells.append(f"{medians[level]:.1f} ({shares[0]:.2f}; {shares[1]:.2f})" if shares else "")
    return f"| {count}{f', {second}' if second else ''} | {' | '.join(cells)} |"


def main() -> None:
    """Print a table."""
    init_none_hash(sha256)
    print("| requests | stock us/step | tokens | names |\n|---|---|---|---|")
    for second in ("", "a window", "states"):
        for count in (64, 256, 1024):
            print(row(count, second), flush=True)


if __name__ == "__main__":
    main()
