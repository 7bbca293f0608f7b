"""A step's forward pass: block moves, tensors, the model, and the logits that choose the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blockyard import StepPlan
from blockyard.groups import LayerGroup
from blockyard.storage import KVCache, StateSlots

from .attention.backends import select_backend
from .attention.context import ContextBackend
from .attention.interface import AttentionBackend, GroupRows, IntArray, StepShape
from .borrowing import BorrowedModel
from .moves import MoveQueue
from .shape import KVShape
from .states.mixing import StateStep


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What the model computes in one pass, as one row of T tokens.

    token_ids, positions: int64 (T,), the second is each token's place in its sequence. kept: places among them whose
    logits are wanted, int64. plan: what it was made from, if anything.
    """

    shape: StepShape
    token_ids: IntArray
    positions: IntArray
    kept: IntArray
    plan: StepPlan | None = None

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        groups: Sequence[LayerGroup],
        num_logits: Sequence[int] | IntArray,
        drafts: Sequence[int] | IntArray = (),
    ) -> ForwardBatch:
        """The pass for a plan: the tokens that the cache knows, and `drafts` in the places of those that it does not.

        num_logits: logits wanted, of the last tokens of each sequence. The tables and tokens are the plan's, so it runs
        before the cache changes. O(tokens).
        """
        rows = [
            GroupRows(part.slot_mapping, part.block_tables, group.sliding_window)
            for part, group in zip(plan.groups, groups, strict=True)
        ]
        shape = StepShape(plan.num_computed.astype(np.int64), plan.num_scheduled.astype(np.int64), rows)
        token_ids = plan.input_ids.astype(np.int64)
        if len(drafts) > 0:
            token_ids[token_ids < 0] = drafts
        return cls(shape, token_ids, plan.positions.copy(), _last_places(shape, np.asarray(num_logits, np.int64)), plan)


def _last_places(shape: StepShape, counts: IntArray) -> IntArray:
    """Return the places of the last `counts` tokens of each sequence among all of the step."""
    first = shape.starts + shape.num_scheduled - np.cumsum(counts)
    places: IntArray = np.arange(counts.sum()) + np.repeat(first, counts)
    return places


class StepRunner(Protocol):
    """Carries out steps."""

    @property
    def attention_backend(self) -> str:
        """Return the name of the backend that was chosen."""

    def run(self, batch: ForwardBatch, moves: MoveQueue) -> torch.Tensor:
        """Move blocks, then compute the batch; returns logits (kept, vocabulary), in the order of its rows."""

    def carry_out(self, moves: MoveQueue) -> None:
        """Move blocks, and compute nothing."""


class ModelRunner:
    """Carries out steps on one model and one KV cache.

    max_num_seqs: sequences that run at once: as many states are kept, of a model that has some, in `slots`.
    """

    def __init__(
        self, borrowed: BorrowedModel, kv_cache: KVCache, shape: KVShape, attention_backend: str, max_num_seqs: int = 1
    ) -> None:
        self._borrowed = borrowed
        self._states = shape.states
        self.slots = None if shape.states is None else StateSlots(max_num_seqs, shape.states.tensors, kv_cache)
        self._kv_cache = kv_cache
        self._backend: AttentionBackend
        if shape.context is None:
            self._backend = select_backend(attention_backend, kv_cache, shape.max_model_len, shape.extras)
        else:
            self._backend = ContextBackend(kv_cache, shape.context)

    @property
    def attention_backend(self) -> str:
        """Return the name of the backend that was chosen."""
        return self._backend.name

    def run(self, batch: ForwardBatch, moves: MoveQueue) -> torch.Tensor:
        """Move blocks, then compute the batch; returns logits (kept, vocabulary), in the order of its rows."""
        moves.carry_out(self._kv_cache, self.slots)
        return self.compute(batch)

    def carry_out(self, moves: MoveQueue) -> None:
        """Move blocks, and compute nothing."""
        moves.carry_out(self._kv_cache, self.slots)

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Does as `run`, where no blocks are to be moved."""
        attend = self._backend.begin(batch.shape)
        states = self._begin_states(batch)
        with self._borrowed:
            logits = self._borrowed.forward(
                self._row(batch.token_ids), self._row(batch.positions), torch.from_numpy(batch.kept), attend, states
            )
        self._end_states(batch, states)
        return logits

    def _begin_states(self, batch: ForwardBatch) -> StateStep | None:
        """Return the states of a step; without a plan every sequence has the slot of its place."""
        if self._states is None or self.slots is None:
            return None
        num_seqs = len(batch.shape.num_computed)
        slots = np.arange(num_seqs) if batch.plan is None else batch.plan.rows
        return StateStep(self._states, self.slots, slots, batch.shape.num_computed, batch.shape.num_scheduled)

    def _end_states(self, batch: ForwardBatch, states: StateStep | None) -> None:
        """Keep the states that the plan says to keep."""
        if states is not None and self.slots is not None:
            states.finish()
            if batch.plan is not None:
                self.slots.save(batch.plan.states.saves, batch.plan.states.save_blocks)

    def _row(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values)[None].to(self._borrowed.device)
