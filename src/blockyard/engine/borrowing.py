"""A model whose attention is ours while a step runs, and its owner's again afterwards."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from ..errors import InvalidArgument, ModelError
from .attention.hook import ATTENTION_NAME, paged_attention
from .attention.interface import Attend

AttentionInterface.register(ATTENTION_NAME, paged_attention)


class BorrowedModel:
    """A causal language model, switched to `paged_attention` between `with` and its end; it nests.

    Under a name of its own, transformers builds no attention mask for it. Afterwards the model computes as before,
    so that `model.generate()` works between the steps of an engine.
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
        self._depth = 0
        self._own_attention = ""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Logits (len(kept), vocabulary) behind the tokens at `kept`, for tokens and positions of shape (1, T)."""
        with torch.inference_mode():
            output = self.model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=kept.to(self.device),
                blockyard_attend=attend,
            )
        return output.logits[0]

    def __enter__(self) -> BorrowedModel:
        if self._depth == 0:
            self._own_attention = self.model.config._attn_implementation
            self.model.set_attn_implementation(ATTENTION_NAME)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.model.set_attn_implementation(self._own_attention)
