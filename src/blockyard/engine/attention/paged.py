"""What kernels that read block tables on the GPU have in common: their needs, and a step that writes, then reads.

Such a kernel finds each sequence's keys and values through its block table, so nothing is gathered.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...arguments import reason
from ...storage import KVCache, KVLayout, SlotAddresses
from .interface import GroupRows, IntArray, StepShape


class PagedGroup(Protocol):
    """A step in one layer group, as a kernel takes it: made once, used by every layer of the group."""

    slots: SlotAddresses

    def attend(self, layer: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Attend in a layer whose keys and values are written: query (T, heads, head_size) to the same shape."""


class PagedBackend(ABC):
    """A backend whose kernel reads block tables on CUDA, in half precision. One subclass is one kernel.

    module: the Python module that has the kernel. package: what to install for it. layouts: those it reads.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    package: ClassVar[str]
    layouts: ClassVar[tuple[KVLayout, ...]] = (KVLayout.NHD,)
    extras: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, kv_cache: KVCache, max_model_len: int) -> None:  # noqa: ARG002  # the interface's
        self.kv_cache = kv_cache
        self.kernel: Any = importlib.import_module(self.module)

    @classmethod
    def refusal(cls, kv_cache: KVCache) -> str | None:
        """Return why it cannot serve these tensors on this machine; None if it can."""
        if kv_cache.device.type != "cuda":
            return f"it needs tensors on CUDA; these are on {kv_cache.device}"
        if kv_cache.dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16; these are {kv_cache.dtype}"
        if kv_cache.layout not in cls.layouts:
            return f"it needs the layout {cls.layouts[0].value}; these have {kv_cache.layout.value}"
        if kv_cache.value_size != kv_cache.head_size:
            return f"it needs values of the size of keys, {kv_cache.head_size}; these have {kv_cache.value_size}"
        if find_spec(cls.module) is None:
            return f"it needs {cls.package}, which is not installed"
        return cls.unsuited(kv_cache, *torch.cuda.get_device_capability(kv_cache.device)) or cls._broken()

    @classmethod
    @abstractmethod
    def unsuited(cls, kv_cache: KVCache, major: int, minor: int) -> str | None:
        """Return what else the kernel cannot do, as `refusal`. major, minor: the GPU's compute capability."""

    @classmethod
    def _broken(cls) -> str | None:
        """What happens when the package is imported; None if nothing does. One built for another torch is no use."""
        try:
            importlib.import_module(cls.module)
        except Exception as error:  # compiled parts that do not fit raise ImportError, OSError or RuntimeError
            return f"it needs {cls.package}, which cannot be imported: {type(error).__name__}: {reason(error)}"
        return None

    @abstractmethod
    def group(self, number: int, shape: StepShape, rows: GroupRows) -> PagedGroup:
        """Return a step in layer group `number`."""

    def begin(self, shape: StepShape) -> PagedStep:
        """Prepare a step."""
        groups = [self.group(number, shape, rows) for number, rows in enumerate(shape.groups)]
        return PagedStep(self.kv_cache, groups)


class PagedStep:
    """Attention of one step, for every layer: writes what is new, then has the kernel read it all."""

    def __init__(self, kv_cache: KVCache, groups: list[PagedGroup]) -> None:
        self._kv_cache = kv_cache
        self._groups = groups

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],  # noqa: ARG002  # `extras` says that it serves no model for which these matter
    ) -> torch.Tensor:
        """Does as `Attend` says. O(new tokens * tokens read), a sequence each."""
        group = self._groups[self._kv_cache.places.group(layer)]
        self._kv_cache.write(layer, key, value, group.slots)
        return group.attend(layer, query.transpose(0, 1).contiguous(), scaling)


def starts_and_end(counts: IntArray) -> IntArray:
    """Return where each of some neighbours begins, and where the last ends: (n + 1,) for counts (n,)."""
    bounds: IntArray = np.concatenate([[0], np.cumsum(counts)])
    return bounds


def int32_tensor(values: NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """Return the numbers as kernels take them: int32, contiguous, on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)
