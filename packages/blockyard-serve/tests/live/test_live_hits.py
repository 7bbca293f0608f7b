"""Which prompts hit a block, compared with a record of each block's content and each prompt's hits."""

from __future__ import annotations

import random

from blockyard import CacheConfig, CacheSalt, KVCacheManager
from blockyard_serve.live.call_queue import EngineStatus
from blockyard_serve.live.prompt_log import (
    MAX_BEGINNINGS,
    MAX_PROMPTS,
    PromptLog,
    beginnings_with,
    hits_answer,
    read_hits,
)
from blockyard_testing.seeds import run_seed

SIZE = 4


def told(cache: KVCacheManager, log: PromptLog, block_id: int) -> dict[str, object]:
    tokens = cache.block(block_id).token_ids
    begun = beginnings_with(log.latest(), tokens, SIZE)
    return hits_answer(read_hits(block_id, begun, cache, EngineStatus()), len(log.latest()))


def test_hits_of_a_block_are_those_of_its_content() -> None:
    """Blocks with equal tokens after a different prefix or under another salt count separately."""
    cache = KVCacheManager(CacheConfig(num_blocks=40, block_size=SIZE, max_num_seqs=4, max_model_len=64))
    log, draw = PromptLog(), random.Random(run_seed())
    holds: dict[int, tuple[object, ...]] = {}
    asked: list[tuple[list[int], int, tuple[CacheSalt, ...]]] = []
    num_hit_blocks = 0
    for number in range(2 * MAX_PROMPTS):
        keys = draw.choice([(), (CacheSalt("a"),)])
        tokens = [token for _ in range(draw.randrange(1, 5)) for token in [draw.randrange(2)] * SIZE] + [9]
        seq = cache.allocate(tokens, extra_keys=keys)
        num_hit = int(cache.num_computed_tokens(seq))
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        for place, block in enumerate(cache.block_ids(seq).tolist()[: len(tokens) // SIZE]):
            holds[block] = (*tokens[: (place + 1) * SIZE], keys)
        cache.free(seq)
        log.note(tokens, num_hit, keys, f"request {number}")
        asked.append((tokens, num_hit, keys))
        if draw.random() < 0.1:
            for block in range(1, 40):
                if not cache.block(block).is_cached:
                    continue
                *prefix, wanted_keys = holds[block]
                hits = [
                    place
                    for place, (tokens, num_hit, keys) in enumerate(asked[-MAX_PROMPTS:])
                    if num_hit >= len(prefix) and tokens[: len(prefix)] == prefix and keys == wanted_keys
                ]
                found = told(cache, log, block)
                latest = len(log.latest())
                assert found["num"] == len(hits), (block, prefix)
                assert found["ago"] == (latest - 1 - hits[-1] if hits else None)
                first = number + 1 - latest
                assert found["names"] == [f"request {first + place}" for place in reversed(hits)][:8]
                num_hit_blocks += bool(hits)
    assert num_hit_blocks > 50


def test_beginnings_are_bounded() -> None:
    log = PromptLog()
    for number in range(MAX_PROMPTS):
        log.note([*[number] * SIZE, *[7] * (1024 - SIZE)], 1024)
    begun = beginnings_with(log.latest(), [7] * SIZE, SIZE)
    assert len(begun) == MAX_BEGINNINGS
    assert all(len(each.ages) == 1 for each in begun)
    assert beginnings_with([], [7] * SIZE, SIZE) == []
