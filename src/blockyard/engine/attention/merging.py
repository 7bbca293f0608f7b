"""Attention over some of the keys, and the parts merged: the softmax over all keys from those over each part.

Each part has its output and the logarithm of the sum of its exponentials; the outputs are weighted by these. The rule
is that of online softmax (Milakov and Gimelshein, arXiv 1805.02867), as ring and context parallel attention use it.
"""

from __future__ import annotations

import torch

from .softmax import Extras


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float | None,
    extras: Extras,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log of the sum of exponentials over these keys alone, float32; zeros and -inf where there are none.

    query (B, kv_heads, group, T, size), key and value (B, keys, kv_heads, size); hidden: bool (B, T, keys), true where
    a token must not see a key. Returns (B, kv_heads, group, T, value's size) and (B, kv_heads, group, T). Sinks are
    one more logit without a value: give them on one part only.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.matmul(query, key.permute(0, 2, 3, 1)[:, :, None]).float() * scale
    if extras.softcap is not None:
        logits = torch.tanh(logits / extras.softcap) * extras.softcap
    logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
    if extras.sinks is not None:
        sinks = extras.sinks.float().reshape(1, *query.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    sums = torch.logsumexp(logits, dim=-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))
    weights = torch.exp(logits - _finite(sums)[..., None])[..., : key.shape[1]]
    return torch.matmul(weights, value.transpose(1, 2)[:, :, None].float()), sums


def merge(outputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Parts' outputs (parts, ..., size) and their sums (parts, ...) to the output over all keys, (..., size).

    At least one part must have keys for each token.
    """
    weights = torch.softmax(sums, dim=0)
    return (outputs * weights[..., None]).sum(dim=0)


def _finite(sums: torch.Tensor) -> torch.Tensor:
    """With 0 in place of minus infinity, from which nothing can be subtracted."""
    return sums.masked_fill(torch.isneginf(sums), 0.0)
