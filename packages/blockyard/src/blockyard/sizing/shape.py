"""Sizes of a model that determine the memory of a step: widths, vocabulary, experts."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import require_int
from ..errors import InvalidArgument
from .config_fields import ConfigFields
from .layers import MAX_DIMENSION, dtype_bytes, dtype_name

_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
_MLP_SIZE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k_experts")
#: Width of the MLP relative to hidden_size if the config does not give it (GPT-2, Falcon).
_MLP_RATIO = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths of a model, in elements.

    Attributes:
        hidden_size: width of the residual stream.
        mlp_size: width of a dense MLP.
        vocab_size: width of the logits.
        num_experts: experts per layer; 0 for a dense model.
        experts_per_token: experts that a token uses; 0 for a dense model.
        expert_size: width of an expert; 0 for a dense model.
        has_packed_experts: whether experts have MXFP4 weights, whose kernels need no workspace in the model's type.
        dtype: type of activations.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    hidden_size: int
    mlp_size: int
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    has_packed_experts: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, low in (("hidden_size", 1), ("mlp_size", 1), ("vocab_size", 1), ("num_experts", 0)):
            require_int(name, getattr(self, name), low, MAX_DIMENSION)
        require_int("experts_per_token", self.experts_per_token, 0, self.num_experts)
        require_int("expert_size", self.expert_size, 0, MAX_DIMENSION)
        dtype_name("dtype", self.dtype)

    @classmethod
    def from_config(cls, config: object, *, dtype: object = None) -> ModelShape:
        """Return the widths from a Hugging Face config, as for `KVCacheSpec.from_config`. O(1).

        Args:
            config: the config.
            dtype: type of activations; the config's own if None, else bfloat16.

        Raises:
            InvalidArgument: a field is missing or out of range.
        """
        fields = ConfigFields(config)
        hidden = fields.count(*_HIDDEN_SIZE)
        mlp = fields.count(*_MLP_SIZE, default=_MLP_RATIO * hidden)
        experts = fields.count(*_NUM_EXPERTS, low=0, default=0)
        own = fields.top("dtype", "torch_dtype") or "bfloat16"
        return cls(
            hidden_size=hidden,
            mlp_size=mlp,
            vocab_size=_vocab_size(fields),
            num_experts=experts,
            experts_per_token=fields.count(*_EXPERTS_PER_TOKEN, default=1) if experts else 0,
            expert_size=fields.count("moe_intermediate_size", default=mlp) if experts else 0,
            has_packed_experts=experts > 0 and fields.model_type == "gpt_oss",
            dtype=_wide(dtype_name("dtype", own if dtype is None else dtype)),
        )

    @property
    def element_bytes(self) -> int:
        """Return the bytes per element of an activation."""
        return dtype_bytes("dtype", self.dtype)


def _vocab_size(fields: ConfigFields) -> int:
    value = fields.outer("vocab_size", "padded_vocab_size")
    if value is None:
        raise InvalidArgument("vocab_size is missing; the config must have it, as the width of the logits")
    return require_int("vocab_size", value, 1, MAX_DIMENSION)


def _wide(name: str) -> str:
    """Return the type of activations: 16 bits if the weights have 8."""
    return name if dtype_bytes("dtype", name) > 1 else "bfloat16"
