"""A scheduled step's forward pass: copies, tensors, the model, and the logits that choose the next tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.plan import StepPlan
from ..storage import KVCache
from .attention import StepAttention, StepShape
from .borrowing import BorrowedModel
from .scheduler import ScheduledStep

#: Tokens that a padded gather of decodes may hold, unless one sequence alone is longer.
_GATHER_TOKENS = 16384


class ModelRunner:
    """Carries out steps on one model and one KV cache.

    The buffer that decodes are gathered into is made once; memory that is never used is never touched.
    """

    def __init__(self, borrowed: BorrowedModel, kv_cache: KVCache, max_model_len: int) -> None:
        self._borrowed = borrowed
        self._kv_cache = kv_cache
        longest = min(max_model_len, kv_cache.num_blocks * kv_cache.block_size)
        self._buffer = kv_cache.new_buffer(max(_GATHER_TOKENS, longest))

    def run(self, step: ScheduledStep, plan: StepPlan) -> torch.Tensor:
        """Compute the step; returns logits (requests that sample, vocabulary), in the order of the step's rows."""
        for copies in step.copies:
            self._kv_cache.copy_blocks(copies)
        shape = StepShape(step.num_computed, step.num_scheduled, plan.block_tables)
        attention = StepAttention(self._kv_cache, self._buffer, plan.slot_mapping, shape)
        last_tokens = (shape.starts + step.num_scheduled - 1)[step.samples]
        with self._borrowed:
            return self._borrowed.forward(
                self._row(_token_ids(step)),
                self._row(_positions(shape)),
                torch.from_numpy(last_tokens),
                attention,
            )

    def _row(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values)[None].to(self._borrowed.device)


def _token_ids(step: ScheduledStep) -> NDArray[np.int64]:
    """The tokens that the step computes, one sequence after another."""
    token_ids: list[int] = []
    for request, start, count in zip(
        step.requests, step.num_computed.tolist(), step.num_scheduled.tolist(), strict=True
    ):
        token_ids += request.token_ids[start : start + count]
    return np.array(token_ids, np.int64)


def _positions(shape: StepShape) -> NDArray[np.int64]:
    """Each token's place in its sequence."""
    first = np.repeat(shape.num_computed - shape.starts, shape.num_scheduled)
    positions: NDArray[np.int64] = first + np.arange(len(first))
    return positions
