"""Number of blocks that fit on a device, given the measured peak without a cache, or in swap space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..arguments import require_int
from ..config import MAX_SEQS
from ..errors import InvalidArgument
from .spec import MAX_BYTES, KVCacheSpec

DEFAULT_SWAP_BYTES = 4 * 2**30


def num_gpu_blocks(
    total_bytes: int,
    peak_bytes: int,
    gpu_memory_utilization: float = 0.92,
    *,
    spec: KVCacheSpec,
    max_num_seqs: int = 0,
) -> int:
    """Return the blocks, null block included, that fit on a device: (total * utilization - peak) / bytes per block.

    This is vLLM's rule. Never negative. O(layers).

    Args:
        total_bytes: memory of the device.
        peak_bytes: most memory in use, weights included, during the largest step without a cache.
        gpu_memory_utilization: usable fraction of the total; above 0, at most 1.
        spec: the model's cache.
        max_num_seqs: sequences whose states are reserved first; required for a model with states.

    Raises:
        InvalidArgument: a value is outside its limits.
    """
    total = require_int("total_bytes", total_bytes, 0, MAX_BYTES)
    peak = require_int("peak_bytes", peak_bytes, 0, MAX_BYTES)
    usable = int(total * require_utilization(gpu_memory_utilization)) - peak
    return _blocks(usable, spec, max_num_seqs)


def num_cpu_blocks(swap_bytes: int = DEFAULT_SWAP_BYTES, *, spec: KVCacheSpec, max_num_seqs: int = 0) -> int:
    """Return the blocks that fit in the host memory for swapping. Never negative. O(layers).

    Args:
        swap_bytes: bytes of host memory.
        spec: the model's cache.
        max_num_seqs: swapped sequences whose states are reserved first; required for a model with states.

    Raises:
        InvalidArgument: a value is outside its limits.
    """
    return _blocks(require_int("swap_bytes", swap_bytes, 0, MAX_BYTES), spec, max_num_seqs)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """A device's memory, and its peak use during the largest step without a cache, in bytes."""

    total_bytes: int
    peak_bytes: int

    def __post_init__(self) -> None:
        require_int("total_bytes", self.total_bytes, 0, MAX_BYTES)
        require_int("peak_bytes", self.peak_bytes, 0, MAX_BYTES)

    def num_gpu_blocks(self, spec: KVCacheSpec, gpu_memory_utilization: float = 0.92, *, max_num_seqs: int = 0) -> int:
        """Return the blocks, null block included, that fit on this device.

        Args:
            spec: the model's cache.
            gpu_memory_utilization: usable fraction of the total; above 0, at most 1.
            max_num_seqs: sequences whose states are reserved first; required for a model with states.
        """
        return num_gpu_blocks(
            self.total_bytes, self.peak_bytes, gpu_memory_utilization, spec=spec, max_num_seqs=max_num_seqs
        )


def profile(measure: Callable[[], tuple[int, int]]) -> MemoryProfile:
    """Call `measure` once and return its result as a `MemoryProfile`.

    Args:
        measure: resets the device's peak counter, runs the largest step without a cache, and returns (total bytes, peak
            bytes). The engine knows its largest step; vLLM v0 ran 256 sequences of 128 tokens.

    Raises:
        InvalidArgument: the result is not two such numbers.
    """
    measured = measure()
    if not isinstance(measured, (tuple, list)) or len(measured) != 2:
        raise InvalidArgument(f"measure returned {measured!r}; it must return (total_bytes, peak_bytes)")
    return MemoryProfile(*measured)


def require_utilization(value: object) -> float:
    """Return `value` if it is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InvalidArgument(f"gpu_memory_utilization is {value!r}; it must be a number above 0 and at most 1")
    return value


def _blocks(usable_bytes: int, spec: KVCacheSpec, max_num_seqs: int) -> int:
    if not isinstance(spec, KVCacheSpec):
        raise InvalidArgument(f"spec is {spec!r}; it must be a KVCacheSpec")
    num_seqs = require_int("max_num_seqs", max_num_seqs, 0, MAX_SEQS)
    if spec.state_bytes_per_sequence and num_seqs == 0:
        raise InvalidArgument(
            f"max_num_seqs is 0; it must be from 1 to {MAX_SEQS}, because each sequence keeps a state of "
            f"{spec.state_bytes_per_sequence} bytes outside its blocks"
        )
    return max(usable_bytes - num_seqs * spec.state_bytes_per_sequence, 0) // spec.bytes_per_block
