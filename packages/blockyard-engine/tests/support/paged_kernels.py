"""FlashAttention's paged kernel written out from its documentation, for machines without a GPU.

It has the signature of the package, refuses what the real one refuses, and computes one sequence and one query at a
time. It checks the backend's arguments; only the tests on CUDA check the real kernel (`test_cuda`).
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
    """Compute causal attention, aligned at the ends: the last query of a sequence sees all of its keys.

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


#: The modules of packages that are not installed, by name.
MODULES = {
    "flash_attn_interface": types.SimpleNamespace(flash_attn_with_kvcache=_flash_attn_with_kvcache),
}
