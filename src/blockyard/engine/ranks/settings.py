"""What rank 0 says of the cache, and the tensors and the runner that a rank makes from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ...config import CacheConfig
from ...storage import KVCache
from ..borrowing import BorrowedModel
from ..memory.account import weights_bytes
from ..memory.finding import MemoryFinder
from ..memory.largest_step import StepSizes
from ..memory.meter import meter_of
from ..runner import ModelRunner
from ..shape import ModelShape
from .group import ProcessGroup


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Of an engine's cache, as its arguments say it. num_blocks: None for as many as fit on every rank."""

    block_size: int
    num_blocks: int | None
    num_cpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    logits_per_seq: int
    gpu_memory_utilization: float
    attention_backend: str

    @classmethod
    def of(
        cls,
        block_size: int,
        config: CacheConfig,
        sizes: StepSizes,
        is_sized: bool,
        utilization: float,
        attention_backend: str,
    ) -> CacheSettings:
        """Of rank 0's own. block_size: of a rank's tensors. is_sized: whether its number of blocks is final."""
        return cls(
            block_size,
            config.num_blocks if is_sized else None,
            config.num_cpu_blocks,
            config.max_num_seqs,
            sizes.max_num_batched_tokens,
            sizes.logits_per_seq,
            utilization,
            attention_backend,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def make(
        self, borrowed: BorrowedModel, shape: ModelShape, group: ProcessGroup
    ) -> tuple[CacheConfig, KVCache, ModelRunner]:
        """Config, tensors and runner of a rank other than 0. All ranks find out at the same time how many blocks fit.

        Raises what `Engine` raises for them.
        """

        def runner_on(kv_cache: KVCache) -> ModelRunner:
            return ModelRunner(borrowed, kv_cache, shape, self.attention_backend)

        spec = shape.spec(self.block_size, borrowed.dtype)
        config = spec.cache_config(
            self.num_blocks or 2,
            max_num_seqs=self.max_num_seqs,
            max_model_len=shape.max_model_len,
            num_cpu_blocks=self.num_cpu_blocks,
        )
        tensors = shape.tensors(spec, borrowed.dtype, borrowed.device)
        if self.num_blocks is None:
            weights = weights_bytes(borrowed.model)
            finder = MemoryFinder(spec, config, tensors, runner_on, weights, self.gpu_memory_utilization)
            sizes = StepSizes(self.max_num_batched_tokens, self.max_num_seqs, shape.max_model_len, self.logits_per_seq)
            config, _ = finder.find(meter_of(borrowed.device), sizes)
        config = replace(config, num_blocks=group.least(config.num_blocks))
        kv_cache = KVCache(config.num_blocks, self.block_size, num_cpu_blocks=self.num_cpu_blocks, **tensors)
        return config, kv_cache, runner_on(kv_cache)
