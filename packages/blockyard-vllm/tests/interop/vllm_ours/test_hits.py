"""What is hit: collisions of hashes, and the order of eviction through vLLM's scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from .engine import BLOCK_SIZE, LEVELS, Engine, request_of, token_of


def colliding(_: Any) -> bytes:
    """A hash function under which all blocks look alike."""
    return b"c" * 32


@pytest.mark.parametrize(("level", "wrong_tokens"), [("stock", 32), ("names", 32), ("tokens", 0)])
def test_colliding_hash_gives_no_hit(level: str, wrong_tokens: int) -> None:
    """Two prompts of other tokens: by vLLM's hashes the second one hits the first one's blocks."""
    hasher = get_request_block_hasher(BLOCK_SIZE, colliding)
    engine = Engine(level, 50)
    for number in range(2):
        engine.add(request_of(f"r{number}", list(range(100 * number, 100 * number + 40)), 2, hasher))
        engine.drain()
    assert engine.hits == wrong_tokens
    engine.require_empty()


def covering_one_more(request: Any) -> list[bytes]:
    """Hashes that cover the token behind their block too, as vLLM 0.33 has them for drafters."""
    tokens, known = list(request.all_token_ids), len(request.block_hashes)
    return [sha256(tokens[: end + 1]) for end in range((known + 1) * BLOCK_SIZE, len(tokens), BLOCK_SIZE)]


def test_hashes_that_cover_later_tokens_need_level_names() -> None:
    """A full block waits for the token that its hash covers, and is hit only with that token behind it."""
    engine = Engine("tokens", 50)
    prompt = list(range(2 * BLOCK_SIZE))
    engine.add(request_of("first", prompt, 3, covering_one_more))
    engine.drain()
    for number, (behind, num_hits) in enumerate([(token_of("first", 2 * BLOCK_SIZE), 2), (7, 1)]):
        before = engine.hits
        engine.add(request_of(f"r{number}", [*prompt, behind, 9], 1, covering_one_more))
        engine.drain()
        assert engine.hits - before == num_hits * BLOCK_SIZE
    engine.require_empty()


@pytest.mark.parametrize("level", LEVELS)
def test_equal_tokens_are_hit_on_both_levels(level: str) -> None:
    """So the test above fails where a level hits nothing at all."""
    engine = Engine(level, 50)
    for number in range(2):
        engine.add(request_of(f"r{number}", list(range(40)), 2))
        engine.drain()
    assert engine.hits == 32
    engine.require_empty()


@pytest.mark.parametrize("seed", range(3))
def test_eviction_order_equals_vllms(seed: int) -> None:
    """After each request the free queue is the same, block by block, and so is what each block caches."""
    source = random.Random(seed)
    prompts = [[source.randrange(50_000) for _ in range(source.randrange(20, 150))] for _ in range(12)]
    engines = [Engine(level, 40, max_model_len=512) for level in ("stock", *LEVELS)]
    for number in range(80):
        tokens = source.choice(prompts)
        tokens = tokens[: source.randrange(10, len(tokens) + 1)]
        for engine in engines:
            engine.add(request_of(f"r{number}", list(tokens), number % 3 + 1))
            engine.drain()
        queues = [
            [
                (block.block_id, block.block_hash)
                for block in engine.manager.block_pool.free_block_queue.get_all_free_blocks()
            ]
            for engine in engines
        ]
        assert queues[1] == queues[0]
        assert queues[2] == queues[0]
    assert engines[0].hits == engines[1].hits == engines[2].hits > 0
    for engine in engines:
        engine.require_empty()
