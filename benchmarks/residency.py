"""`python -m benchmarks.residency`: what following the lives of blocks adds to a step.

Two caches at the same work, one that follows nothing and one that follows every block (`residency_sample=1`), in turns
in one process. A step: all sequences get a token, and with "turnover" one of them ends and another of 64 blocks begins,
half of them hit, in a pool that is full, so that cached blocks are evicted. The least of `--rounds` means of 64 steps,
since others may use the machine.
"""

from __future__ import annotations

import argparse
import time

from blockyard import CacheConfig, KVCacheManager, ObserveConfig

BLOCK_SIZE = 16
PROMPT_BLOCKS = 64
STEPS = 64
#: A decode step that the share is of: a large model's on one device.
STEP_MS = 10.0


class Work:
    """A cache at work, all of whose sequences decode."""

    def __init__(self, num_seqs: int, sample: int) -> None:
        num_blocks = num_seqs * (PROMPT_BLOCKS + 8) * 5 // 4
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs,
            observe=ObserveConfig(residency_sample=sample),
            hash_seed=1,
        )
        self.cache = KVCacheManager(config)
        self.num_steps = self.num_begun = 0
        self.seqs = [self.begin() for _ in range(num_seqs)]

    def begin(self) -> int:
        """A prompt of which the first half was asked before."""
        self.num_begun += 1
        half = PROMPT_BLOCKS * BLOCK_SIZE // 2
        prompt = [self.num_begun % 4, *range(1, half), self.num_begun, *range(half)]
        seq = self.cache.allocate(prompt)
        self.cache.commit([seq], self.cache.reserve([seq]).num_scheduled, [1])
        return seq

    def step(self, turns_over: bool) -> None:
        """One step; the length of a sequence is bounded by its turn to end."""
        self.cache.advance_time(float(self.num_steps))
        self.num_steps += 1
        place = self.num_steps % len(self.seqs)
        if turns_over:
            self.cache.free(self.seqs[place])
            self.seqs[place] = self.begin()
        self.cache.commit(self.seqs, self.cache.reserve(self.seqs).num_scheduled, [7] * len(self.seqs))


def microseconds_a_step(work: Work, turns_over: bool) -> float:
    """The mean of `STEPS` steps."""
    start = time.perf_counter()
    for _ in range(STEPS):
        work.step(turns_over)
    return 1e6 * (time.perf_counter() - start) / STEPS


def measure(num_seqs: int, turns_over: bool, rounds: int) -> None:
    """Print a row."""
    works = [Work(num_seqs, sample) for sample in (0, 1)]
    for work in works:
        for _ in range(4 * num_seqs if turns_over else 1):
            work.step(turns_over)
    least = [float("inf")] * 2
    for _ in range(rounds):
        for number, work in enumerate(works):
            least[number] = min(least[number], microseconds_a_step(work, turns_over))
        if not turns_over:  # sequences would grow out of the pool
            works = [Work(num_seqs, sample) for sample in (0, 1)]
    without, followed = least
    share = 100 * (followed - without) / (1000 * STEP_MS)
    name = "decode, one request ends and one begins" if turns_over else "decode"
    print(f"| {num_seqs} sequences, {name} | {without:.1f} us | {followed:.1f} us | {share:+.3f} % |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.residency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print(f"| a step | follows none | follows every block | of a decode step of {STEP_MS:g} ms |")
    print("|---|---|---|---|")
    for num_seqs in (64, 256):
        for turns_over in (False, True):
            measure(num_seqs, turns_over, options.rounds)


if __name__ == "__main__":
    main()
