"""FlashAttention's paged kernels: version 2 (Dao, 2023) and 3 (Shah et al., NeurIPS 2024), and torch's door to them."""

from __future__ import annotations

import importlib
import inspect
from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch

from ...storage import KVCache
from .interface import GroupRows, Reach, StepShape
from .paged import PagedBackend, int32_tensor, starts_and_end

#: Of FlashAttention 2 and 3; and of 4, which takes single sizes above it for some shapes alone.
_MAX_HEAD_SIZE = 256
_MAX_HEAD_SIZE_4 = 128
#: FlashAttention 2 reads pages of a multiple of this many tokens; 3 of any number.
_PAGE_TOKENS = 256


class FlashBackend(PagedBackend):
    """What the three have in common: padded block tables, and who attends to whom as a window."""

    @abstractmethod
    def call(self, layer: int, query: torch.Tensor, rows: FlashRows, scaling: float | None) -> torch.Tensor:
        """Call the kernel: query (T, heads, head_size) to the same shape."""

    def group(self, number: int, shape: StepShape, rows: GroupRows) -> FlashRows:  # noqa: ARG002  # all alike
        """Return a step in a layer group."""
        return FlashRows(self, shape, rows)


class FlashRows:
    """A step in one layer group as FlashAttention takes it, on the device. B sequences, T new tokens.

    query_start_loc, seq_start_loc: int32 (B + 1,), running sums of new tokens and of tokens that are read. seq_lens:
    int32 (B,). block_tables: int32 (B, blocks). max_query_len, max_seq_len: the largest of each. window: tokens before
    its own, and behind it, that a token attends to; -1 for all.

    With a window all of it counts from the first block that the window reaches: the kernels count from the end of each
    sequence, so that who attends to whom stays the same.
    """

    def __init__(self, backend: FlashBackend, shape: StepShape, rows: GroupRows) -> None:
        kv_cache = backend.kv_cache
        reach = Reach(shape, rows, kv_cache.block_size)
        self._backend = backend
        self.slots = kv_cache.slots(rows.slot_mapping)
        self.query_start_loc = int32_tensor(starts_and_end(shape.num_scheduled), kv_cache.device)
        self.seq_start_loc = int32_tensor(starts_and_end(reach.lengths), kv_cache.device)
        self.seq_lens = int32_tensor(reach.lengths, kv_cache.device)
        self.block_tables = int32_tensor(reach.tables(np.arange(len(reach.lengths))), kv_cache.device)
        self.max_query_len = int(shape.num_scheduled.max())
        self.max_seq_len = int(reach.lengths.max())
        self.window = (reach.window - 1, 0) if reach.window else (-1, -1)

    def attend(self, layer: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """See `PagedGroup`."""
        return self._backend.call(layer, query, self, scaling)


class FlashAttention3(FlashBackend):
    """FlashAttention 3, for Hopper. Pages of any size."""

    name: ClassVar[str] = "flash_attention_3"
    module: ClassVar[str] = "flash_attn_interface"
    package: ClassVar[str] = "FlashAttention 3 (the module flash_attn_interface)"

    @classmethod
    def unsuited(cls, kv_cache: KVCache, major: int, minor: int) -> str | None:
        """It needs a Hopper GPU."""
        if major != 9:
            return f"it needs a GPU of compute capability 9; this has {major}.{minor}"
        return _unsuited_heads(kv_cache)

    def call(self, layer: int, query: torch.Tensor, rows: FlashRows, scaling: float | None) -> torch.Tensor:
        """See `FlashBackend`."""
        output: torch.Tensor = self.kernel.flash_attn_with_kvcache(
            query,
            self.kv_cache.key_cache(layer),
            self.kv_cache.value_cache(layer),
            cache_seqlens=rows.seq_lens,
            page_table=rows.block_tables,
            cu_seqlens_q=rows.query_start_loc,
            max_seqlen_q=rows.max_query_len,
            softmax_scale=scaling,
            causal=True,
            window_size=rows.window,
        )
        return output


class FlashAttention2(FlashBackend):
    """FlashAttention 2, for engines with blocks of 256 tokens or a multiple: it reads no smaller pages."""

    name: ClassVar[str] = "flash_attention_2"
    module: ClassVar[str] = "flash_attn"
    package: ClassVar[str] = "flash-attn"

    @classmethod
    def unsuited(cls, kv_cache: KVCache, major: int, minor: int) -> str | None:
        """It needs an Ampere GPU or a later one, and large blocks."""
        if major < 8:
            return f"it needs a GPU of compute capability 8 or above; this has {major}.{minor}"
        if kv_cache.block_size % _PAGE_TOKENS:
            return f"it needs a block size of a multiple of {_PAGE_TOKENS} tokens; this is {kv_cache.block_size}"
        return _unsuited_heads(kv_cache)

    def call(self, layer: int, query: torch.Tensor, rows: FlashRows, scaling: float | None) -> torch.Tensor:
        """See `FlashBackend`."""
        output: torch.Tensor = self.kernel.flash_attn_varlen_func(
            query,
            self.kv_cache.key_cache(layer),
            self.kv_cache.value_cache(layer),
            cu_seqlens_q=rows.query_start_loc,
            cu_seqlens_k=rows.seq_start_loc,
            max_seqlen_q=rows.max_query_len,
            max_seqlen_k=rows.max_seq_len,
            softmax_scale=scaling,
            causal=True,
            window_size=rows.window,
            block_table=rows.block_tables,
        )
        return output


class TorchVarlen(FlashBackend):
    """`torch.nn.attention.varlen`, which reads block tables once FlashAttention 3 or 4 is activated in torch.

    Activating changes all attention of the process, so that is its owner's to do, before the engine is made:
    `torch.nn.attention.activate_flash_attention_impl("FA3")`.
    """

    name: ClassVar[str] = "torch_varlen"
    module: ClassVar[str] = "torch.nn.attention.varlen"
    package: ClassVar[str] = "a later torch (torch.nn.attention.varlen of 2.13 reads block tables)"

    @classmethod
    def unsuited(cls, kv_cache: KVCache, major: int, minor: int) -> str | None:
        """It needs an implementation that reads block tables: torch's own does not, and 4 does on Blackwell alone."""
        if not _reads_block_tables():
            return f"it needs {cls.package}; the torch here is {torch.__version__}"
        active = torch.nn.attention.current_flash_attention_impl()
        if (major, active) not in ((9, "FA3"), (10, "FA4")):
            return (
                "it needs torch.nn.attention.activate_flash_attention_impl('FA3') on a GPU of compute capability 9, "
                f"'FA4' on 10; active is {active or 'none of them'} on {major}.{minor}"
            )
        return _unsuited_heads(kv_cache, _MAX_HEAD_SIZE_4 if active == "FA4" else _MAX_HEAD_SIZE)

    def call(self, layer: int, query: torch.Tensor, rows: FlashRows, scaling: float | None) -> torch.Tensor:
        """See `FlashBackend`. Here a window (-1, 0) says causal."""
        key_cache = self.kv_cache.key_cache(layer)
        output: torch.Tensor = self.kernel.varlen_attn(
            query,
            key_cache,
            self.kv_cache.value_cache(layer),
            rows.query_start_loc,
            None,
            rows.max_query_len,
            rows.max_seq_len,
            scale=scaling,
            window_size=(rows.window[0], 0),
            enable_gqa=query.shape[1] != key_cache.shape[2],
            seqused_k=rows.seq_lens,
            block_table=rows.block_tables,
        )
        return output


def _reads_block_tables() -> bool:
    """Return whether torch's varlen_attn takes block tables: the first versions of torch that had it did not."""
    varlen = importlib.import_module(TorchVarlen.module)
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters


def _unsuited_heads(kv_cache: KVCache, largest: int = _MAX_HEAD_SIZE) -> str | None:
    if kv_cache.head_size > largest or kv_cache.head_size % 8:
        return f"it needs a head size of a multiple of 8, at most {largest}; this is {kv_cache.head_size}"
    return None
