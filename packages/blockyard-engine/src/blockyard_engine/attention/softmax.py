"""Softmax attention over gathered keys: PyTorch's kernel, or explicit code for models that need more.

A soft cap (Gemma 2, arXiv 2408.00118) bounds logits before the softmax; a sink (gpt-oss, after arXiv 2309.17453) is a
logit of each head that takes part in the softmax but has no value. `scaled_dot_product_attention` has neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .indexed import INDICES, unselected_keys
from .latent import LATENT

#: Maximum number of logits in memory at once in explicit attention; longer prompts are computed in slices.
_MAX_LOGITS = 2**24


@dataclass(frozen=True, slots=True)
class Extras:
    """Special features of a layer's attention.

    Attributes:
        softcap: cap of the logits; None for none.
        sinks: sink logits, (heads,); None for none.
        is_latent: whether keys and values are latent vectors and rotated keys.
        indices: keys that each token may attend to, (1, T, most), -1 for none (`indexed`); None for all.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None
    is_latent: bool = False
    indices: torch.Tensor | None = None

    @classmethod
    def of(cls, others: dict[str, Any]) -> Extras:
        """Return the features in the arguments that transformers passes to attention."""
        return cls(others.get("softcap"), others.get("s_aux"), bool(others.get(LATENT)), others.get(INDICES))

    @property
    def names(self) -> frozenset[str]:
        """Names of the features in use, as transformers calls them."""
        asked = {"softcap": self.softcap is not None, "s_aux": self.sinks is not None, LATENT: self.is_latent}
        asked[INDICES] = self.indices is not None
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    def keys_and_values(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values to attend to; latent vectors and rotated keys are joined to keys."""
        return (torch.cat((key, value), dim=-1), key) if self.is_latent else (key, value)

    def hide_unselected(self, mask: torch.Tensor | None, token_indices: Any, num_keys: int) -> torch.Tensor | None:
        """Return a mask (..., num_keys) that also hides keys that were not selected for these tokens."""
        if self.indices is None or mask is None:
            return mask
        return mask.masked_fill(unselected_keys(self.indices[0, token_indices], num_keys), float("-inf"))


def softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    extras: Extras,
) -> torch.Tensor:
    """Return the attention of queries over keys, (B, kv_heads, group, T, value_size).

    query is (B, kv_heads, group, T, size), key and value (B, keys, kv_heads, their size). The mask is additive, (T,
    keys) for one row or (B, 1, 1, 1, keys) for single tokens; None for causal attention of the last T tokens.
    """
    keys, values = key.transpose(1, 2), value.transpose(1, 2)
    if extras.softcap is None and extras.sinks is None:
        return _kernel(query, keys, values, mask, scaling)
    mask = _causal(query, keys) if mask is None else mask
    step = max(1, _MAX_LOGITS * query.shape[3] // (query[..., 0].numel() * keys.shape[2]))
    rows = [slice(start, start + step) for start in range(0, query.shape[3], step)]
    parts = [
        _written_out(
            query[..., row, :], keys, values, mask if mask.shape[-2] == 1 else mask[..., row, :], scaling, extras
        )
        for row in rows
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


def _kernel(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    # Grouped-query attention (Ainslie et al., EMNLP 2023). For single tokens, the heads of a group are treated as
    # several queries of one head.
    is_single = query.shape[3] == 1
    flat = query.squeeze(3) if is_single else query.flatten(1, 2)
    output: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        flat,
        keys,
        values,
        attn_mask=mask.squeeze(3) if mask is not None and is_single else mask,
        is_causal=mask is None and not is_single,
        scale=scaling,
        enable_gqa=not is_single and query.shape[2] > 1,
    )
    return output.reshape(*query.shape[:-1], values.shape[3])


def _written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    extras: Extras,
) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.matmul(query, keys.transpose(2, 3)[:, :, None]).float() * scale
    if extras.softcap is not None:
        logits = torch.tanh(logits / extras.softcap) * extras.softcap
    logits = logits + mask
    if extras.sinks is not None:
        sinks = extras.sinks.float().reshape(1, *query.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values[:, :, None])


def _causal(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    num_new, num_keys = query.shape[3], keys.shape[2]
    hidden = torch.ones((num_new, num_keys), dtype=torch.bool, device=query.device).triu(1 + num_keys - num_new)
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
