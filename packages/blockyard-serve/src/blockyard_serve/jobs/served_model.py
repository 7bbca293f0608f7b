"""Sizes of a model that planning needs, as a value: the engine may be in another process."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard_engine import Engine
from blockyard_engine.scheduling import CacheLimits


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Sizes of a model and of the cache that serves it.

    Attributes:
        context: tokens of the longest sequence that the model supports.
        hash_block_size: tokens of a block that can be hit.
        limits: sequences that an empty cache can hold to their end.
    """

    context: int
    vocab_size: int
    num_blocks: int
    max_num_seqs: int
    hash_block_size: int
    limits: CacheLimits

    @classmethod
    def of(cls, engine: Engine) -> ServedModel:
        """Read the sizes of an engine. O(1)."""
        config = engine.cache.config
        return cls(
            context=engine.shape.max_model_len,
            vocab_size=engine.shape.vocab_size,
            num_blocks=engine.kv_cache.num_blocks,
            max_num_seqs=config.max_num_seqs,
            hash_block_size=config.hash_block_size,
            limits=engine.limits,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that the context and the pool allow."""
        return self.limits.max_model_len
