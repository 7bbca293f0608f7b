"""How many blocks an engine takes that is not told: on a GPU what is left, on a CPU what its context needs."""

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
from .account import EngineMemory, blocks_beside, cpu_blocks
from .largest_step import StepSizes, TrialCache, run_largest_step


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Bytes of a device, around some work.

    total_bytes: all it has. outside_bytes: in use afterwards outside this process's tensors: kernels, libraries, other
    processes. before_bytes, peak_bytes: in tensors, before the work and at most during it.
    """

    total_bytes: int
    outside_bytes: int
    before_bytes: int
    peak_bytes: int


#: Does some work and says what memory it took.
Meter = Callable[[Callable[[], object]], DeviceUse]


def meter_of(device: torch.device) -> Meter | None:
    """Return the meter of a device; None for one that has none, such as a CPU, whose memory others share."""
    return CudaMeter(device) if device.type == "cuda" else None


class CudaMeter:
    """Reads the counters of torch's allocator, and from the driver what the allocator does not see."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], object]) -> DeviceUse:
        """Do the work. The allocator's unused memory goes back to the driver, before and after."""
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


#: Where Linux says what is left of a machine's memory, and what a container may use of it (cgroups 2 and 1).
_MEMINFO = Path("/proc/meminfo")
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def available_bytes() -> int | None:
    """Return what new work may take of this machine's memory without swapping, within the container's limit; None where
    the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text("ascii").splitlines())
        left = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, LookupError):
        return None
    return min(left, *map(_limit, _CONTAINER_LIMITS))


def _limit(path: Path) -> int:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # there is none, or it is "max"
        return 2**63


@dataclass(frozen=True, slots=True)
class MemoryFinder:
    """Sizes a pool by what the largest step takes.

    spec: bytes of a block. config: all of the cache but its number of blocks. tensors: what `KVCache` takes beside
    numbers of blocks and the block size. make_runner: as the engine makes it. weights: bytes of the model.
    """

    spec: KVCacheSpec
    config: CacheConfig
    tensors: dict[str, Any]
    make_runner: Callable[[KVCache], ModelRunner]
    weights: int
    gpu_memory_utilization: float

    def given(self) -> EngineMemory:
        """Return the sum for the blocks that the config has."""
        return self._with_blocks(self.config.num_blocks)

    def find(self, meter: Meter | None, sizes: StepSizes) -> tuple[CacheConfig, EngineMemory]:
        """Return the config with as many blocks as fit, and the sum that they come from.

        meter: of the device; None for a CPU, where no step is run. Raises `InvalidArgument` if the step, or two blocks
        beside it, do not fit.
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
        number = blocks_beside(memory, self.spec, self.gpu_memory_utilization)
        kv_bytes = number * self.spec.bytes_per_block
        return replace(self.config, num_blocks=number), replace(memory, kv_bytes=kv_bytes)

    def _with_blocks(self, number: int) -> EngineMemory:
        kv_bytes = number * self.spec.bytes_per_block
        return EngineMemory(str(self.tensors["device"]), self.weights, kv_bytes, state_bytes=self._state_bytes)

    @property
    def _state_bytes(self) -> int:
        """Return the bytes of the working states, each in whole blocks."""
        return self.config.max_num_seqs * self.config.state_blocks * self.spec.bytes_per_block

    def _run(self, meter: Meter, sizes: StepSizes) -> tuple[DeviceUse, int]:
        """Return what the largest step took, and how much of it was the cache that it ran over."""
        trials: list[int] = []

        def work() -> None:
            cache = TrialCache(sizes.max_model_len, self.spec.block_size, **self.tensors)
            trials.append(cache.num_bytes)
            run_largest_step(cache, self.config.layer_groups, sizes, self.make_runner)

        try:
            found = meter(work)
        except torch.OutOfMemoryError as error:
            raise InvalidArgument(f"a step of {sizes} does not fit {self.tensors['device']}: {error}") from error
        return found, trials[0]
