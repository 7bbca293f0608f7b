"""The step that takes the most memory, run over a cache of two blocks: one of them stands for every block there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from blockyard.config import CacheConfig
from blockyard.groups import LayerGroup
from blockyard.storage import KVCache

from ..attention.interface import GroupRows, IntArray, StepShape
from ..decoding.sampler import Asked, StepSampler
from ..decoding.speculation import PromptLookup
from ..moves import MoveQueue
from ..runner import ForwardBatch, ModelRunner
from ..sampling import SamplingParams

_ONLY_BLOCK = 1
#: What takes the most of a sampler.
_SAMPLING = SamplingParams(temperature=1.0, repetition_penalty=1.1, logprobs=20)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most that a step has: tokens, sequences, tokens of a sequence, and logits of one, several with drafts."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    logits_per_seq: int = 1

    @classmethod
    def of(cls, config: CacheConfig, max_num_batched_tokens: int, speculation: PromptLookup | None) -> StepSizes:
        """Take the sizes of an engine with this cache."""
        logits = 1 if speculation is None else 1 + speculation.num_tokens
        return cls(max_num_batched_tokens, config.max_num_seqs, config.max_model_len, logits)

    def __str__(self) -> str:
        """Say it in words."""
        return (
            f"{self.max_num_batched_tokens} tokens (max_num_batched_tokens) of {self.max_num_seqs} sequences "
            f"(max_num_seqs) that reach {self.max_model_len} (max_model_len)"
        )


class TrialCache(KVCache):
    """A cache of one block, beside the null block, whose buffers are as long as those of one that holds `longest`."""

    def __init__(self, longest: int, block_size: int, **others: Any) -> None:
        self._longest = longest
        super().__init__(_ONLY_BLOCK + 1, block_size, **others)

    def new_buffer(self, num_tokens: int) -> torch.Tensor:
        """As that of a cache with room for the longest sequence."""
        return super().new_buffer(max(num_tokens, self._longest))


def run_largest_step(
    cache: TrialCache,
    groups: Sequence[LayerGroup],
    sizes: StepSizes,
    make_runner: Callable[[KVCache], ModelRunner],
) -> None:
    """Compute the step and choose from its logits. All that an engine keeps beside weights and blocks is made for it.

    The real attention backend takes as much as in service, since it reads as many blocks: the same one again and again.
    """
    logits = make_runner(cache).run(largest_step(groups, sizes), MoveQueue())
    with torch.inference_mode():
        # What the model makes of such tokens says nothing: it need not be finite.
        chooser = StepSampler(logits.nan_to_num_())
        chooser.choose(0, Asked(_SAMPLING, 0, 1), [0])


def largest_step(groups: Sequence[LayerGroup], sizes: StepSizes) -> ForwardBatch:
    """Return as many tokens, sequences and logits as a step may have, each sequence as long as one may be.

    The first sequence has a chunk at its end, which the others leave room for: one token is the least.
    """
    counts = _counts(sizes)
    num_tokens = int(counts.sum())
    rows = [_rows(group, num_tokens, len(counts), sizes.max_model_len) for group in groups]
    shape = StepShape(sizes.max_model_len - counts, counts, rows)
    num_logits = min(num_tokens, len(counts) * sizes.logits_per_seq)
    kept = np.arange(num_tokens - num_logits, num_tokens, dtype=np.int64)
    positions = np.arange(num_tokens) + np.repeat(shape.num_computed - shape.starts, counts)
    return ForwardBatch(shape, np.zeros(num_tokens, np.int64), positions, kept)


def _counts(sizes: StepSizes) -> IntArray:
    """Return the new tokens of each sequence."""
    counts = np.ones(sizes.max_num_seqs, np.int64)
    left = sizes.max_num_batched_tokens - sizes.max_num_seqs
    for place in range(len(counts)):
        counts[place] += min(left, sizes.max_model_len - 1)
        left -= int(counts[place]) - 1
    return counts


def _rows(group: LayerGroup, num_tokens: int, num_seqs: int, length: int) -> GroupRows:
    slots = _ONLY_BLOCK * group.block_size + np.arange(num_tokens, dtype=np.int64) % group.block_size
    tables = np.full((num_seqs, -(-length // group.block_size)), _ONLY_BLOCK, np.int32)
    return GroupRows(slots, tables, group.sliding_window)
