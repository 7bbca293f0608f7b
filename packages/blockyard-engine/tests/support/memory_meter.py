"""A meter of CPU memory from the events of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity

from blockyard.storage import kv_cache
from blockyard_engine.memory.pool_sizing import DeviceUse


class CpuMeter:
    """`CudaMeter` for a device of `total_bytes` whose tensors are in CPU memory.

    before_bytes is the size of the weights, outside_bytes a given number.
    """

    def __init__(self, total_bytes: int, before_bytes: int = 0, outside_bytes: int = 0) -> None:
        self._given = total_bytes, outside_bytes, before_bytes

    def __call__(self, work: Callable[[], object]) -> DeviceUse:
        total, outside, before = self._given
        return DeviceUse(total, outside, before, before + peak_of(work))


def peak_of(work: Callable[[], object]) -> int:
    """Return the maximum bytes allocated by torch on the CPU during the work, without earlier ones.

    The pool counts too, as on a GPU; on a CPU the system's memory does not show in the allocator.
    """
    with (
        patch.object(kv_cache, "_zeros", _zeros),
        torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        work()
    results = profiler.profiler
    assert results is not None
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes), default=0)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)
