"""`python generation.py MODEL REQUESTS NEW BLOCKS sync|async`: one model in vLLM, in one process.

Run by vLLM's interpreter, with Blockyard on its path: stock vLLM, then both levels. Two rounds of the same greedy
requests, two thirds of which begin alike. Prints a line of JSON for each: a digest of all tokens, cached tokens,
preemptions, microseconds a step in the block manager. Exit status 1 if tokens, hits or preemptions differ, or if a
block leaked.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

PREFIX_TOKENS = 150
BLOCK_SIZE = 32
CALLS = ("allocate_slots", "get_computed_blocks", "free", "cache_blocks", "get_blocks", "take_new_block_ids")


def requests_of(count: int) -> list[dict[str, list[int]]]:
    """Prompts of random tokens, the same every time."""
    source = random.Random(5)
    prefix = [source.randrange(1000, 40000) for _ in range(PREFIX_TOKENS)]
    rests = [[source.randrange(1000, 40000) for _ in range(source.randrange(20, 90))] for _ in range(count)]
    return [{"prompt_token_ids": (prefix if place % 3 else []) + rest} for place, rest in enumerate(rests)]


def count_time(manager: Any, spent: dict[str, float]) -> None:
    """Let the manager's calls add up their time; the wrappers cost a microsecond a call in all runs."""
    for name in CALLS:
        call = getattr(manager, name)

        def timed(*args: Any, _call: Any = call, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return _call(*args, **kwargs)
            finally:
                spent["seconds"] += time.perf_counter() - start

        setattr(manager, name, timed)


def play(
    model: str, level: str, num_requests: int, num_new: int, num_blocks: int, asynchronous: bool
) -> dict[str, Any]:
    """Two rounds on one engine."""
    # A CPU's engine plans synchronously, whichever scheduler it has.
    settings: dict[str, Any] = {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"}
    if not asynchronous:
        settings = {}
    if level != "stock":
        settings["scheduler_cls"] = f"blockyard_vllm.{'AsyncScheduler' if asynchronous else 'Scheduler'}"
        settings["additional_config"] = {"blockyard": {"level": level}}
    llm = LLM(
        model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks,
        max_model_len=512,
        max_num_seqs=num_requests,
        async_scheduling=False,
        disable_log_stats=False,
        **settings,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    manager = scheduler.kv_cache_manager
    spent, seen = {"seconds": 0.0}, {"steps": 0, "preempted": 0}
    count_time(manager, spent)
    step, preempt = scheduler.schedule, scheduler._preempt_request

    def schedule(*args: Any, **kwargs: Any) -> Any:
        seen["steps"] += 1
        return step(*args, **kwargs)

    def preempt_request(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = schedule, preempt_request
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    digest, cached = hashlib.sha256(), []
    for _ in range(2):
        outputs = llm.generate(requests_of(num_requests), params, use_tqdm=False)
        digest.update(json.dumps([list(output.outputs[0].token_ids) for output in outputs]).encode())
        cached.append(sum(output.num_cached_tokens or 0 for output in outputs))
    free = manager.block_pool.get_num_free_blocks()
    for pool in (getattr(manager, "pool", None), getattr(manager.block_pool, "named", None)):
        if pool is not None:
            pool.check()
    reset = manager.reset_prefix_cache()
    return {
        "level": level,
        "scheduler": type(scheduler).__name__,
        "tokens": digest.hexdigest()[:12],
        "cached": cached,
        "preempted": seen["preempted"],
        "steps": seen["steps"],
        "us_a_step": round(1e6 * spent["seconds"] / seen["steps"], 1),
        "leaked": num_blocks - 1 - free,
        "reset": bool(reset),
    }


def main() -> int:
    """Play all three and compare."""
    model, num_requests, num_new, num_blocks = sys.argv[1], *map(int, sys.argv[2:5])
    asynchronous = sys.argv[5] == "async"
    found = []
    for level in ("stock", "tokens", "names"):
        found.append(play(model, level, num_requests, num_new, num_blocks, asynchronous))
        print(json.dumps(found[-1]), flush=True)
        gc.collect()
    same = [[one[name] for name in ("tokens", "cached", "preempted", "steps")] for one in found]
    sound = all(one["leaked"] == 0 and one["reset"] for one in found)
    return 0 if sound and same[0] == same[1] == same[2] else 1


if __name__ == "__main__":
    sys.exit(main())
