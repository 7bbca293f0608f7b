"""A model whose attention is ours while a step runs, and its owner's again afterwards."""

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

from .attention.indexed import IndexerForward, IndexShape, selecting
from .attention.interface import Attend, InOrder
from .attention.latent import LATENT, attend_latent, compress, expand, is_compressed, latent_layers
from .checks.masks import PROBE_NAME
from .states.learning import StateShape
from .states.mixing import MixerForward, StateStep, mixing

ATTENTION_NAME = "blockyard"
#: Of models with an index, whose attention cuts its mask: it gets one that says nothing.
INDEXED_NAME = "blockyard_indexed"

_current: ContextVar[Attend | None] = ContextVar("blockyard_attend", default=None)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Have every layer that this thread runs meanwhile hand its queries, keys and values to `attend`.

    Not an argument of the model's call: some models do not hand arguments on to their layers.
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
    """The function that transformers calls in every layer: query (1, heads, T, head_size), key and value likewise.

    All T tokens of a step are one row; which sequence each belongs to is known to what `attending` was given.
    """
    attend = _current.get()
    if attend is None:
        raise ModelError("the model was called outside an engine's step while its attention was set to 'blockyard'")
    others["attention_mask"] = attention_mask
    others[LATENT] = is_compressed(module)
    own = attend_latent if others[LATENT] else _attend
    tokens_first = key[0].transpose(0, 1), value[0].transpose(0, 1)
    return own(module, attend, query[0], *tokens_first, scaling, others)[None], None


def _attend(
    module: Any,
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    others: dict[str, Any],
) -> torch.Tensor:
    return attend(module.layer_idx, query, key, value, scaling, others)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionInterface.register(PROBE_NAME, paged_attention)
AttentionInterface.register(INDEXED_NAME, paged_attention)
AttentionMaskInterface.register(INDEXED_NAME, lambda **_: torch.ones((1, 1, 1, 1), dtype=torch.bool))


class BorrowedModel:
    """A causal language model, switched to `paged_attention` between `with` and its end; it nests.

    Under a name of its own, transformers builds no attention mask for it. Afterwards the model computes as before,
    so that `model.generate()` works between the steps of an engine. Raises `InvalidArgument` for what is no model of
    transformers, `ModelError` for one without weights or without position_ids.

    `states` is None, or what the model keeps beside keys and values: then its modules take their states from the step.
    `index` is None, or the index by which its attention selects tokens: then its indexers ask the step.
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
            raise ModelError("the model is on device 'meta', which holds no numbers; load its weights first")
        arguments = inspect.signature(model.forward).parameters
        if "position_ids" not in arguments:
            raise ModelError(
                f"{type(model).__name__} takes no position_ids, so that tokens of several sequences cannot be computed "
                f"in one row"
            )
        self._selects_logits = "logits_to_keep" in arguments
        self.states: StateShape | None = None
        self.index: IndexShape | None = None
        #: Modules that run as the engine's, and a forward of their own, if they had one.
        self._mixers: list[tuple[Any, Any]] = []
        self._latent_layers = latent_layers(model)
        self._attention_name = ATTENTION_NAME
        self._depth = 0
        self._own_attention = ""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kept: torch.Tensor,
        attend: Attend,
        states: StateStep | None = None,
    ) -> torch.Tensor:
        """Return logits (len(kept), vocabulary) behind the tokens at `kept`, for tokens and positions of shape (1, T).

        states: those of the step, of a model that keeps some.
        """
        kept = kept.to(self.device)
        selection = {"logits_to_keep": kept} if self._selects_logits else {}
        numbered = attend if self.states is None else InOrder(attend)
        with torch.inference_mode(), attending(numbered), mixing(states):
            output = self._selecting(attend, input_ids=token_ids, position_ids=positions, use_cache=False, **selection)
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_logits else logits[kept]

    def _selecting(self, attend: Any, **inputs: Any) -> Any:
        """Call the model, whose indexers ask the step if it has some."""
        token = selecting.set(None if self.index is None else attend)
        try:
            return self.model(**inputs)
        finally:
            selecting.reset(token)

    @contextmanager
    def probing(self) -> Iterator[BorrowedModel]:
        """Borrow it with masks that describe themselves (`checks.masks`)."""
        self._attention_name = PROBE_NAME
        try:
            with self:
                yield self
        finally:
            self._attention_name = ATTENTION_NAME

    def __enter__(self) -> BorrowedModel:
        if self._depth == 0:
            self._own_attention = self.model.config._attn_implementation
            is_step = self.index is not None and self._attention_name == ATTENTION_NAME
            self.model.set_attn_implementation(INDEXED_NAME if is_step else self._attention_name)
            compress(self._latent_layers)
            self._take_mixers()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            expand(self._latent_layers)
            self._give_back_mixers()
            self.model.set_attn_implementation(self._own_attention)

    def _take_mixers(self) -> None:
        """Have each mixer and indexer run as the engine's, unless it does so for another engine already."""
        for mixer in () if self.states is None else self.states.mixers:
            self._take(mixer.name, partial(MixerForward, mixer))
        for name, parameters, cache_name in () if self.index is None else self.index.indexers:
            self._take(name, partial(IndexerForward, parameters, cache_name))

    def _take(self, name: str, standing_for: Any) -> None:
        module = self.model.get_submodule(name)
        if not isinstance(module.forward, (MixerForward, IndexerForward)):
            self._mixers.append((module, module.__dict__.get("forward")))
            module.forward = standing_for(module.forward)

    def _give_back_mixers(self) -> None:
        for module, forward in self._mixers:
            del module.forward
            if forward is not None:
                module.forward = forward
        self._mixers.clear()
