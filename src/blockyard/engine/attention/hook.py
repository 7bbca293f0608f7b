"""How transformers comes to call us: a function under a name of its own, which its models run in every layer."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ModelError
from .interface import Attend

ATTENTION_NAME = "blockyard"


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    blockyard_attend: Attend | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer: query (1, heads, T, head_size), key and value likewise.

    All T tokens of a step are one row; which sequence each belongs to, `blockyard_attend` knows. It comes with the
    call of the model, which hands keywords that it does not know on to its layers.
    """
    if blockyard_attend is None:
        raise ModelError("the model was called outside an engine's step while its attention was set to 'blockyard'")
    others["attention_mask"] = attention_mask
    tokens_first = key[0].transpose(0, 1), value[0].transpose(0, 1)
    return blockyard_attend(module.layer_idx, query[0], *tokens_first, scaling, others)[None], None
