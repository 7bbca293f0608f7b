"""A model runs a few tokens with transformers' own cache, and shows which of its modules keep states of what size."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from blockyard.arguments import reason
from blockyard.errors import ModelError
from blockyard.storage import StateTensor, state_bytes

#: Tokens that are run: several, because one may stand for padding, whose embedding is zero.
_TOKENS = (1, 2, 3)
CONV, RECURRENT = "conv_states", "recurrent_states"


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A layer keeps this tensor as `layers[layer].<kind>[index]` of transformers' cache. tensor: of one sequence."""

    layer: int
    kind: str
    index: int
    tensor: StateTensor


@dataclass(frozen=True, slots=True)
class Mixer:
    """One module of a model reads and writes states.

    name: in its model. parameters: its forward's, in order, hidden states first. cache_name: which of them is the
    cache. goes_on: whether it takes several tokens behind a state; Jamba's forgets the state then, and takes one.
    """

    name: str
    parameters: tuple[str, ...]
    cache_name: str
    goes_on: bool


@dataclass(frozen=True, slots=True)
class StateShape:
    """A sequence's state is these tensors, in the order of layers; the mixers keep it."""

    kept: tuple[KeptTensor, ...]
    mixers: tuple[Mixer, ...]

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Return their shapes and dtypes."""
        return tuple(kept.tensor for kept in self.kept)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a state."""
        return state_bytes(self.tensors)


def learn_states(model: Any, device: torch.device) -> StateShape | None:
    """Return what states a model keeps, None for a model that keeps none. It runs a few tokens.

    Raises `ModelError` if it cannot, or keeps a state in a way that the engine cannot follow.
    """
    config = model.config.get_text_config(decoder=True)
    watch = _Watch(model, DynamicCache(config=config))
    tokens = torch.tensor([_TOKENS], device=device) % int(config.vocab_size)
    try:
        with torch.inference_mode():
            with watch.watching():
                model(input_ids=tokens, past_key_values=watch.cache, use_cache=True)
            kept = tuple(_kept(watch.cache))
            mixers = tuple(watch.mixers())
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise ModelError(
            f"{type(model).__name__} could not run tokens with states: {type(error).__name__}: {reason(error)}"
        ) from error
    return StateShape(kept, mixers) if kept else None


def _kept(cache: DynamicCache) -> Iterator[KeptTensor]:
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind in (CONV, RECURRENT):
                for index, state in getattr(layer, kind).items():
                    if state is not None:
                        yield KeptTensor(number, kind, index, StateTensor(tuple(state.shape[1:]), state.dtype))


@dataclass(frozen=True, slots=True)
class _Call:
    """A module was called. given: its arguments by name."""

    name: str
    module: Any
    parameters: tuple[str, ...]
    given: dict[str, Any]


class _Watch:
    """Notes the innermost module that runs whenever `cache` takes a state."""

    def __init__(self, model: Any, cache: DynamicCache) -> None:
        self.cache = cache
        self._model = model
        self._running: list[_Call] = []
        self._calls: dict[str, _Call] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the model runs."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                hooks.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for call in ("update_conv_state", "update_recurrent_state"):
                setattr(self.cache, call, self._noting(getattr(self.cache, call)))
                hooks.callback(delattr, self.cache, call)
            yield

    def _enter(self, name: str) -> Any:
        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = tuple(inspect.signature(module.forward).parameters)
            self._running.append(_Call(name, module, names, {**dict(zip(names, args, strict=False)), **kwargs}))

        return enter

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _noting(self, update: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._calls[self._running[-1].name] = self._running[-1]
            return update(*args, **kwargs)

        return noted

    def mixers(self) -> Iterator[Mixer]:
        """Return the modules that were seen. Those of a class are alike."""
        goes_on: dict[type, bool] = {}
        for call in self._calls.values():
            names = [name for name, value in call.given.items() if value is self.cache]
            if len(names) != 1 or call.given.get(call.parameters[0]) is None:
                raise ModelError(
                    f"{call.name} keeps a state and is not called with one cache behind its hidden states, which the "
                    f"engine cannot follow"
                )
            kind = type(call.module)
            if kind not in goes_on:
                goes_on[kind] = all(self._heeds(call, names[0], states) for states in (CONV, RECURRENT))
            yield Mixer(call.name, call.parameters, names[0], goes_on[kind])

    def _heeds(self, call: _Call, cache_name: str, kind: str) -> bool:
        """Return whether several tokens behind a state come out otherwise when its tensors of a kind are others."""
        before = copy.deepcopy(self.cache)
        changed = copy.deepcopy(self.cache)
        states = [
            state
            for layer in changed.layers
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            for state in getattr(layer, kind).values()
            if state is not None
        ]
        for state in states:
            state.add_(1)
        outputs = [call.module(**{**call.given, cache_name: cache}) for cache in (before, changed)]
        return not states or not _equal(*outputs)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(_equal(*parts) for parts in zip(one, other, strict=True))
    is_equal: bool = torch.equal(one, other)
    return is_equal
