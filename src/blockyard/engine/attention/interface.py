"""What every layer of a step shares, and the interface of those who compute attention over it.

A backend says whether it can serve an engine's tensors, takes steps, and returns what the layers of each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...storage import KVCache

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
    """Computes attention over a cache's blocks. One is made for an engine."""

    #: By which an engine asks for it.
    name: ClassVar[str]
    #: What it computes beside scaled dot products (`softmax.Extras.names`).
    extras: ClassVar[frozenset[str]]

    def __init__(self, kv_cache: KVCache, max_model_len: int) -> None:
        """For these tensors, and sequences of at most max_model_len tokens."""

    @classmethod
    def refusal(cls, kv_cache: KVCache) -> str | None:
        """Why it cannot serve these tensors on this machine, as "it needs ..."; None if it can."""

    def begin(self, shape: StepShape) -> Attend:
        """Prepare a step: everything that its layers share."""


class Attend(Protocol):
    """What travels with a call of the model to every layer: see `hook.paged_attention`."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """query (heads, T, size), key and value (T, kv_heads, their size) to output (T, heads, value's size)."""
