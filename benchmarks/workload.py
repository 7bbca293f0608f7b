"""What is asked of every block manager alike: prompts, pool sizes, and the requests of a trace. Needs numpy alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

BLOCK_SIZE = 16
PROMPT_BLOCKS = 750
ROUNDS = 7
SIZES = (10_000, 100_000, 1_000_000)
#: How many tokens a hash id of a trace stands for where its line does not say.
TOKENS_A_HASH = 512
#: Prompts have smaller tokens in each block's first place, outputs have greater ones: no prompt hits an output.
FIRST_OUTPUT_TOKEN = 2**30
#: In the folder that every process is given: the trace, and for each size the order in which it left the free blocks.
TRACE_FILE, ORDER_FILE = "trace.jsonl", "aged-{}.npy"


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


@dataclass(frozen=True)
class Request:
    """One line of a trace: its tokens are made when they are asked for."""

    number: int
    hash_ids: np.ndarray
    tokens_a_hash: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks for prompt and output."""
        return -(-(self.num_prompt_tokens + self.num_output_tokens) // BLOCK_SIZE)

    def prompt(self) -> np.ndarray:
        """Tokens that are equal where the ids are: each block's first two name the id, the others its place in it."""
        tokens = np.tile(np.arange(self.tokens_a_hash, dtype=np.int32), (len(self.hash_ids), 1))
        tokens[:, 0::BLOCK_SIZE] = (self.hash_ids % FIRST_OUTPUT_TOKEN)[:, None]
        tokens[:, 1::BLOCK_SIZE] = (self.hash_ids // FIRST_OUTPUT_TOKEN)[:, None]
        return tokens.reshape(-1)[: self.num_prompt_tokens]

    def output(self) -> np.ndarray:
        """Tokens that are in no prompt, and in no output of the next 2**30 requests."""
        return np.full(self.num_output_tokens, FIRST_OUTPUT_TOKEN + self.number % FIRST_OUTPUT_TOKEN, np.int32)


def read_requests(path: str, start: int = 0, stop: int | None = None) -> Iterator[Request]:
    """The requests of a file in Mooncake's form: JSON lines with hash_ids, input_length and output_length."""
    with open(path) as lines:
        for number, line in enumerate(islice(lines, start, stop), start):
            fields = json.loads(line)
            ids = np.array(fields["hash_ids"], dtype=np.int64)
            tokens_a_hash = fields.get("hash_block_size", TOKENS_A_HASH)
            prompt = min(fields["input_length"], len(ids) * tokens_a_hash)
            yield Request(number, ids, tokens_a_hash, prompt, max(fields["output_length"], 1))
