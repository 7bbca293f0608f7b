"""Runs a step's tokens through modules with states, each sequence with its own state.

Attention takes the tokens of all sequences as one row. A module with states is instead called with batches of sequences
that have equally many tokens in the step: all decodes are one batch, and so are equal chunks of prompts. It finds their
states in a cache of transformers' own layers over the memory of the state slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from blockyard.errors import ModelError
from blockyard.storage import StateSlots

from ..attention.interface import select_tokens
from .learning import CONV, CachedTensor, Mixer, StateShape

IntArray = NDArray[np.int64]

_current: ContextVar[StateStep | None] = ContextVar("blockyard_states", default=None)


@contextmanager
def mixing(step: StateStep | None) -> Iterator[None]:
    """Let every mixer that this thread runs take its states from `step`, in a `with` block."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


class MixerForward:
    """Replacement for a mixer's forward while its model is patched."""

    def __init__(self, mixer: Mixer, own: Any) -> None:
        self._mixer = mixer
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the mixer on the tokens of a step, (1, T, ...) each."""
        step = _current.get()
        if step is None:
            raise ModelError("the model was called outside an engine's step while the engine had patched its mixers")
        given = {**dict(zip(self._mixer.parameters, args, strict=False)), **kwargs}
        return step.run(self._mixer, self._own, given)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences with equally many tokens in a step.

    Attributes:
        slots: int64 (n,).
        token_indices: indices of their tokens in the step's row, int64 (n, count).
        has_state: whether any of their tokens were computed before.
        rows: bytes of their states; a copy if the slots are not adjacent.
        cache: transformers' cache over `rows`.
    """

    slots: IntArray
    token_indices: torch.Tensor
    has_state: bool
    rows: torch.Tensor
    is_copy: bool
    cache: Cache

    def run(self, mixer: Mixer, own: Any, given: dict[str, Any], num_tokens: int) -> Any:
        """Run a mixer on these sequences and return its output, (n, count, ...) each.

        num_tokens: tokens of the whole step.
        """
        count = self.token_indices.shape[1]
        width = 1 if self.has_state and not mixer.takes_chunks else count
        parts = []
        for token_indices in self.token_indices.split(width, dim=1):
            asked = {name: select_tokens(value, token_indices, num_tokens) for name, value in given.items()}
            parts.append(own(**{**asked, mixer.cache_name: self.cache}))
        return parts[0] if len(parts) == 1 else _concatenated(parts)


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_concatenated(outputs) for outputs in zip(*parts, strict=True))
    return torch.cat(list(parts), dim=1)


class StateStep:
    """The states of one step. Call `finish` after the model has run.

    `slots`, `num_computed` and `num_scheduled` are those of each sequence, int64 (B,).
    """

    def __init__(
        self, shape: StateShape, memory: StateSlots, slots: IntArray, num_computed: IntArray, num_scheduled: IntArray
    ) -> None:
        self._memory = memory
        self._num_tokens = int(num_scheduled.sum())
        starts = np.cumsum(num_scheduled) - num_scheduled
        self._batches = [
            _batch(shape, memory, slots[rows], starts[rows], count, has_state)
            for (count, has_state), rows in _alike(slots, num_computed, num_scheduled)
        ]

    def run(self, mixer: Mixer, own: Any, given: dict[str, Any]) -> Any:
        """Call `own`, a mixer's forward, for each batch; return its output for all tokens in order."""
        return self._joined(mixer, [batch.run(mixer, own, given, self._num_tokens) for batch in self._batches])

    def _joined(self, mixer: Mixer, outputs: Sequence[Any]) -> Any:
        if all(isinstance(output, tuple) for output in outputs):
            return tuple(self._joined(mixer, parts) for parts in zip(*outputs, strict=True))
        joined: torch.Tensor | None = None
        for batch, output in zip(self._batches, outputs, strict=True):
            if not isinstance(output, torch.Tensor) or output.shape[:2] != batch.token_indices.shape:
                shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                raise ModelError(
                    f"{mixer.name} keeps a state and returns {shape} for {tuple(batch.token_indices.shape)} tokens; "
                    f"the engine needs one output per token"
                )
            if joined is None:
                joined = output.new_empty((1, self._num_tokens, *output.shape[2:]))
            joined[0, batch.token_indices] = output
        return joined

    def finish(self) -> None:
        """Write copied states back to their slots. O(bytes)."""
        for batch in self._batches:
            if batch.is_copy:
                self._memory.put_back(batch.slots, batch.rows)


def _alike(
    slots: IntArray, num_computed: IntArray, num_scheduled: IntArray
) -> Iterator[tuple[tuple[int, bool], IntArray]]:
    """Yield the sequences of each batch, by slot.

    The sequences of a batch have equally many tokens, and all or none of them have a state.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for row in np.argsort(slots, kind="stable").tolist():
        if num_scheduled[row]:
            alike.setdefault((int(num_scheduled[row]), bool(num_computed[row])), []).append(row)
    for key, rows in alike.items():
        yield key, np.array(rows)


def _batch(
    shape: StateShape, memory: StateSlots, slots: IntArray, starts: IntArray, count: int, has_state: bool
) -> _Batch:
    rows, is_copy = memory.rows(slots)
    token_indices = torch.from_numpy(starts[:, None] + np.arange(count)).to(rows.device)
    return _Batch(
        slots, token_indices, has_state, rows, is_copy, _cache(shape.cached_tensors, memory.views(rows), has_state)
    )


def _cache(kept: Sequence[CachedTensor], views: Sequence[torch.Tensor], has_state: bool) -> Cache:
    """Return a cache of transformers' layers whose states are `views`; they are updated in place."""
    num_layers = 1 + max(tensor.layer for tensor in kept)
    num_states = 1 + max(tensor.index for tensor in kept)
    layers = [LinearAttentionLayer(num_states) for _ in range(num_layers)]
    for tensor, view in zip(kept, views, strict=True):
        layer = layers[tensor.layer]
        getattr(layer, tensor.kind)[tensor.index] = view
        getattr(layer, f"is_{tensor.kind}_initialized")[tensor.index] = True
        layer.has_previous_state[tensor.index] = has_state
        if tensor.kind == CONV:
            layer.conv_kernel_size[tensor.index] = view.shape[-1]
        layer.dtype, layer.device = view.dtype, view.device
    return Cache(layers=layers)
