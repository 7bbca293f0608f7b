"""A step's forward pass: block moves, input tensors, the model, and the logits."""

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
from .attention.interface import AttentionBackend, GroupTables, IntArray, StepShape
from .moves import MoveQueue
from .patching import PatchedModel
from .shape import KVShape
from .states.mixing import StateStep


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward pass: T tokens of several sequences in one row.

    Attributes:
        token_ids: int64 (T,).
        positions: position of each token in its sequence, int64 (T,).
        logits_indices: indices of the tokens whose logits are needed, int64.
        plan: the plan that it was made from, if any.
    """

    shape: StepShape
    token_ids: IntArray
    positions: IntArray
    logits_indices: IntArray
    plan: StepPlan | None = None

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        groups: Sequence[LayerGroup],
        num_logits: Sequence[int] | IntArray,
        drafts: Sequence[int] | IntArray = (),
    ) -> ForwardBatch:
        """Return the batch of a plan. Call it before the cache changes. O(tokens).

        `num_logits` is the number of last tokens of each sequence whose logits are needed; `drafts` replace the plan's
        unknown tokens (-1), in order.
        """
        rows = [
            GroupTables(part.slot_mapping, part.block_tables, group.sliding_window)
            for part, group in zip(plan.groups, groups, strict=True)
        ]
        shape = StepShape(plan.num_computed.astype(np.int64), plan.num_scheduled.astype(np.int64), rows)
        token_ids = plan.input_ids.astype(np.int64)
        if len(drafts) > 0:
            token_ids[token_ids < 0] = drafts
        return cls(
            shape, token_ids, plan.positions.copy(), _last_indices(shape, np.asarray(num_logits, np.int64)), plan
        )


def _last_indices(shape: StepShape, counts: IntArray) -> IntArray:
    """Return the indices in the step of each sequence's last `counts` tokens."""
    first = shape.starts + shape.num_scheduled - np.cumsum(counts)
    indices: IntArray = np.arange(counts.sum()) + np.repeat(first, counts)
    return indices


class StepRunner(Protocol):
    """Carries out steps, on one rank or on all."""

    @property
    def attention_backend(self) -> str:
        """Name of the chosen attention backend."""

    def run(self, batch: ForwardBatch, moves: MoveQueue) -> torch.Tensor:
        """Carry out block moves, compute the batch, and return logits (len(logits_indices), vocabulary)."""

    def carry_out(self, moves: MoveQueue) -> None:
        """Carry out block moves and compute nothing."""


class ModelRunner:
    """Carries out steps with one model and one KV cache; a hybrid model gets `max_num_seqs` state slots."""

    def __init__(
        self, patched: PatchedModel, kv_cache: KVCache, shape: KVShape, attention_backend: str, max_num_seqs: int = 1
    ) -> None:
        self._patched = patched
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
        return self._backend.name

    def run(self, batch: ForwardBatch, moves: MoveQueue) -> torch.Tensor:
        self.carry_out(moves)
        return self.compute(batch)

    def carry_out(self, moves: MoveQueue) -> None:
        moves.carry_out(self._kv_cache, self.slots)

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch without block moves, and return the logits as `run` does."""
        attend = self._backend.begin(batch.shape)
        states = self._begin_states(batch)
        with self._patched:
            logits = self._patched.forward(
                self._row(batch.token_ids),
                self._row(batch.positions),
                torch.from_numpy(batch.logits_indices),
                attend,
                states,
            )
        if states is not None and self.slots is not None:
            states.finish()
            if batch.plan is not None:
                self.slots.save(batch.plan.states.saves, batch.plan.states.save_blocks)
        return logits

    def _begin_states(self, batch: ForwardBatch) -> StateStep | None:
        """Return the states of a step. Without a plan, sequence i has slot i."""
        if self._states is None or self.slots is None:
            return None
        num_seqs = len(batch.shape.num_computed)
        slots = np.arange(num_seqs) if batch.plan is None else batch.plan.rows
        return StateStep(self._states, self.slots, slots, batch.shape.num_computed, batch.shape.num_scheduled)

    def _row(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values)[None].to(self._patched.device)
