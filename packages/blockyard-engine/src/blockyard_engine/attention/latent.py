"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over the compressed cache that `sizing` counts.

A layer caches one latent vector and one rotated key per token, which serve all heads. A transformers model expands them
to keys and values of every head (`expand_kv`). Here the expansion of keys is applied to the queries and that of values
to the output, which is equal because both are linear. All heads then attend to the same vectors, and nothing cached is
expanded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .interface import Attend

#: Attention argument: whether key and value are the latent vector and the rotated key.
LATENT = "latent"


def latent_layers(model: Any) -> list[Any]:
    """Return the attention modules of a model whose keys and values can stay compressed."""
    return [module for module in model.modules() if hasattr(module, "expand_kv") and _is_plain(module)]


def compress(layers: Sequence[Any]) -> None:
    """Let the modules pass the latent vector as key and the rotated key as value. `expand` undoes this."""
    for module in layers:
        module.expand_kv = _compressed


def expand(layers: Sequence[Any]) -> None:
    """Let the modules expand keys and values again."""
    for module in layers:
        module.__dict__.pop("expand_kv", None)


def is_compressed(module: Any) -> bool:
    """Return whether `compress` is in effect for a module."""
    return getattr(module, "expand_kv", None) is _compressed


def attend_latent(
    module: Any,
    attend: Attend,
    query: torch.Tensor,
    latent: torch.Tensor,
    rotated: torch.Tensor,
    scaling: float | None,
    others: dict[str, Any],
) -> torch.Tensor:
    """Compute attention of a compressed layer.

    query is (heads, T, nope + rope), latent (T, 1, rank), rotated (T, 1, rope).
    """
    split = query.shape[2] - rotated.shape[2]
    weight = module.kv_b_proj.weight.view(query.shape[0], -1, latent.shape[2])
    absorbed = torch.matmul(query[:, :, :split], weight[:, :split])
    output = attend(
        module.layer_idx, torch.cat((absorbed, query[:, :, split:]), dim=2), latent, rotated, scaling, others
    )
    return torch.einsum("thr,hvr->thv", output, weight[:, split:])


def _compressed(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kv_nope, k_rot


def _is_plain(module: Any) -> bool:
    """Return whether the expansion is a plain matrix: not quantized, without adapter or bias."""
    expansion: Any = getattr(module, "kv_b_proj", None)
    return type(expansion) is torch.nn.Linear and expansion.bias is None
