"""What every layer of a step shares, and the interface of those who compute attention over it.

A backend says whether it can serve an engine's tensors, takes steps, and returns what the layers of each call.
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
    #: Tokens of each sequence after the step.
    seq_lens: IntArray = field(init=False)
    #: Where each sequence's new tokens begin among all of the step.
    starts: IntArray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seq_lens", self.num_computed + self.num_scheduled)
        object.__setattr__(self, "starts", np.cumsum(self.num_scheduled) - self.num_scheduled)


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
        """Return why it cannot serve these tensors on this machine, as "it needs ..."; None if it can."""

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


class InOrder:
    """Counts the calls of attention in a step, 0, 1, ... in place of layers: a hybrid model has it in some of them.

    A module that several layers share is counted each time.
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
        """Attention is asked for as of `Attend`, for the next layer that has it."""
        number = self._number
        self._number += 1
        return self._attend(number, query, key, value, scaling, others)


def of_tokens(value: Any, places: torch.Tensor, num_tokens: int) -> Any:
    """Return what an argument of a module says of some tokens: theirs, of a tensor of all tokens of the step."""
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return value[0, places]
    if isinstance(value, tuple):
        return tuple(of_tokens(item, places, num_tokens) for item in value)
    return value


class Reach:
    """What each sequence reads: the blocks from the first that its window reaches, and positions counted from there.

    lengths: tokens from the first read block to the sequence's end, int64 (B,). firsts: position of the first of them.
    """

    def __init__(self, shape: StepShape, rows: GroupRows, block_size: int) -> None:
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
        """Return block tables of `rows`, each from its first read block on; behind a row's blocks stands anything."""
        if not self.window:
            return self._tables[rows]
        width = self._tables.shape[1]
        columns = self._first_blocks[rows][:, None] + np.arange(width - int(self._first_blocks[rows].min()))
        shifted: NDArray[np.int32] = self._tables[rows[:, None], np.minimum(columns, width - 1)]
        return shifted

    def hidden(self, positions: IntArray, num_keys: int) -> NDArray[np.bool_]:
        """Say which of `num_keys` keys the tokens at `positions` (any shape, counted like the keys) must not see."""
        return hidden_keys(np.arange(num_keys), positions, self.window)


def hidden_keys(keys: IntArray, positions: IntArray, window: int) -> NDArray[np.bool_]:
    """Say which keys, by their positions (K,), tokens at `positions` (...) must not see: (..., K); window: 0: all."""
    own = positions[..., None]
    hidden: NDArray[np.bool_] = keys > own
    if window:
        hidden |= keys <= own - window
    return hidden
