"""Memory use of an engine, and the number of blocks that fit."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from blockyard import sizing
from blockyard.arguments import require_int
from blockyard.cache_options import MAX_BLOCKS
from blockyard.config import CacheConfig
from blockyard.errors import InvalidArgument
from blockyard.sizing import MAX_BYTES, KVCacheSpec, MemoryProfile

#: Default KV memory of an engine on a CPU, unless its longest sequence needs more.
CPU_KV_BYTES = 2**30
#: Maximum share of the available memory for the default KV memory of all ranks on a CPU.
_CPU_SHARE = 0.5
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory that an engine takes on its device, in bytes.

    Attributes:
        weights_bytes: the model's parameters and buffers.
        kv_bytes: the pool of blocks.
        total_bytes: size of the device; None if it was not read, as on a CPU.
        step_bytes: memory of the largest step without weights and pool; None if no step was run.
        outside_bytes: memory in use outside the engine: kernels, libraries, other processes; None if no step was run.
        state_bytes: working states of running sequences of a hybrid model.
    """

    device: str
    weights_bytes: int
    kv_bytes: int
    total_bytes: int | None = None
    step_bytes: int | None = None
    outside_bytes: int | None = None
    state_bytes: int = 0

    @property
    def left_bytes(self) -> int | None:
        """Unused bytes; None if unknown."""
        if self.total_bytes is None:
            return None
        taken = self.weights_bytes + self.kv_bytes + self.state_bytes
        taken += (self.step_bytes or 0) + (self.outside_bytes or 0)
        return self.total_bytes - taken

    def __str__(self) -> str:
        """Return the memory use as one line, in GiB."""
        parts = [
            ("weights", self.weights_bytes),
            ("largest step", self.step_bytes),
            ("outside the engine", self.outside_bytes),
            ("keys and values", self.kv_bytes),
            ("states", self.state_bytes or None),
            ("left", self.left_bytes),
        ]
        known = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size is not None)
        total = "" if self.total_bytes is None else f" of {_gib(self.total_bytes)}"
        return f"memory of {self.device}, GiB{total}: {known}"


def weights_bytes(model: Any) -> int:
    """Return the bytes of a model's parameters and buffers, counting each storage once. O(tensors)."""
    storages = (tensor.untyped_storage() for tensor in chain(model.parameters(), model.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def cpu_blocks(config: CacheConfig, spec: KVCacheSpec, available_bytes: int | None) -> int:
    """Return the default number of blocks on a CPU. O(log**2 of the blocks).

    1 GiB, or the blocks of the longest sequence if they are more, within half of the available memory. Without
    `available_bytes` (None: unknown), 1 GiB is the limit.
    """
    num_ranks = spec.tensor_parallel_size * spec.context_parallel_size
    most_bytes = CPU_KV_BYTES if available_bytes is None else int(available_bytes * _CPU_SHARE) // num_ranks
    most = min(most_bytes // spec.bytes_per_block, MAX_BLOCKS)
    fewest = max(2, 1 + config.state_blocks)

    def servable_tokens(num_blocks: int) -> int:
        return replace(config, num_blocks=num_blocks).max_servable_tokens

    needed = bisect_left(range(max(most, fewest)), config.max_model_len, fewest, key=servable_tokens)
    return max(fewest, min(most, max(needed, CPU_KV_BYTES // spec.bytes_per_block)))


def warn_of_short_pool(config: CacheConfig) -> None:
    """Warn if the pool cannot hold the longest sequence that the model supports."""
    if config.max_servable_tokens < config.max_model_len:
        warnings.warn(
            f"the pool of {config.num_blocks} blocks holds a sequence of {config.max_servable_tokens} tokens at most, "
            f"and max_model_len is {config.max_model_len}: longer prompts are refused (give kv_cache_memory_bytes or "
            f"num_blocks, or a smaller max_model_len)",
            RuntimeWarning,
            stacklevel=2,
        )


def swap_blocks(swap_space_bytes: object, num_cpu_blocks: int, spec: KVCacheSpec) -> int:
    """Return the number of blocks of the CPU pool: as given, or as many as fit the swap space; 0 for none.

    Raises `InvalidArgument` if both are given, or if the space is smaller than two blocks.
    """
    size = require_int("swap_space_bytes", swap_space_bytes, 0, MAX_BYTES)
    if size == 0:
        return num_cpu_blocks
    if num_cpu_blocks:
        raise InvalidArgument(
            f"swap_space_bytes is {size} and num_cpu_blocks is {num_cpu_blocks}; both size the same pool, so give one"
        )
    number = sizing.num_cpu_blocks(size, spec=spec)
    if number < 2:
        raise InvalidArgument(
            f"swap_space_bytes is {size}; it must be at least two blocks of {spec.bytes_per_block} bytes"
        )
    return min(number, MAX_BLOCKS)


def gpu_blocks(memory: EngineMemory, spec: KVCacheSpec, gpu_memory_utilization: float) -> int:
    """Return how many blocks fit into the allowed memory, minus weights, the largest step and other processes.

    `memory` is the measured use. Raises `InvalidArgument`, with the sum, if fewer than two fit.
    """
    total, step, outside = memory.total_bytes or 0, memory.step_bytes or 0, memory.outside_bytes or 0
    profile = MemoryProfile(total, memory.weights_bytes + memory.state_bytes + step + outside)
    number = profile.num_gpu_blocks(spec, gpu_memory_utilization)
    if number >= 2:
        return min(number, MAX_BLOCKS)
    raise InvalidArgument(
        f"gpu_memory_utilization is {gpu_memory_utilization}, {_gib(int(total * gpu_memory_utilization))} of "
        f"{_gib(total)} GiB; weights{' and states' if memory.state_bytes else ''} take "
        f"{_gib(memory.weights_bytes + memory.state_bytes)}, the largest step {_gib(step)} and what is "
        f"outside the engine {_gib(outside)}, which leaves no room for two blocks of {spec.bytes_per_block} bytes "
        f"(reduce max_num_batched_tokens, max_num_seqs or max_model_len to make the step smaller)"
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
