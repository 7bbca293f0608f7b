"""How transformers comes to call us: a function under a name of its own, which its models run in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ...errors import ModelError
from .interface import Attend
from .latent import LATENT, attend_latent, is_compressed

ATTENTION_NAME = "blockyard"

_current: ContextVar[Attend | None] = ContextVar("blockyard_attend", default=None)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Have every layer that this thread runs meanwhile hand its queries, keys and values to `attend`.

    Not an argument of the model's call: some models do not hand arguments on to their layers.
    """
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer: query (1, heads, T, head_size), key and value likewise.

    All T tokens of a step are one row; which sequence each belongs to is known to what `attending` was given.
    """
    attend = _current.get()
    if attend is None:
        raise ModelError("the model was called outside an engine's step while its attention was set to 'blockyard'")
    others["attention_mask"] = attention_mask
    others[LATENT] = is_compressed(module)
    own = attend_latent if others[LATENT] else _attend
    tokens_first = key[0].transpose(0, 1), value[0].transpose(0, 1)
    return own(module, attend, query[0], *tokens_first, scaling, others)[None], None


def _attend(
    module: Any,
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    others: dict[str, Any],
) -> torch.Tensor:
    return attend(module.layer_idx, query, key, value, scaling, others)
