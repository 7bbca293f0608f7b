"""Hits of every policy at several sizes on the shipped trace, counted once: `python -m tests.golden` prints new ones.

A change of a policy shows here, wanted or not. Hits of blocks, one request after another, and of tokens through the
real manager with blocks of 16.
"""

from __future__ import annotations

from blockyard.core.policies import POLICIES
from blockyard_lab import read_references
from blockyard_lab.curve import count_hits
from blockyard_lab.policy_names import OPTIMUM
from blockyard_lab.replay import ReplayOptions, replay
from blockyard_lab.traces import open_trace

SIZES = (500, 2000, 8000, 16000)

GOLDEN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "lru": ((3562, 9898, 15631, 16537), (50720, 148384, 243664, 260720)),
    "fifo": ((2854, 7869, 13375, 16272), (42256, 119008, 207872, 233040)),
    "lfu": ((8027, 12477, 15793, 16537), (96176, 196736, 245760, 263472)),
    "s3fifo": ((6660, 11836, 15793, 16537), (78976, 187616, 245760, 263472)),
    "arc": ((7030, 12008, 15793, 16537), (85104, 187072, 245760, 263472)),
    "score": ((3886, 11081, 15676, 16537), (52416, 159744, 244512, 260976)),
    "density": ((6456, 11526, 15776, 16455), (83680, 190992, 238368, 263472)),
    "optimum": ((10328, 15511, 16644, 16644), ()),
}


def count(policy: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(block hits, token hits) at each size; no pool can run the optimum, so it has no token hits."""
    trace = open_trace("small")
    references = read_references(trace)
    blocks = tuple(count_hits(references, policy, size) for size in SIZES)
    if policy == OPTIMUM:
        return blocks, ()
    options = [ReplayOptions(size, policy=policy, find_causes=False) for size in SIZES]
    return blocks, tuple(replay(trace, option).num_hit_tokens for option in options)


if __name__ == "__main__":
    for name in (*POLICIES, OPTIMUM):
        print(f'    "{name}": {count(name)},')
