"""Finds a model's states by running a few tokens with transformers' own cache."""

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

#: Tokens to run: several, because one may be the padding token, whose embedding is zero.
_TOKENS = (1, 2, 3)
CONV, RECURRENT = "conv_states", "recurrent_states"


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One tensor of a sequence's state: `layers[layer].<kind>[index]` in transformers' cache."""

    layer: int
    kind: str
    index: int
    tensor: StateTensor


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module that reads and writes states.

    Attributes:
        name: name of the module in its model.
        parameters: parameters of its forward, hidden states first.
        cache_name: the parameter that takes the cache.
        takes_chunks: whether it can continue a state with several tokens; Jamba's drops the state then, so it gets one
            token at a time.
    """

    name: str
    parameters: tuple[str, ...]
    cache_name: str
    takes_chunks: bool


@dataclass(frozen=True, slots=True)
class StateShape:
    """The tensors of a sequence's state, in layer order, and the modules that use them."""

    cached_tensors: tuple[CachedTensor, ...]
    mixers: tuple[Mixer, ...]

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Shapes and dtypes of the tensors."""
        return tuple(kept.tensor for kept in self.cached_tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of a state."""
        return state_bytes(self.tensors)


def learn_states(model: Any, device: torch.device) -> StateShape | None:
    """Return the states of a model, None if it has none. Runs a few tokens.

    Raises `ModelError` if that fails, or if a module uses its state in an unsupported way.
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


def _kept(cache: DynamicCache) -> Iterator[CachedTensor]:
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind in (CONV, RECURRENT):
                for index, state in getattr(layer, kind).items():
                    if state is not None:
                        yield CachedTensor(number, kind, index, StateTensor(tuple(state.shape[1:]), state.dtype))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module, with its arguments by name."""

    name: str
    module: Any
    parameters: tuple[str, ...]
    given: dict[str, Any]


class _Watch:
    """Records the innermost running module whenever `cache` is updated with a state."""

    def __init__(self, model: Any, cache: DynamicCache) -> None:
        self.cache = cache
        self._model = model
        self._running: list[_Call] = []
        self._calls: dict[str, _Call] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record calls of the model in a `with` block."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                hooks.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                hooks.callback(
                    module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True).remove
                )
            for call in ("update_conv_state", "update_recurrent_state"):
                setattr(self.cache, call, self._noting(getattr(self.cache, call)))
                hooks.callback(delattr, self.cache, call)
            yield

    def _enter(self, name: str) -> Any:
        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = tuple(inspect.signature(module.forward).parameters)
            self._running.append(_Call(name, module, names, {**dict(zip(names, args, strict=False)), **kwargs}))

        return enter

    def _noting(self, update: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._calls[self._running[-1].name] = self._running[-1]
            return update(*args, **kwargs)

        return noted

    def mixers(self) -> Iterator[Mixer]:
        """Yield the recorded modules. Whether a module takes chunks is tried once per class."""
        takes_chunks: dict[type, bool] = {}
        for call in self._calls.values():
            names = [name for name, value in call.given.items() if value is self.cache]
            if len(names) != 1 or call.given.get(call.parameters[0]) is None:
                raise ModelError(
                    f"{call.name} keeps a state, but is not called with hidden states and one cache; the engine does "
                    f"not support that"
                )
            kind = type(call.module)
            if kind not in takes_chunks:
                takes_chunks[kind] = all(self._uses_state(call, names[0], states) for states in (CONV, RECURRENT))
            yield Mixer(call.name, call.parameters, names[0], takes_chunks[kind])

    def _uses_state(self, call: _Call, cache_name: str, kind: str) -> bool:
        """Return whether the output for several tokens depends on the states of this kind."""
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
