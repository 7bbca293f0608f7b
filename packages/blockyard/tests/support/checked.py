"""A manager that proves its laws after every call, and the few steps that most tests are made of."""

from __future__ import annotations

from typing import Any

from blockyard import KVCacheManager
from blockyard.config import cache_config


def prompt(number: int, num_tokens: int) -> list[int]:
    """Prompts of different numbers share no block."""
    return [100 * number + position for position in range(num_tokens)]


class Checked:
    """Passes everything on to a `KVCacheManager` and calls `check()` after each call, refused ones included."""

    def __init__(self, num_blocks: int = 20, block_size: int = 4, **settings: Any) -> None:
        limits = {"max_num_seqs": 8, "max_model_len": 64, "watermark": 0.0}
        if not settings.get("groups"):
            limits["block_size"] = block_size
        self.cache = KVCacheManager(cache_config(num_blocks, **{**limits, **settings}))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cache, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return value(*arguments, **named)
            finally:
                self.cache.check()

        return call

    def compute(self, seq: int, next_tokens: list[int] | None = None) -> None:
        """Reserve and commit all that `seq` still lacks, and append `next_tokens`."""
        missing = self.num_tokens(seq) - self.num_computed_tokens(seq)
        assert self.reserve([seq], missing).all_fit
        self.commit([seq], missing, [next_tokens] if next_tokens else None)

    def compute_some(self, seq: int, count: int) -> None:
        """Reserve and commit the next `count` tokens of `seq`."""
        assert self.reserve([seq], count).all_fit
        self.commit([seq], count)

    def try_compute(self, seq: int) -> bool:
        """The same, if there are blocks for it and nothing to wait for."""
        missing = self.num_tokens(seq) - self.num_computed_tokens(seq)
        fits = bool(self.reserve([seq], missing).all_fit)
        if fits:
            self.commit([seq], missing)
        return fits

    def prefilled(self, tokens: list[int], next_tokens: list[int] | None = None) -> int:
        """A sequence whose prompt is computed."""
        seq = self.allocate(tokens)
        self.compute(seq, next_tokens)
        return seq

    def tokens(self, seq: int) -> list[int]:
        return self.token_ids(seq).tolist()

    def row(self, seq: int) -> list[int]:
        return self.block_ids(seq).tolist()

    def free_order(self) -> list[int]:
        """The free blocks, in the order in which they will be allocated."""
        return self.cache.pool.free_block_ids().tolist()

    def state(self, seq: int) -> tuple[int, int]:
        """Known and computed tokens."""
        return self.num_tokens(seq), self.num_computed_tokens(seq)

    def ref_counts(self, seq: int) -> list[int]:
        return [int(self.cache.pool.ref_counts()[block]) for block in self.row(seq)]
