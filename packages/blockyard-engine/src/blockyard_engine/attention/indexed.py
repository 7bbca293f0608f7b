"""Sparse attention with an index (DeepSeek V3.2): a token attends only to the tokens that its layer's indexer selects.

An indexer stores one index key per token in transformers' cache through one call (`update_indexer`), scores the keys,
and returns the indices of the best ones in the sequence, which attention gets as `indices`. Index keys are in the
blocks of the keys and values. The model's own module is called: once for the keys of all tokens of a step, which are
written before any is read, then for sequences with equally many tokens in the step and in total, so it selects as it
does alone. No architecture is known by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from blockyard.arguments import reason
from blockyard.errors import ModelError
from blockyard.storage import KVCache, TableAddresses

from .interface import ReadRange, StepShape, select_tokens

#: Name of the attention argument with the selected indices.
INDICES = "indices"
_MASK = "attention_mask"
_NUM_TOKENS = 3


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Shape of a model's index.

    Attributes:
        size: elements of a token's index key.
        indexers: name, forward parameters, and cache parameter of each indexer module.
    """

    size: int
    indexers: tuple[tuple[str, tuple[str, ...], str], ...]


def learn_index(model: Any, device: torch.device) -> IndexShape:
    """Return the index of a model, found by running a few tokens with transformers' own cache.

    Raises `ModelError` if that fails, or if a module uses its index in an unsupported way.
    """
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    running: list[tuple[str, tuple[str, ...], dict[str, Any]]] = []
    seen: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {}

    def enter(name: str) -> Callable[..., None]:
        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = tuple(inspect.signature(module.forward).parameters)
            running.append((name, names, {**dict(zip(names, args, strict=False)), **kwargs}))

        return note

    own = cache.update_indexer

    def update_indexer(keys: torch.Tensor, layer: int) -> torch.Tensor:
        name, names, given = running[-1]
        seen[name] = (names, given, keys.shape[-1] if keys.ndim == 3 else 0)
        found: torch.Tensor = own(keys, layer)
        return found

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    cache.update_indexer = update_indexer
    tokens = torch.arange(1, _NUM_TOKENS + 1, device=device)[None] % int(config.vocab_size)
    try:
        with torch.inference_mode():
            model(input_ids=tokens, past_key_values=cache, use_cache=True)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise ModelError(
            f"{type(model).__name__} could not run tokens with an index: {type(error).__name__}: {reason(error)}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return _index_shape(seen, cache)


def _index_shape(seen: dict[str, tuple[tuple[str, ...], dict[str, Any], int]], cache: Any) -> IndexShape:
    indexers = []
    for name, (parameters, given, size) in seen.items():
        caches = [parameter for parameter, value in given.items() if value is cache]
        if len(caches) != 1 or not size or not isinstance(given.get(_MASK), torch.Tensor):
            raise ModelError(
                f"{name} keeps index keys, but is not called with one cache, one key per token and a mask; the engine "
                f"does not support that"
            )
        indexers.append((name, parameters, caches[0]))
    sizes = {size for _, _, size in seen.values()}
    if len(sizes) != 1:
        raise ModelError(f"the model's index keys have {sorted(sizes)} elements; all must have the same size, above 0")
    return IndexShape(sizes.pop(), tuple(indexers))


class TokenSelector(Protocol):
    """Selects the tokens that each token of a step attends to."""

    def select(self, indexer: Callable[..., torch.Tensor], given: dict[str, Any], cache_name: str) -> torch.Tensor:
        """Call an indexer for the tokens of a step; return indices, int32 (1, T, most), padded with -1."""


#: Selector of the step that this thread runs.
current_selector: ContextVar[TokenSelector | None] = ContextVar("blockyard_select", default=None)


class IndexerForward:
    """Replacement for an indexer's forward while its model is patched."""

    def __init__(self, parameters: tuple[str, ...], cache_name: str, own: Any) -> None:
        self._parameters = parameters
        self._cache_name = cache_name
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the indexer on the tokens of a step, (1, T, ...) each."""
        step = current_selector.get()
        if step is None:
            raise ModelError("the model was called outside an engine's step while the engine had patched its indexers")
        return step.select(self._own, {**dict(zip(self._parameters, args, strict=False)), **kwargs}, self._cache_name)


class _KeyRecorder:
    """Cache that records the keys of all tokens and returns one, so that nothing is scored."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.layer = 0

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        self.keys, self.layer = keys, layer
        return keys[:, :1]


@dataclass(frozen=True, slots=True)
class _StoredKeys:
    """Cache that returns the stored keys of sequences."""

    keys: torch.Tensor

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:  # noqa: ARG002
        return self.keys


@dataclass(frozen=True, slots=True)
class _EqualLengths:
    """Sequences with equally many tokens in the step and in total.

    Attributes:
        token_indices: indices of their tokens in the step, int64 (n, count).
        tables: addresses of their blocks.
        visible: keys that their tokens may attend to, bool (1, count, keys).
    """

    token_indices: torch.Tensor
    tables: TableAddresses
    visible: torch.Tensor


class IndexStep:
    """Selection of tokens for one step, in the one layer group that a model with an index has."""

    def __init__(self, kv_cache: KVCache, shape: StepShape, read_range: ReadRange, slots: Any) -> None:
        self._kv_cache = kv_cache
        self._slots = slots
        alike: dict[tuple[int, int], list[int]] = {}
        for row in np.flatnonzero(shape.num_scheduled).tolist():
            alike.setdefault((int(shape.num_scheduled[row]), int(read_range.lengths[row])), []).append(row)
        self._batches = [self._of(shape, read_range, np.array(rows), *key) for key, rows in alike.items()]

    def _of(self, shape: StepShape, read_range: ReadRange, rows: Any, count: int, num_keys: int) -> _EqualLengths:
        device = self._kv_cache.device
        token_indices = torch.from_numpy(shape.starts[rows][:, None] + np.arange(count)).to(device)
        hidden = read_range.hidden(np.arange(num_keys - count, num_keys), num_keys)
        tables = self._kv_cache.tables(read_range.tables(rows), read_range.lengths[rows])
        return _EqualLengths(token_indices, tables, torch.from_numpy(~hidden)[None].to(device))

    def select(self, indexer: Callable[..., torch.Tensor], given: dict[str, Any], cache_name: str) -> torch.Tensor:
        """Select tokens (`TokenSelector`). O(tokens in the step * tokens of their sequences)."""
        num_tokens = self._slots.num_tokens
        recorder = _KeyRecorder()
        mask = torch.ones((1, num_tokens, 1), dtype=torch.bool, device=self._kv_cache.device)
        indexer(**{**given, _MASK: mask, cache_name: recorder})
        if recorder.keys is None:
            raise ModelError("an indexer did not use its cache; the engine does not support that")
        self._kv_cache.write_index(recorder.layer, recorder.keys[0], self._slots)
        found = [self._selected(indexer, given, cache_name, recorder.layer, part) for part in self._batches]
        selected = torch.full(
            (1, num_tokens, max(part.shape[-1] for part in found)), -1, dtype=torch.int32, device=mask.device
        )
        for part, indices in zip(self._batches, found, strict=True):
            selected[0, part.token_indices, : indices.shape[-1]] = indices
        return selected

    def _selected(
        self,
        indexer: Callable[..., torch.Tensor],
        given: dict[str, Any],
        cache_name: str,
        layer: int,
        part: _EqualLengths,
    ) -> torch.Tensor:
        keys = self._kv_cache.gather_index(layer, part.tables)[:, : part.visible.shape[-1]]
        asked = {
            name: select_tokens(value, part.token_indices, self._slots.num_tokens) for name, value in given.items()
        }
        visible = part.visible.expand(len(part.token_indices), -1, -1)
        return indexer(**{**asked, _MASK: visible, cache_name: _StoredKeys(keys)})


def unselected_keys(indices: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return which of `num_keys` keys are not in `indices` (..., most; -1 for none): bool (..., num_keys)."""
    shown = torch.where(indices < 0, num_keys, indices).long()
    hidden = torch.ones((*indices.shape[:-1], num_keys + 1), dtype=torch.bool, device=indices.device)
    return hidden.scatter_(-1, shown, False)[..., :num_keys]
