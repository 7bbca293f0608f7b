"""What a device's memory holds while something runs on it, and what a machine has left."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


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
    """The meter of a device; None for one that has none, such as a CPU, whose memory others share."""
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
