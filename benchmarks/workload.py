"""What is asked of every block manager alike: prompts, pool sizes, and the requests of a trace. Needs numpy alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice

import numpy as np

BLOCK_SIZE = 16
PROMPT_BLOCKS = 750
ROUNDS = 7
SIZES = (10_000, 100_000, 1_000_000)
#: Each hash id of a Mooncake trace stands for this many distinct tokens.
TOKENS_A_HASH = 512


def size_name(num_blocks: int) -> str:
    return f"{num_blocks // 1000}k" if num_blocks < 1_000_000 else f"{num_blocks // 1_000_000}M"


def prompts_for(num_blocks: int, seed: int) -> list[np.ndarray]:
    """As many prompts of 750 blocks as the pool caches, of random tokens."""
    rng = np.random.default_rng(seed)
    count = (num_blocks - 1) // PROMPT_BLOCKS
    return [rng.integers(0, 128_000, PROMPT_BLOCKS * BLOCK_SIZE, dtype=np.int32) for _ in range(count)]


def sample(items: list, at_most: int, seed: int) -> list:
    """At least `at_most` draws that visit items in random order, so that nothing is still in the caches by chance."""
    chooser = random.Random(seed)
    drawn: list = []
    while len(drawn) < at_most:
        drawn += chooser.sample(items, len(items))
    return drawn[:at_most]


def prompt_of(request: dict) -> np.ndarray:
    """The prompt's tokens: 512 for each hash id, cut to the prompt's length."""
    ids = np.array(request["hash_ids"], dtype=np.int64)
    tokens = (ids[:, None] * TOKENS_A_HASH + np.arange(TOKENS_A_HASH)).reshape(-1)
    return tokens[: request["input_length"]].astype(np.int32)


def read_requests(path: str, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Prompt and output tokens of the first `count` requests; output tokens never match a later prompt."""
    unique = 2**30
    with open(path) as lines:
        for line in islice(lines, count):
            request = json.loads(line)
            length = max(request["output_length"], 1)
            yield prompt_of(request), np.arange(unique, unique + length, dtype=np.int64)
            unique += length
