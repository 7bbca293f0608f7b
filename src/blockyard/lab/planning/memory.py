"""Where the memory of one GPU goes: weights, activations, states, and what is left for blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ...arguments import require_number
from ...config import MAX_BLOCKS, MAX_MODEL_LEN
from ...errors import InvalidArgument
from ...sizing import KVCacheSpec, num_gpu_blocks
from .activations import Activations
from .limits import GIB, require_gib

_MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """Bytes of one GPU.

    total_bytes: its memory. usable_bytes: the share of it that may be used. weight_bytes: this rank's part of the
    weights. activation_bytes: all else that a step takes. state_bytes: states of running sequences, outside the blocks.
    """

    total_bytes: int
    utilization: float
    weight_bytes: int
    activation_bytes: int
    state_bytes: int

    @property
    def usable_bytes(self) -> int:
        """The share of the total that may be used."""
        return int(self.total_bytes * self.utilization)

    @property
    def cache_bytes(self) -> int:
        """What is left for blocks; negative by what is missing."""
        return self.usable_bytes - self.weight_bytes - self.activation_bytes - self.state_bytes

    def num_blocks(self, spec: KVCacheSpec, max_num_seqs: int, extra_bytes: int = 0) -> int:
        """Blocks on this GPU, the null block included, with `extra_bytes` more for them; at most 2**27. O(layers)."""
        if extra_bytes:
            return min(max(self.cache_bytes + extra_bytes, 0) // spec.bytes_per_block, MAX_BLOCKS)
        peak = self.weight_bytes + self.activation_bytes
        found = num_gpu_blocks(self.total_bytes, peak, self.utilization, spec=spec, max_num_seqs=max_num_seqs)
        return min(found, MAX_BLOCKS)


@dataclass(frozen=True, slots=True)
class GpuAssumptions:
    """What is given about a GPU and the model's weights, in GiB; utilization is a share, above 0 and at most 1."""

    gpu_memory_gib: float
    weights_gib: float
    activations: Activations
    utilization: float

    def __post_init__(self) -> None:
        require_gib("gpu_memory_gib", self.gpu_memory_gib, above_zero=True)
        require_gib("weights_gib", self.weights_gib)
        share = require_number("gpu_memory_utilization", self.utilization)
        if not 0 < share <= 1:
            raise InvalidArgument(f"gpu_memory_utilization is {share}; it must be above 0 and at most 1")

    def budget(self, spec: KVCacheSpec, max_num_seqs: int) -> GpuBudget:
        """The bytes of one of the ranks of `spec`, which share the weights equally. O(layers)."""
        return GpuBudget(
            total_bytes=int(self.gpu_memory_gib * GIB),
            utilization=self.utilization,
            weight_bytes=-(-int(self.weights_gib * GIB) // spec.tensor_parallel_size),
            activation_bytes=self.activations.bytes_on(spec.tensor_parallel_size),
            state_bytes=max_num_seqs * spec.state_bytes_per_sequence,
        )

    def smallest_tensor_parallel(self, spec: KVCacheSpec, num_tokens: int, max_num_seqs: int) -> int:
        """The smallest power of two of ranks that can hold a request of `num_tokens`; 0 if 1024 cannot. O(layers)."""
        ranks = 1
        while ranks <= _MAX_RANKS:
            split = _split(spec, ranks)
            if split is not None and self._holds(split, num_tokens, max_num_seqs):
                return ranks
            ranks *= 2
        return 0

    def _holds(self, spec: KVCacheSpec, num_tokens: int, max_num_seqs: int) -> bool:
        num_blocks = self.budget(spec, max_num_seqs).num_blocks(spec, max_num_seqs)
        return spec.max_concurrent_sequences(num_tokens, num_blocks=num_blocks) > 0


def cached_tokens(spec: KVCacheSpec, num_blocks: int) -> int:
    """Tokens whose keys and values, of every layer, that many blocks can keep. O(groups).

    Windows are not used: each token takes its share of a block in every group, so the answer is never too large.
    """
    sizes = [group.block_size for group in spec.groups]
    product = 1
    for size in sizes:
        product *= size
    # num_blocks / sum(1 / size), in integers.
    return min(num_blocks * product // sum(product // size for size in sizes), MAX_MODEL_LEN * MAX_BLOCKS)


def _split(spec: KVCacheSpec, ranks: int) -> KVCacheSpec | None:
    try:
        return dataclasses.replace(spec, tensor_parallel_size=ranks)
    except InvalidArgument:
        return None
