"""What the paged kernels of other packages promise, written out by definition: for machines without a GPU.

Each has the signature of its package, refuses what the real one refuses, and computes what it documents, one sequence
and one query at a time. They check what the backends hand over; that the real kernels keep their promises, only the
tests on CUDA show (`test_attention_on_cuda`).
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import torch


def require_int32(**arrays: torch.Tensor) -> None:
    for name, array in arrays.items():
        assert array.dtype == torch.int32, (name, array.dtype)
        assert array.is_contiguous(), name


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_starts: list[int],
    pages: list[list[int]],
    seq_lens: list[int],
    scale: float | None,
    window_left: int,
) -> torch.Tensor:
    """Causal attention, aligned at the ends: the last query of a sequence sees all of its keys.

    query: (T, heads, head_size). caches: (num_blocks, block_size, kv_heads, head_size). window_left: keys before its
    own that a query sees, -1 for all.
    """
    block_size, num_kv_heads = key_cache.shape[1:3]
    output = torch.full_like(query, float("nan"))  # what is not computed must not be zeros by luck
    scale = query.shape[2] ** -0.5 if scale is None else scale
    for row, (start, end) in enumerate(itertools.pairwise(query_starts)):
        places = [pages[row][at // block_size] * block_size + at % block_size for at in range(seq_lens[row])]
        keys, values = (
            cache.reshape(-1, num_kv_heads, cache.shape[3])[places].repeat_interleave(
                query.shape[1] // num_kv_heads, dim=1
            )
            for cache in (key_cache, value_cache)
        )
        for token in range(start, end):
            position = seq_lens[row] - (end - token)
            first = 0 if window_left < 0 else max(0, position - window_left)
            seen = slice(first, position + 1)
            logits = torch.einsum("hd,khd->hk", query[token], keys[seen]) * scale
            output[token] = torch.einsum("hk,khd->hd", logits.softmax(dim=-1), values[seen])
    return output


def _flash_attn_with_kvcache(  # FlashAttention 3
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    cache_seqlens: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    assert k is v is None
    require_int32(cache_seqlens=cache_seqlens, page_table=page_table, cu_seqlens_q=cu_seqlens_q)
    assert causal
    assert window_size[1] in (-1, 0)
    starts = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(end - start for start, end in itertools.pairwise(starts))
    return paged_attention(
        q, k_cache, v_cache, starts, page_table.tolist(), cache_seqlens.tolist(), softmax_scale, window_size[0]
    )


def _flash_attn_varlen_func(  # FlashAttention 2
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    *,
    block_table: Any,
) -> torch.Tensor:
    assert dropout_p == 0
    assert k.shape[1] % 256 == 0
    assert k.stride(-1) == v.stride(-1) == 1
    require_int32(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table)
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    lengths = [end - start for start, end in itertools.pairwise(key_starts)]
    assert max_seqlen_q == max(end - start for start, end in itertools.pairwise(starts))
    assert max_seqlen_k == max(lengths)
    assert causal
    assert window_size[1] in (-1, 0)
    return paged_attention(q, k, v, starts, block_table.tolist(), lengths, softmax_scale, window_size[0])


class _Wrapper:  # FlashInfer
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self.kv_layout = kv_layout
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: Any = torch.float16,
        kv_data_type: Any = None,
    ) -> None:
        require_int32(
            qo_indptr=qo_indptr, indptr=paged_kv_indptr, indices=paged_kv_indices, last=paged_kv_last_page_len
        )
        bounds = paged_kv_indptr.tolist()
        assert bounds[-1] == len(paged_kv_indices)
        assert causal
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        self.num_plans += 1
        self.planned = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type)
        self.starts = qo_indptr.tolist()
        self.pages = [paged_kv_indices[start:end].tolist() for start, end in itertools.pairwise(bounds)]
        self.lengths = [
            (len(pages) - 1) * page_size + last
            for pages, last in zip(self.pages, paged_kv_last_page_len.tolist(), strict=True)
        ]
        self.scale, self.window_left = sm_scale, window_left

    def run(self, q: Any, paged_kv_cache: Any) -> torch.Tensor:
        keys, values = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
        if self.kv_layout == "HND":
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        block_size, num_kv_heads, head_size = keys.shape[1:]
        assert self.planned == (q.shape[1], num_kv_heads, head_size, block_size, q.dtype, keys.dtype)
        assert q.shape[0] == self.starts[-1]
        return paged_attention(q, keys, values, self.starts, self.pages, self.lengths, self.scale, self.window_left)


def flash_attention_forward(  # the operator behind torch.nn.attention.varlen, in the order of its schema
    query: Any,
    key: Any,
    value: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    assert cum_seq_k is alibi_slopes is num_splits is None
    assert dropout_p == 0
    assert not return_debug_mask
    assert is_causal == (window_size_left == -1)
    assert window_size_right == 0
    require_int32(cum_seq_q=cum_seq_q, seqused_k=seqused_k, block_table=block_table)
    starts, lengths = cum_seq_q.tolist(), seqused_k.tolist()
    assert max_q == max(end - start for start, end in itertools.pairwise(starts))
    assert max_k == max(lengths)
    output = paged_attention(
        query, key, value, starts, block_table.tolist(), lengths, scale, -1 if is_causal else window_size_left or 0
    )
    return output, *(torch.empty(0) for _ in range(4))


#: The modules of packages that are not installed, by name.
MODULES = {
    "flash_attn_interface": types.SimpleNamespace(flash_attn_with_kvcache=_flash_attn_with_kvcache),
    "flash_attn": types.SimpleNamespace(flash_attn_varlen_func=_flash_attn_varlen_func),
    "flashinfer": types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=_Wrapper),
}
