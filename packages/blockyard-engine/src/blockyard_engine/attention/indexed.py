"""In sparse attention with an index (DeepSeek V3.2) a token sees only those that an indexer of its layer selects.

An indexer keeps a key of its own a token, in transformers' cache through one call (`update_indexer`), scores them, and
returns the places of the best in the sequence; attention is handed these as `indices`. Index keys lie in the blocks of
the keys and values. The module itself is called, unchanged: once for the keys of all tokens of a step, which are
written before any is read, then for sequences that have equally many tokens in the step and in all, so that it selects
as it does alone. No architecture is known by name.
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

from .interface import Reach, StepShape, of_tokens

#: Under which attention is handed what an indexer selected.
INDICES = "indices"
_MASK = "attention_mask"
_NUM_TOKENS = 3


@dataclass(frozen=True, slots=True)
class IndexShape:
    """A token's index key has `size` elements. indexers: by module name, the parameters of its forward and which of
    them is the cache."""

    size: int
    indexers: tuple[tuple[str, tuple[str, ...], str], ...]


def learn_index(model: Any, device: torch.device) -> IndexShape:
    """Return what index a model keeps, seen while it runs a few tokens with transformers' own cache.

    Raises `ModelError` if it cannot, or keeps one in a way that the engine cannot follow.
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
    return _followed(seen, cache)


def _followed(seen: dict[str, tuple[tuple[str, ...], dict[str, Any], int]], cache: Any) -> IndexShape:
    indexers = []
    for name, (parameters, given, size) in seen.items():
        caches = [parameter for parameter, value in given.items() if value is cache]
        if len(caches) != 1 or not size or not isinstance(given.get(_MASK), torch.Tensor):
            raise ModelError(
                f"{name} keeps index keys and is not called with one cache, a key a token and a mask, which the engine "
                f"cannot follow"
            )
        indexers.append((name, parameters, caches[0]))
    sizes = {size for _, _, size in seen.values()}
    if len(sizes) != 1:
        raise ModelError(f"the model's index keys have {sorted(sizes)} elements; the engine needs one size, above 0")
    return IndexShape(sizes.pop(), tuple(indexers))


class Selects(Protocol):
    """It says which tokens of its sequence each token of a step attends to."""

    def select(self, indexer: Callable[..., torch.Tensor], given: dict[str, Any], cache_name: str) -> torch.Tensor:
        """Call a module for the tokens of a step; returns int32 (1, T, most), -1 behind those selected."""


#: What selects in the step that this thread runs.
selecting: ContextVar[Selects | None] = ContextVar("blockyard_select", default=None)


class IndexerForward:
    """It stands for the forward of an indexer while its model is borrowed."""

    def __init__(self, parameters: tuple[str, ...], cache_name: str, own: Any) -> None:
        self._parameters = parameters
        self._cache_name = cache_name
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run it on the tokens of a step, (1, T, ...) each."""
        step = selecting.get()
        if step is None:
            raise ModelError("the model was called outside an engine's step while its index was the engine's")
        return step.select(self._own, {**dict(zip(self._parameters, args, strict=False)), **kwargs}, self._cache_name)


class _Taking:
    """It takes the keys of all tokens, and returns one, so that nothing is scored."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.layer = 0

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """It stands for the cache's."""
        self.keys, self.layer = keys, layer
        return keys[:, :1]


@dataclass(frozen=True, slots=True)
class _Giving:
    """It returns the keys that sequences have."""

    keys: torch.Tensor

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:  # noqa: ARG002
        """It stands for the cache's."""
        return self.keys


@dataclass(frozen=True, slots=True)
class _Alike:
    """These sequences have equally many tokens in the step and in all. places: of the tokens among those of the step,
    int64 (n, count). visible: which keys they may see, bool (1, count, keys)."""

    places: torch.Tensor
    tables: TableAddresses
    visible: torch.Tensor


class IndexStep:
    """It knows which tokens those of a step see, in the one layer group that a model with an index has."""

    def __init__(self, kv_cache: KVCache, shape: StepShape, reach: Reach, slots: Any) -> None:
        self._kv_cache = kv_cache
        self._slots = slots
        alike: dict[tuple[int, int], list[int]] = {}
        for row in np.flatnonzero(shape.num_scheduled).tolist():
            alike.setdefault((int(shape.num_scheduled[row]), int(reach.lengths[row])), []).append(row)
        self._alike = [self._of(shape, reach, np.array(rows), *key) for key, rows in alike.items()]

    def _of(self, shape: StepShape, reach: Reach, rows: Any, count: int, num_keys: int) -> _Alike:
        device = self._kv_cache.device
        places = torch.from_numpy(shape.starts[rows][:, None] + np.arange(count)).to(device)
        hidden = reach.hidden(np.arange(num_keys - count, num_keys), num_keys)
        tables = self._kv_cache.tables(reach.tables(rows), reach.lengths[rows])
        return _Alike(places, tables, torch.from_numpy(~hidden)[None].to(device))

    def select(self, indexer: Callable[..., torch.Tensor], given: dict[str, Any], cache_name: str) -> torch.Tensor:
        """See `Selects`. O(tokens in the step * tokens of their sequences)."""
        num_tokens = self._slots.num_tokens
        taking = _Taking()
        mask = torch.ones((1, num_tokens, 1), dtype=torch.bool, device=self._kv_cache.device)
        indexer(**{**given, _MASK: mask, cache_name: taking})
        if taking.keys is None:
            raise ModelError("an indexer did not ask for its cache, which the engine cannot follow")
        self._kv_cache.write_index(taking.layer, taking.keys[0], self._slots)
        found = [self._selected(indexer, given, cache_name, taking.layer, part) for part in self._alike]
        selected = torch.full(
            (1, num_tokens, max(part.shape[-1] for part in found)), -1, dtype=torch.int32, device=mask.device
        )
        for part, indices in zip(self._alike, found, strict=True):
            selected[0, part.places, : indices.shape[-1]] = indices
        return selected

    def _selected(
        self, indexer: Callable[..., torch.Tensor], given: dict[str, Any], cache_name: str, layer: int, part: _Alike
    ) -> torch.Tensor:
        keys = self._kv_cache.gather_index(layer, part.tables)[:, : part.visible.shape[-1]]
        asked = {name: of_tokens(value, part.places, self._slots.num_tokens) for name, value in given.items()}
        visible = part.visible.expand(len(part.places), -1, -1)
        return indexer(**{**asked, _MASK: visible, cache_name: _Giving(keys)})


def unselected(indices: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return which of `num_keys` keys are none of `indices` (..., most), -1 for none: bool (..., num_keys). O(keys)."""
    places = torch.where(indices < 0, num_keys, indices).long()
    hidden = torch.ones((*indices.shape[:-1], num_keys + 1), dtype=torch.bool, device=indices.device)
    return hidden.scatter_(-1, places, False)[..., :num_keys]
