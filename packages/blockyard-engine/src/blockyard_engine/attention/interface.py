"""The interface of attention backends, and data that all layers of a step share.

A backend reports whether it can serve an engine's tensors, prepares steps, and computes the attention of each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blockyard.storage import KVCache

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Slots and block tables of one layer group in a step.

    Attributes:
        slot_mapping: int64 (T,).
        block_tables: int32 (B, blocks), 0 before a sliding window.
        sliding_window: tokens that a token attends to, itself included; 0 for all.
    """

    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    sliding_window: int = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """Lengths and block tables of a step's sequences.

    Attributes:
        num_computed: tokens of each sequence before the step, int64 (B,).
        num_scheduled: tokens of each sequence in the step, int64 (B,).
        groups: slots and tables of each layer group.
        seq_lens: tokens of each sequence after the step.
        starts: index of each sequence's first new token in the step.
    """

    num_computed: IntArray
    num_scheduled: IntArray
    groups: list[GroupTables]
    seq_lens: IntArray = field(init=False)
    starts: IntArray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seq_lens", self.num_computed + self.num_scheduled)
        object.__setattr__(self, "starts", np.cumsum(self.num_scheduled) - self.num_scheduled)


class AttentionBackend(Protocol):
    """Computes attention over a cache's blocks. An engine has one."""

    #: Name in `attention_backend`.
    name: ClassVar[str]
    #: Special features that it supports (`softmax.Extras.names`).
    extras: ClassVar[frozenset[str]]

    def __init__(self, kv_cache: KVCache, max_model_len: int) -> None:
        """Prepare for these tensors, and sequences of at most max_model_len tokens."""

    @classmethod
    def refusal(cls, kv_cache: KVCache) -> str | None:
        """Return why it cannot serve these tensors on this machine, as "it needs ..."; None if it can."""

    def begin(self, shape: StepShape) -> Attend:
        """Prepare the data that all layers of a step share."""


class Attend(Protocol):
    """Attention of one step, called by every layer through `patching.paged_attention`."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """Return the attention of a layer's new tokens, (T, heads, value_size).

        query is (heads, T, size), key and value (T, kv_heads, their size). `others` are further arguments that
        transformers passes to attention.
        """


class InOrder:
    """Numbers the calls of attention in a step 0, 1, ..., because a hybrid model has attention only in some layers.

    A module that several layers share counts each time.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._number = 0

    def __call__(
        self,
        layer: int,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """Compute attention (`Attend`) under the next number."""
        number = self._number
        self._number += 1
        return self._attend(number, query, key, value, scaling, others)


def select_tokens(value: Any, token_indices: torch.Tensor, num_tokens: int) -> Any:
    """Return a module's argument for some tokens: tensors over all tokens of the step are indexed."""
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return value[0, token_indices]
    if isinstance(value, tuple):
        return tuple(select_tokens(item, token_indices, num_tokens) for item in value)
    return value


class ReadRange:
    """The tokens that each sequence reads, counted from the first block that its window reaches.

    Attributes:
        lengths: tokens from the first read block to the sequence's end, int64 (B,).
        firsts: position of the first read token, int64 (B,).
    """

    def __init__(self, shape: StepShape, rows: GroupTables, block_size: int) -> None:
        self.shape = shape
        self.window = rows.sliding_window
        first_blocks = np.zeros_like(shape.num_computed)
        if self.window:
            # `windows.first_needed_block`, for all sequences at once.
            first_blocks = np.maximum(shape.num_computed - self.window + 1, 0) // block_size
        self._tables = rows.block_tables
        self._first_blocks = first_blocks
        self.firsts: IntArray = first_blocks * block_size
        self.lengths: IntArray = shape.seq_lens - self.firsts

    def tables(self, rows: IntArray) -> NDArray[np.int32]:
        """Return block tables of `rows` from each one's first read block; later entries are arbitrary."""
        if not self.window:
            return self._tables[rows]
        width = self._tables.shape[1]
        columns = self._first_blocks[rows][:, None] + np.arange(width - int(self._first_blocks[rows].min()))
        shifted: NDArray[np.int32] = self._tables[rows[:, None], np.minimum(columns, width - 1)]
        return shifted

    def hidden(self, positions: IntArray, num_keys: int) -> NDArray[np.bool_]:
        """Return which of `num_keys` keys the tokens at `positions` must not see; both are counted from one block."""
        return hidden_keys(np.arange(num_keys), positions, self.window)


def hidden_keys(keys: IntArray, positions: IntArray, window: int) -> NDArray[np.bool_]:
    """Return which keys (K,) tokens at `positions` (...) must not attend to, bool (..., K); window 0 is none."""
    own = positions[..., None]
    hidden: NDArray[np.bool_] = keys > own
    if window:
        hidden |= keys <= own - window
    return hidden
