"""Plans of requests ask this of an engine, as values: the engine may be in another process."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard_engine import Engine
from blockyard_engine.scheduling import CacheLimits


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The sizes of a model and of the cache it is served from.

    context: tokens of the longest sequence that the model knows. num_blocks: of the pool. max_num_seqs: sequences that
    run at once. hash_block_size: tokens of a block that can be hit. limits: what an empty cache can carry to its end.
    """

    context: int
    vocab_size: int
    num_blocks: int
    max_num_seqs: int
    hash_block_size: int
    limits: CacheLimits

    @classmethod
    def of(cls, engine: Engine) -> ServedModel:
        """Read an engine. O(1)."""
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
        """Return the tokens of the longest sequence that is served: the model's limit, or what the pool can hold."""
        return self.limits.max_model_len
