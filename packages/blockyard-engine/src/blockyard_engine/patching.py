"""Switches a transformers model to the engine's attention during a step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from blockyard.errors import InvalidArgument, ModelError

from .attention.indexed import IndexerForward, IndexShape, current_selector
from .attention.interface import Attend, InOrder
from .attention.latent import LATENT, attend_latent, compress, expand, is_compressed, latent_layers
from .checks.masks import PROBE_NAME
from .states.learning import StateShape
from .states.mixing import MixerForward, StateStep, mixing

ATTENTION_NAME = "blockyard"
#: Attention name for models with an index: their attention slices its mask, so it gets a dummy.
INDEXED_NAME = "blockyard_indexed"

_current: ContextVar[Attend | None] = ContextVar("blockyard_attend", default=None)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Route attention of every layer that this thread runs to `attend`, in a `with` block.

    It is a context variable because some models do not pass arguments on to their layers.
    """
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function that transformers calls in every layer: query (1, heads, T, head_size), key and value alike.

    All T tokens of a step are one row; `attending`'s function knows which sequence each belongs to.
    """
    attend = _current.get()
    if attend is None:
        raise ModelError("the model was called outside an engine's step while its attention was set to 'blockyard'")
    others["attention_mask"] = attention_mask
    others[LATENT] = is_compressed(module)
    tokens_first = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if others[LATENT]:
        return attend_latent(module, attend, query[0], *tokens_first, scaling, others)[None], None
    return attend(module.layer_idx, query[0], *tokens_first, scaling, others)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionInterface.register(PROBE_NAME, paged_attention)
AttentionInterface.register(INDEXED_NAME, paged_attention)
AttentionMaskInterface.register(INDEXED_NAME, lambda **_: torch.ones((1, 1, 1, 1), dtype=torch.bool))


class PatchedModel:
    """A causal language model that uses `paged_attention` inside a `with` block, which may be nested.

    Outside, the model computes as before, so `model.generate()` works between the steps of an engine. Transformers
    builds no attention mask under the engine's attention name.

    `states` (None or the layers' states) and `index` (None or the index keys) are set by the probe; the modules that
    use them then take them from the step.

    Raises `InvalidArgument` for an object that is not a transformers model, and `ModelError` for a model without
    weights or without position_ids.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, PreTrainedModel):
            raise InvalidArgument(
                f"model is a {type(model).__name__}; it must be a model of transformers (for a path: from_pretrained)"
            )
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = model.dtype
        if self.device.type == "meta":
            raise ModelError("the model is on device 'meta', which has no weights; load them first")
        arguments = inspect.signature(model.forward).parameters
        if "position_ids" not in arguments:
            raise ModelError(
                f"{type(model).__name__} takes no position_ids; the engine needs them to compute several sequences in "
                f"one row"
            )
        self._selects_logits = "logits_to_keep" in arguments
        self.states: StateShape | None = None
        self.index: IndexShape | None = None
        #: Patched modules, each with the forward that was set on the instance, if any.
        self._mixers: list[tuple[Any, Any]] = []
        self._latent_layers = latent_layers(model)
        self._attention_name = ATTENTION_NAME
        self._depth = 0
        self._own_attention = ""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        attend: Attend,
        states: StateStep | None = None,
    ) -> torch.Tensor:
        """Return logits (len(logits_indices), vocabulary) for token ids and positions, int64 (1, T).

        A hybrid model needs the states of the step.
        """
        logits_indices = logits_indices.to(self.device)
        selection = {"logits_to_keep": logits_indices} if self._selects_logits else {}
        numbered = attend if self.states is None else InOrder(attend)
        token = current_selector.set(None if self.index is None else attend)  # type: ignore[arg-type]
        try:
            with torch.inference_mode(), attending(numbered), mixing(states):
                output = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **selection)
        finally:
            current_selector.reset(token)
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_logits else logits[logits_indices]

    @contextmanager
    def probing(self) -> Iterator[PatchedModel]:
        """Patch the model with masks that describe themselves (`checks.masks`), in a `with` block."""
        self._attention_name = PROBE_NAME
        try:
            with self:
                yield self
        finally:
            self._attention_name = ATTENTION_NAME

    def __enter__(self) -> PatchedModel:
        if self._depth == 0:
            self._own_attention = self.model.config._attn_implementation
            is_step = self.index is not None and self._attention_name == ATTENTION_NAME
            self.model.set_attn_implementation(INDEXED_NAME if is_step else self._attention_name)
            compress(self._latent_layers)
            for mixer in () if self.states is None else self.states.mixers:
                self._replace(mixer.name, partial(MixerForward, mixer))
            for name, parameters, cache_name in () if self.index is None else self.index.indexers:
                self._replace(name, partial(IndexerForward, parameters, cache_name))
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            expand(self._latent_layers)
            for module, forward in self._mixers:
                del module.forward
                if forward is not None:
                    module.forward = forward
            self._mixers.clear()
            self.model.set_attn_implementation(self._own_attention)

    def _replace(self, name: str, make_forward: Any) -> None:
        """Replace a module's forward, unless another engine has already done so."""
        module = self.model.get_submodule(name)
        if not isinstance(module.forward, (MixerForward, IndexerForward)):
            self._mixers.append((module, module.__dict__.get("forward")))
            module.forward = make_forward(module.forward)
