"""Attention over blocks: what every layer of a step shares, who computes it, and how transformers comes to call it.

`AttentionBackend` is the interface: one method, which takes a step and returns what its layers call. A backend stands
in `BACKENDS`, and the first that fits the KV tensors is taken. There is one yet: PyTorch's own attention (`sdpa`),
which runs wherever torch does. `paged_attention` is registered with transformers, whose models call it in each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ModelError

ATTENTION_NAME = "blockyard"
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupRows:
    """What a layer group reads and writes in a step.

    slot_mapping: int64 (T,). block_tables: int32 (B, blocks), 0 behind a window. sliding_window: tokens that a token
    attends to, its own included; 0 for all.
    """

    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    sliding_window: int = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """The rows of a step that attention needs, a sequence each: int64 (B,), and the tables of each layer group."""

    num_computed: IntArray
    num_scheduled: IntArray
    groups: list[GroupRows]

    @property
    def seq_lens(self) -> IntArray:
        """Tokens of each sequence after the step."""
        return self.num_computed + self.num_scheduled

    @property
    def starts(self) -> IntArray:
        """Where each sequence's new tokens begin among all of the step."""
        starts: IntArray = np.cumsum(self.num_scheduled) - self.num_scheduled
        return starts


class AttentionBackend(Protocol):
    """Computes attention over a cache's blocks. One is made for an engine, with the KV tensors it is to read."""

    def begin(self, shape: StepShape) -> Attend:
        """Prepare a step: everything that its layers share."""


class Attend(Protocol):
    """What travels with a call of the model to every layer: see `paged_attention`."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """query (heads, T, head_size), key and value (T, kv_heads, head_size) to output (T, heads, head_size)."""


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
