"""Finds the size of the pool: on a GPU by running the largest step, on a CPU from the available memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from blockyard.config import CacheConfig
from blockyard.errors import InvalidArgument
from blockyard.sizing import KVCacheSpec
from blockyard.storage import KVCache

from ..runner import ModelRunner
from .account import EngineMemory, cpu_blocks, gpu_blocks
from .largest_step import StepSizes, TrialCache, run_largest_step


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Memory of a device around some work, in bytes.

    Attributes:
        total_bytes: size of the device.
        outside_bytes: in use afterwards outside this process's tensors: kernels, libraries, other processes.
        before_bytes: in tensors before the work.
        peak_bytes: maximum in tensors during the work.
    """

    total_bytes: int
    outside_bytes: int
    before_bytes: int
    peak_bytes: int


#: Runs some work and returns the memory that it took.
Meter = Callable[[Callable[[], object]], DeviceUse]


def meter_of(device: torch.device) -> Meter | None:
    """Return the memory meter of a device; None for a CPU, whose memory is shared with others."""
    return CudaMeter(device) if device.type == "cuda" else None


class CudaMeter:
    """Measures memory with torch's allocator, and with the driver outside it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], object]) -> DeviceUse:
        """Run the work and measure it. Unused memory of the allocator is returned to the driver before and after."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        outside = total - free - torch.cuda.memory_reserved(self._device)
        return DeviceUse(total, max(outside, 0), before, peak)


#: Linux's files with the available memory, and the container's limits (cgroups 2 and 1).
_MEMINFO = Path("/proc/meminfo")
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def available_bytes() -> int | None:
    """Return the memory that new work may take without swapping, within the container's limit; None if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text("ascii").splitlines())
        left = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, LookupError):
        return None
    return min(left, *map(_limit, _CONTAINER_LIMITS))


def _limit(path: Path) -> int:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return 2**63


@dataclass(frozen=True, slots=True)
class PoolSizer:
    """Sizes a pool by the memory of the largest step.

    Attributes:
        spec: bytes per block.
        config: the cache's config; its number of blocks may be a placeholder.
        tensors: arguments of `KVCache` besides numbers of blocks and the block size.
        make_runner: makes a runner as the engine does.
        weights: bytes of the model.
    """

    spec: KVCacheSpec
    config: CacheConfig
    tensors: dict[str, Any]
    make_runner: Callable[[KVCache], ModelRunner]
    weights: int
    gpu_memory_utilization: float

    def fixed(self) -> EngineMemory:
        """Return the memory use for the config's number of blocks."""
        return self._with_blocks(self.config.num_blocks)

    def find(self, meter: Meter | None, sizes: StepSizes) -> tuple[CacheConfig, EngineMemory]:
        """Return the config with as many blocks as fit, and the memory use.

        `meter` is None on a CPU, where no step is run. Raises `InvalidArgument` if the step, or two blocks in addition,
        do not fit.
        """
        if meter is None:
            left = available_bytes()
            number = cpu_blocks(self.config, self.spec, None if left is None else max(left - self._state_bytes, 0))
            return replace(self.config, num_blocks=number), self._with_blocks(number)
        found, trial_bytes = self._run(meter, sizes)
        memory = replace(
            self._with_blocks(0),
            total_bytes=found.total_bytes,
            step_bytes=found.peak_bytes - found.before_bytes - trial_bytes - self._state_bytes,
            outside_bytes=found.outside_bytes + max(found.before_bytes - self.weights, 0),
        )
        number = gpu_blocks(memory, self.spec, self.gpu_memory_utilization)
        kv_bytes = number * self.spec.bytes_per_block
        return replace(self.config, num_blocks=number), replace(memory, kv_bytes=kv_bytes)

    def _with_blocks(self, number: int) -> EngineMemory:
        kv_bytes = number * self.spec.bytes_per_block
        return EngineMemory(str(self.tensors["device"]), self.weights, kv_bytes, state_bytes=self._state_bytes)

    @property
    def _state_bytes(self) -> int:
        """Bytes of the working states, each in whole blocks."""
        return self.config.max_num_seqs * self.config.state_blocks * self.spec.bytes_per_block

    def _run(self, meter: Meter, sizes: StepSizes) -> tuple[DeviceUse, int]:
        """Run the largest step; return its memory use, and the bytes of the trial cache in it."""
        trials: list[int] = []

        def work() -> None:
            cache = TrialCache(sizes.max_model_len, self.spec.block_size, **self.tensors)
            trials.append(cache.num_bytes)
            run_largest_step(cache, self.config.layer_groups, sizes, self.make_runner)

        try:
            found = meter(work)
        except torch.OutOfMemoryError as error:
            raise InvalidArgument(
                f"a step of {sizes} does not fit {self.tensors['device']}; make it smaller: {error}"
            ) from error
        return found, trials[0]
