"""A manager in the middle of its work, on which bad input is tried."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from blockyard import BlockyardError, CacheConfig, KVCacheManager, LoRA

from .snapshot import snapshot

BLOCK_SIZE = 4
NUM_BLOCKS = 13
NUM_ROWS = 4
MODEL_LEN = 40


class Scene:
    """A manager in the middle of its work: one sequence decoding, one reserved, one waiting; another finished."""

    def __init__(self) -> None:
        config = CacheConfig(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=NUM_ROWS, max_model_len=MODEL_LEN, watermark=0.0)
        self.cache = KVCacheManager(config)
        self.dead = self.cache.allocate([9, 9, 9, 9, 9], holder="finished")
        self.cache.reserve([self.dead], 5)
        self.cache.commit([self.dead], 5)
        self.cache.free(self.dead)
        self.decoding = self.cache.allocate([1, 2, 3, 4, 5], holder="decoding")
        self.cache.reserve([self.decoding], 5)
        self.cache.commit([self.decoding], 5, [6])
        self.reserved = self.cache.allocate([1, 2, 3, 4, 7, 7, 7, 7, 8], holder="reserved", extra_keys=(LoRA("a"),))
        self.cache.reserve([self.reserved], 3)
        self.waiting = self.cache.allocate([1, 2, 3, 4, 7, 7, 7, 7, 8], holder="waiting", extra_keys=(LoRA("a"),))

    def refused(self, error: type[BlockyardError], call: Callable[[], object], *parts: object) -> BlockyardError:
        """`call` raises exactly `error`, its message holds all `parts`, and the whole state is as before."""
        before = snapshot(self.cache)
        with pytest.raises(error) as caught:
            call()
        assert type(caught.value) is error
        assert snapshot(self.cache) == before
        self.cache.check()
        for part in parts:
            assert re.search(rf"(?<![\w.]){re.escape(str(part))}(?!\w)", str(caught.value)), (part, str(caught.value))
        return caught.value
