"""Runs the step that takes the most memory. All block tables repeat one block, so the cache takes little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from blockyard.config import CacheConfig
from blockyard.groups import LayerGroup
from blockyard.storage import KVCache

from ..attention.interface import GroupTables, IntArray, StepShape
from ..decoding.sampler import SamplingContext, StepSampler
from ..decoding.speculation import PromptLookup
from ..moves import MoveQueue
from ..runner import ForwardBatch, ModelRunner
from ..sampling import SamplingParams

_ONLY_BLOCK = 1
#: Sampling parameters that take the most memory.
_SAMPLING = SamplingParams(temperature=1.0, repetition_penalty=1.1, logprobs=20)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Maximum sizes of a step: tokens, sequences, tokens per sequence, and logits per sequence (more with drafts)."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    logits_per_seq: int = 1

    @classmethod
    def of(cls, config: CacheConfig, max_num_batched_tokens: int, speculation: PromptLookup | None) -> StepSizes:
        """Return the sizes of an engine with this cache."""
        logits = 1 if speculation is None else 1 + speculation.num_tokens
        return cls(max_num_batched_tokens, config.max_num_seqs, config.max_model_len, logits)

    def __str__(self) -> str:
        return (
            f"{self.max_num_batched_tokens} tokens (max_num_batched_tokens) of {self.max_num_seqs} sequences "
            f"(max_num_seqs) that reach {self.max_model_len} (max_model_len)"
        )


class TrialCache(KVCache):
    """A cache of one block and the null block, with buffers as long as for `longest` tokens."""

    def __init__(self, longest: int, block_size: int, **others: Any) -> None:
        self._longest = longest
        super().__init__(_ONLY_BLOCK + 1, block_size, **others)

    def new_buffer(self, num_tokens: int) -> torch.Tensor:
        return super().new_buffer(max(num_tokens, self._longest))


def run_largest_step(
    cache: TrialCache,
    groups: Sequence[LayerGroup],
    sizes: StepSizes,
    make_runner: Callable[[KVCache], ModelRunner],
) -> None:
    """Compute the step and sample from its logits, with all allocations of an engine except weights and blocks.

    The attention backend takes as much memory as in service: it reads as many blocks, though they are all the same one.
    """
    logits = make_runner(cache).run(largest_step(groups, sizes), MoveQueue())
    with torch.inference_mode():
        # The logits of such tokens are meaningless and may be infinite.
        chooser = StepSampler(logits.nan_to_num_())
        chooser.choose(0, SamplingContext(_SAMPLING, 0, 1), [0])


def largest_step(groups: Sequence[LayerGroup], sizes: StepSizes) -> ForwardBatch:
    """Return a batch with the maximum number of tokens, sequences and logits, each sequence at its maximum length.

    The first sequences have the longest chunks that leave the others one token each.
    """
    counts = _counts(sizes)
    num_tokens = int(counts.sum())
    rows = [_rows(group, num_tokens, len(counts), sizes.max_model_len) for group in groups]
    shape = StepShape(sizes.max_model_len - counts, counts, rows)
    num_logits = min(num_tokens, len(counts) * sizes.logits_per_seq)
    logits_indices = np.arange(num_tokens - num_logits, num_tokens, dtype=np.int64)
    positions = np.arange(num_tokens) + np.repeat(shape.num_computed - shape.starts, counts)
    return ForwardBatch(shape, np.zeros(num_tokens, np.int64), positions, logits_indices)


def _counts(sizes: StepSizes) -> IntArray:
    counts = np.ones(sizes.max_num_seqs, np.int64)
    left = sizes.max_num_batched_tokens - sizes.max_num_seqs
    for index in range(len(counts)):
        counts[index] += min(left, sizes.max_model_len - 1)
        left -= int(counts[index]) - 1
    return counts


def _rows(group: LayerGroup, num_tokens: int, num_seqs: int, length: int) -> GroupTables:
    slots = _ONLY_BLOCK * group.block_size + np.arange(num_tokens, dtype=np.int64) % group.block_size
    tables = np.full((num_seqs, -(-length // group.block_size)), _ONLY_BLOCK, np.int32)
    return GroupTables(slots, tables, group.sliding_window)
