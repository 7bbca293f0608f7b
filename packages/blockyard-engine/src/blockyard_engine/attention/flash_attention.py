"""FlashAttention's paged kernel on CUDA, version 3 (Shah et al., NeurIPS 2024).

The kernel reads keys and values through the block table, so nothing is gathered.
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

from .interface import GroupTables, ReadRange, StepShape

_MODULE = "flash_attn_interface"
_PACKAGE = f"FlashAttention 3 (the module {_MODULE})"
_MAX_HEAD_SIZE = 256


class FlashAttention3:
    """FlashAttention 3, for Hopper GPUs in half precision; blocks may have any size."""

    name: ClassVar[str] = "flash_attention_3"
    extras: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, kv_cache: KVCache, max_model_len: int) -> None:  # noqa: ARG002  # the interface's
        self.kv_cache = kv_cache
        self._kernel: Any = importlib.import_module(_MODULE)

    @classmethod
    def refusal(cls, kv_cache: KVCache) -> str | None:
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
        return FlashStep(self.kv_cache, self._kernel, [FlashRows(self.kv_cache, shape, rows) for rows in shape.groups])


class FlashRows:
    """A step in one layer group as FlashAttention takes it, on the device. B sequences, T new tokens.

    With a window, lengths and tables begin at the first block that the window reaches. The kernel counts positions from
    the end of each sequence, so they stay right.

    Attributes:
        slots: slots of the new tokens.
        query_start_loc: running sums of new tokens, int32 (B + 1,).
        seq_lens: tokens that are read, int32 (B,).
        block_tables: int32 (B, blocks).
        max_query_len: the largest number of new tokens.
        window: tokens before and after its own that a token attends to; -1 for all.
    """

    def __init__(self, kv_cache: KVCache, shape: StepShape, rows: GroupTables) -> None:
        read_range = ReadRange(shape, rows, kv_cache.block_size)
        self.slots = kv_cache.slots(rows.slot_mapping)
        self.query_start_loc = _int32_tensor(np.cumsum([0, *shape.num_scheduled]), kv_cache.device)
        self.seq_lens = _int32_tensor(read_range.lengths, kv_cache.device)
        self.block_tables = _int32_tensor(read_range.tables(np.arange(len(read_range.lengths))), kv_cache.device)
        self.max_query_len = int(shape.num_scheduled.max())
        self.window = (read_range.window - 1, 0) if read_range.window else (-1, -1)


class FlashStep:
    """Attention of one step, for every layer: write the new tokens, then run the kernel."""

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
        others: dict[str, Any],  # noqa: ARG002  # `extras` is empty: models that need these are refused
    ) -> torch.Tensor:
        """Compute a layer's attention (`Attend`). O(new tokens * tokens read) for each sequence."""
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


def _int32_tensor(values: NDArray[Any], device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)
