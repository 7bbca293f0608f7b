"""FlashInfer's paged attention (Ye et al., MLSys 2025): any block size, either layout, many kinds of GPU."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from ...storage import KVCache, KVLayout
from .interface import GroupRows, Reach, StepShape
from .paged import PagedBackend, int32_tensor, starts_and_end

_HEAD_SIZES = (64, 128, 256)
#: What FlashInfer recommends for the partial results of long sequences.
_WORKSPACE_BYTES = 128 * 2**20


class FlashInfer(PagedBackend):
    """FlashInfer: decodes and chunks of prompts alike go through its wrapper for batched prefill, in one call."""

    name: ClassVar[str] = "flashinfer"
    module: ClassVar[str] = "flashinfer"
    package: ClassVar[str] = "flashinfer-python"
    layouts: ClassVar[tuple[KVLayout, ...]] = (KVLayout.NHD, KVLayout.HND)

    def __init__(self, kv_cache: KVCache, max_model_len: int) -> None:
        super().__init__(kv_cache, max_model_len)
        # One for all groups: it holds nothing between two calls, and layers run one after another.
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=kv_cache.device)
        self._wrappers = [
            self.kernel.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_cache.layout.value)
            for _ in range(kv_cache.places.num_groups)
        ]

    @classmethod
    def unsuited(cls, kv_cache: KVCache, major: int, minor: int) -> str | None:
        """It needs a Turing GPU, for bfloat16 an Ampere GPU, or a later one, and is built for a few head sizes."""
        least = (8, 0) if kv_cache.dtype == torch.bfloat16 else (7, 5)
        if (major, minor) < least:
            needs = f"compute capability {least[0]}.{least[1]} or above for {kv_cache.dtype}"
            return f"it needs a GPU of {needs}; this has {major}.{minor}"
        if kv_cache.head_size not in _HEAD_SIZES:
            return f"it needs a head size of {', '.join(map(str, _HEAD_SIZES))}; this is {kv_cache.head_size}"
        return None

    def group(self, number: int, shape: StepShape, rows: GroupRows) -> FlashInferRows:
        """Return a step in layer group `number`."""
        return FlashInferRows(self.kv_cache, self._wrappers[number], shape, rows)


class FlashInferRows:
    """A step in one layer group as FlashInfer takes it: block ids without padding, on the CPU, where it plans.

    It is planned at the group's first layer, which is the first to know the number of query heads and the scaling.
    With a window all of it counts from the first block that the window reaches, as FlashInfer counts from the ends.
    """

    def __init__(self, kv_cache: KVCache, wrapper: Any, shape: StepShape, rows: GroupRows) -> None:
        reach = Reach(shape, rows, kv_cache.block_size)
        num_blocks = -(-reach.lengths // kv_cache.block_size)
        tables = reach.tables(np.arange(len(num_blocks)))
        is_read = np.arange(tables.shape[1]) < num_blocks[:, None]
        self._kv_cache = kv_cache
        self._wrapper = wrapper
        self._window_left = reach.window - 1
        self._planned_for: tuple[int, float | None] | None = None
        self.slots = kv_cache.slots(rows.slot_mapping)
        self.query_start_loc = int32_tensor(starts_and_end(shape.num_scheduled), "cpu")
        self.indptr = int32_tensor(starts_and_end(num_blocks), "cpu")
        self.indices = int32_tensor(tables[is_read], "cpu")
        self.last_page_len = int32_tensor((reach.lengths - 1) % kv_cache.block_size + 1, "cpu")

    def attend(self, layer: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """See `PagedGroup`."""
        needs = (query.shape[1], scaling)
        if self._planned_for != needs:
            self._plan(*needs)
            self._planned_for = needs
        output: torch.Tensor = self._wrapper.run(query, self._kv_cache.combined(layer))
        return output

    def _plan(self, num_heads: int, scaling: float | None) -> None:
        self._wrapper.plan(
            self.query_start_loc,
            self.indptr,
            self.indices,
            self.last_page_len,
            num_heads,
            self._kv_cache.num_kv_heads,
            self._kv_cache.head_size,
            self._kv_cache.block_size,
            causal=True,
            sm_scale=scaling,
            window_left=self._window_left,
            q_data_type=self._kv_cache.dtype,
            kv_data_type=self._kv_cache.dtype,
        )
