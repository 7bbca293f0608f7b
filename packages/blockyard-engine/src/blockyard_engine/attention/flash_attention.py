"""FlashAttention's paged kernel on CUDA, version 3 (Shah et al., NeurIPS 2024).

It finds each sequence's keys and values through its block table, so nothing is gathered.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from blockyard.arguments import reason
from blockyard.storage import KVCache, KVLayout

from .interface import GroupRows, IntArray, Reach, StepShape

_MODULE = "flash_attn_interface"
_PACKAGE = f"FlashAttention 3 (the module {_MODULE})"
_MAX_HEAD_SIZE = 256


class FlashAttention3:
    """FlashAttention 3, for Hopper GPUs in half precision. Blocks of any size."""

    name: ClassVar[str] = "flash_attention_3"
    extras: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, kv_cache: KVCache, max_model_len: int) -> None:  # noqa: ARG002  # the interface's
        self.kv_cache = kv_cache
        self._kernel: Any = importlib.import_module(_MODULE)

    @classmethod
    def refusal(cls, kv_cache: KVCache) -> str | None:
        """Return why it cannot serve these tensors on this machine; None if it can."""
        if kv_cache.device.type != "cuda":
            return f"it needs tensors on CUDA; these are on {kv_cache.device}"
        if kv_cache.dtype not in (torch.float16, torch.bfloat16):
            return f"it needs float16 or bfloat16; these are {kv_cache.dtype}"
        if kv_cache.layout is not KVLayout.NHD:
            return f"it needs the layout NHD; these have {kv_cache.layout.value}"
        if kv_cache.value_size != kv_cache.head_size:
            return f"it needs values of the size of keys, {kv_cache.head_size}; these have {kv_cache.value_size}"
        if kv_cache.head_size > _MAX_HEAD_SIZE or kv_cache.head_size % 8:
            return f"it needs a head size of a multiple of 8, at most {_MAX_HEAD_SIZE}; this is {kv_cache.head_size}"
        if find_spec(_MODULE) is None:
            return f"it needs {_PACKAGE}, which is not installed"
        major, minor = torch.cuda.get_device_capability(kv_cache.device)
        if major != 9:
            return f"it needs a GPU of compute capability 9; this has {major}.{minor}"
        try:
            importlib.import_module(_MODULE)
        except Exception as error:  # compiled parts that do not fit raise ImportError, OSError or RuntimeError
            return f"it needs {_PACKAGE}, which cannot be imported: {type(error).__name__}: {reason(error)}"
        return None

    def begin(self, shape: StepShape) -> FlashStep:
        """Prepare a step."""
        return FlashStep(self.kv_cache, self._kernel, [FlashRows(self.kv_cache, shape, rows) for rows in shape.groups])


class FlashRows:
    """A step in one layer group as FlashAttention takes it, on the device. B sequences, T new tokens.

    query_start_loc: int32 (B + 1,), running sums of new tokens. seq_lens: int32 (B,), tokens that are read.
    block_tables: int32 (B, blocks). max_query_len: the largest number of new tokens. window: tokens before its own,
    and behind it, that a token attends to; -1 for all.

    With a window all of it counts from the first block that the window reaches: the kernel counts from the end of each
    sequence, so that who attends to whom stays the same.
    """

    def __init__(self, kv_cache: KVCache, shape: StepShape, rows: GroupRows) -> None:
        reach = Reach(shape, rows, kv_cache.block_size)
        self.slots = kv_cache.slots(rows.slot_mapping)
        self.query_start_loc = _int32_tensor(_starts_and_end(shape.num_scheduled), kv_cache.device)
        self.seq_lens = _int32_tensor(reach.lengths, kv_cache.device)
        self.block_tables = _int32_tensor(reach.tables(np.arange(len(reach.lengths))), kv_cache.device)
        self.max_query_len = int(shape.num_scheduled.max())
        self.window = (reach.window - 1, 0) if reach.window else (-1, -1)


class FlashStep:
    """Attention of one step, for every layer: writes what is new, then has the kernel read it all."""

    def __init__(self, kv_cache: KVCache, kernel: Any, groups: list[FlashRows]) -> None:
        self._kv_cache = kv_cache
        self._kernel = kernel
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
        rows = self._groups[self._kv_cache.places.group(layer)]
        self._kv_cache.write(layer, key, value, rows.slots)
        output: torch.Tensor = self._kernel.flash_attn_with_kvcache(
            query.transpose(0, 1).contiguous(),
            self._kv_cache.key_cache(layer),
            self._kv_cache.value_cache(layer),
            cache_seqlens=rows.seq_lens,
            page_table=rows.block_tables,
            cu_seqlens_q=rows.query_start_loc,
            max_seqlen_q=rows.max_query_len,
            softmax_scale=scaling,
            causal=True,
            window_size=rows.window,
        )
        return output


def _starts_and_end(counts: IntArray) -> IntArray:
    """Return where each of some neighbours begins, and where the last ends: (n + 1,) for counts (n,)."""
    bounds: IntArray = np.concatenate([[0], np.cumsum(counts)])
    return bounds


def _int32_tensor(values: NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """Return the numbers as kernels take them: int32, contiguous, on the device."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)
