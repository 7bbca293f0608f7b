"""Ranks as processes, killed at random moments; and the real model's tokens on one, two and three ranks.

    python -m tests.ranks                  # 30 kills, about 15 s each on a busy machine
    python -m tests.ranks --kills 100 --seed 7
    python -m tests.ranks --kills 0        # only the real model

A kill -9 hits any rank, rank 0 too: while processes start, load, meet, are tested, or in the middle of steps. All
processes must end soon after, with at most one sentence each and no traceback. In half of the programs the ranks have a
tier in a folder that outlives them: tokens must be the model's, and at the end no object there may be damaged.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from blockyard_testing.places import child_environment
from blockyard_testing.rank_loop import RankLoop, children

#: Kills fall within this time of the first process's start, or at a step.
_START_SECONDS = 12.0
_MOST_STEPS = 60


def kill_one(rng: random.Random, folder: str) -> str:
    """Run one program with one kill; return the counts. Raises `AssertionError` for leftovers or bad messages."""
    size = rng.choice((2, 3))
    with_tier = (folder,) if rng.random() < 0.5 else ()
    loop = RankLoop(size, rng.choice(("llama-gqa", "smollm2")), *with_tier)
    pids = loop.wait_for_ranks()
    began = time.monotonic()
    if rng.random() < 0.5:
        loop.wait_for_steps(rng.randrange(_MOST_STEPS))
        time.sleep(rng.random() * 0.02)
    else:
        time.sleep(rng.random() * _START_SECONDS)
    victim = rng.randrange(size)
    seen = f"{size} ranks, {'a' if with_tier else 'no'} tier, rank {victim} killed after "
    seen += f"{time.monotonic() - began:.2f} s and {len(loop.lines)} lines"
    pids = children(loop.process.pid) or pids
    pid = [loop.process.pid, *pids][victim]
    os.kill(pid, signal.SIGKILL)
    struck = time.monotonic()
    status, said = loop.end_of(pids)
    said = [line for line in said if line]
    seen += f": all gone after {time.monotonic() - struck:.2f} s, status {status}, said {said}"
    if victim:
        assert status == 2, seen
        assert said == [f"blockyard: rank {victim} (process {pid}) was killed by SIGKILL"], seen
    else:
        assert status == -signal.SIGKILL, seen
        allowed = {f"blockyard: rank {rank} ends: rank 0 has ended" for rank in range(1, size)}
        assert set(said) <= allowed, seen
        assert len(said) == len(set(said)), seen
    return seen


def real_model() -> None:
    """Compare SmolLM2's greedy tokens on one, two and three ranks."""
    from blockyard_engine import Engine, SamplingParams, demo_model_path

    asked = ("What is the capital of France?", "Count from one to ten.", "Why is the sky blue?")
    chats = [[{"role": "user", "content": text}] for text in asked]
    found = []
    for shared, size in (
        ("tensor_parallel", 1),
        ("tensor_parallel", 2),
        ("tensor_parallel", 3),
        ("context_parallel", 2),
    ):
        engine = Engine.from_pretrained(demo_model_path(), num_blocks=60, **{shared: size})
        began = time.perf_counter()
        results = engine.generate(chats, SamplingParams(max_tokens=24))
        seconds = time.perf_counter() - began
        engine.cache.check()
        engine.close()
        found.append([result.token_ids for result in results])
        num_bytes = engine.kv_cache.bytes_per_block / engine.cache.block_size
        print(
            f"{shared} {size}: {seconds:.1f} s, {num_bytes:.0f} bytes a token on rank 0, {results[0].text!r}",
            flush=True,
        )
    assert all(tokens == found[0] for tokens in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.kills):
            print(number, kill_one(rng, folder), flush=True)
        if options.kills:
            command = [sys.executable, "-m", "blockyard", "tier", "verify", f"file:{folder}"]
            subprocess.run(command, check=True, cwd=None, env=child_environment())
    if options.kills == 0:
        real_model()
    return 0


if __name__ == "__main__":
    sys.exit(main())
