"""Decode steps beside busy tiers: how long a step takes with prompts that are loaded, and with the same in the pool.

    python -m benchmarks.tier_steps [--steps 400] [--tokens 1024] [--every 8]

The demo model decodes four sequences; every few steps a request with a known prompt comes and asks for one token.
off: no tiers, and a pool that holds all prompts. on: a folder has them and the pool does not, so that each is loaded,
and what is decoded is stored. Steps alternate between both engines, so that both meet the same moments of the machine;
ratios are on over off. A step in which a prompt comes in is a step like all others; those until each prompt came once
are left out, in which buffers are touched for the first time. Nothing else should run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from typing import Any

import numpy as np

from blockyard_engine import Engine, SamplingParams
from blockyard_engine.model import demo_model_path
from blockyard_tiers import FileTier

SEQUENCES = 4
PROMPTS = 8


class Side:
    """One engine, its running sequences, and the seconds of its steps."""

    def __init__(self, num_blocks: int, prompts: list[list[int]], tiers: list[Any]) -> None:
        self.engine = Engine.from_pretrained(
            demo_model_path(), num_blocks=num_blocks, max_model_len=4096, tiers=tiers, tier_buffer_bytes=2**29
        )
        self.prompts = prompts
        self.seconds: list[float] = []
        for prompt in prompts:
            self.ask(prompt, 1)
            while self.engine.has_unfinished:
                self.engine.step()
            if self.engine.offload is not None:
                assert self.engine.offload.settle(60.0)
        if tiers:
            self.engine.cache.reset_prefix_cache()
        for first in range(SEQUENCES):
            self.ask([first + 5] * 32, 1000)
        for _ in range(8):
            self.engine.step()

    def ask(self, prompt: list[int], max_tokens: int) -> None:
        self.engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))

    def step(self, number: int, every: int) -> None:
        if number % every == 0:
            self.ask(self.prompts[number // every % PROMPTS], 1)
        begun = time.perf_counter()
        self.engine.step()
        self.seconds.append(time.perf_counter() - begun)


def main() -> None:
    """Print the percentiles of both, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--every", type=int, default=8)
    options = parser.parse_args()
    choose = random.Random(1)
    prompts = [[choose.randrange(1000, 40000) for _ in range(options.tokens + 1)] for _ in range(PROMPTS)]
    running = SEQUENCES * (options.steps // 16 + 8)
    per_prompt = options.tokens // 16 + 2
    with tempfile.TemporaryDirectory() as folder:
        off = Side(running + (PROMPTS + 1) * per_prompt, prompts, [])
        on = Side(running + 2 * per_prompt, prompts, [FileTier(folder, 2**34)])
        for number in range(options.steps):
            for side in (off, on) if number % 2 else (on, off):
                side.step(number, options.every)
        reading = on.engine.offload.read()  # type: ignore[union-attr]
        print(f"loaded {reading.tiers[0].stats.loaded_bytes / 2**20:.0f} MiB, missed {reading.missed}")
        for name, at in (("median", 50), ("p90", 90), ("p99", 99)):
            pair = [float(np.percentile(side.seconds[PROMPTS * options.every :], at)) for side in (off, on)]
            print(f"{name:<7} off {pair[0] * 1e3:6.1f} ms, on {pair[1] * 1e3:6.1f} ms, ratio {pair[1] / pair[0]:.2f}")
        on.engine.close()


if __name__ == "__main__":
    main()
