"""How many parameters a model has, counted from its config alone, for the architectures whose parts are known here.

An embedding and a head, in each layer attention, an MLP or experts, and norms. Each architecture is a row of what it
does differently; one that has no row is refused by its name, since a guess would be wrong by a part that was not
thought of. The tests build every row with transformers, without memory for it, and compare.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import shown
from ..errors import InvalidArgument
from .fields import ConfigFields
from .from_config import read_layers
from .layers import AttentionLayer
from .shape import ModelShape


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What an architecture has besides the common parts.

    is_tied: whether the head is the embedding where the config does not say. num_norms: of `hidden_size`, a layer.
    has_qkv_bias: of queries, keys and values, always. has_qk_norm: a norm of a head of queries, and one of keys.
    """

    is_tied: bool = False
    num_norms: int = 2
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


_ARCHITECTURES = {
    "llama": _Architecture(),
    "mistral": _Architecture(),
    "granite": _Architecture(),
    "phi3": _Architecture(),
    "qwen2": _Architecture(has_qkv_bias=True),
    "qwen3": _Architecture(has_qk_norm=True),
    "gemma": _Architecture(is_tied=True),
    "gemma2": _Architecture(is_tied=True, num_norms=4),
    "gemma3_text": _Architecture(is_tied=True, num_norms=4, has_qk_norm=True),
    "mixtral": _Architecture(),
    "qwen2_moe": _Architecture(has_qkv_bias=True),
    "qwen3_moe": _Architecture(has_qk_norm=True),
    "deepseek_v2": _Architecture(),
    "deepseek_v3": _Architecture(),
    "gpt_oss": _Architecture(),
}


def count_parameters(config: object) -> int:
    """Parameters of the text model that a Hugging Face config describes, as `KVCacheSpec.from_config` takes it.

    A head that is the embedding is counted once; encoders of images and layers that predict further tokens are not.
    O(layers). Raises `InvalidArgument` naming the architecture that has no row here, or the field that is missing.
    """
    fields = ConfigFields(config)
    kind = _ARCHITECTURES.get(fields.model_type)
    if kind is None:
        raise InvalidArgument(
            f"model_type is {shown(fields.model_type)}; its parameters cannot be counted here. Known: "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    _refuse_unknown_parts(fields)
    shape = ModelShape.from_config(config)
    layers, _ = read_layers(fields)
    tied = fields.outer("tie_word_embeddings")
    is_tied = kind.is_tied if tied is None else bool(tied)
    embeddings = (1 if is_tied else 2) * shape.vocab_size * shape.hidden_size
    return embeddings + shape.hidden_size + sum(_layer(fields, kind, shape, layer) for layer in layers)


def _refuse_unknown_parts(fields: ConfigFields) -> None:
    for name in ("mlp_only_layers", "mlp_bias"):
        if fields.get(name):
            raise InvalidArgument(
                f"{name} is {shown(fields.get(name))}; parameters of such layers cannot be counted here"
            )
    if fields.count("decoder_sparse_step", default=1) != 1:
        raise InvalidArgument(f"decoder_sparse_step is {shown(fields.get('decoder_sparse_step'))}; it must be 1")


def _layer(fields: ConfigFields, kind: _Architecture, shape: ModelShape, layer: AttentionLayer) -> int:
    attention = _latent_attention(fields, shape) if layer.is_latent else _attention(fields, kind, shape, layer)
    return attention + _mlp(fields, shape, layer.index) + kind.num_norms * shape.hidden_size


def _attention(fields: ConfigFields, kind: _Architecture, shape: ModelShape, layer: AttentionLayer) -> int:
    queries = fields.count("num_attention_heads", default=8) * layer.key_size  # Gemma 3 leaves its eight heads out
    keys_and_values = layer.num_kv_heads * (layer.key_size + layer.value_size)
    total = shape.hidden_size * (2 * queries + keys_and_values)
    if kind.has_qkv_bias or fields.flag("attention_bias") or fields.model_type == "gpt_oss":
        total += queries + keys_and_values
        total += 0 if kind.has_qkv_bias else shape.hidden_size
    if fields.model_type == "gpt_oss":
        total += fields.count("num_attention_heads")  # a sink for each head
    return total + (2 * layer.key_size if kind.has_qk_norm else 0)


def _latent_attention(fields: ConfigFields, shape: ModelShape) -> int:
    """DeepSeek's: queries and keys and values go through narrow vectors, each with a norm of its own."""
    heads, rotary, latent = (fields.count(f) for f in ("num_attention_heads", "qk_rope_head_dim", "kv_lora_rank"))
    key, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    narrow = fields.count("q_lora_rank", low=0, default=0)
    wide = heads * (key + rotary)
    queries = shape.hidden_size * narrow + narrow + narrow * wide if narrow else shape.hidden_size * wide
    keys_and_values = shape.hidden_size * (latent + rotary) + latent + latent * heads * (key + value)
    return queries + keys_and_values + heads * value * shape.hidden_size


def _mlp(fields: ConfigFields, shape: ModelShape, index: int) -> int:
    """Three matrices; of a mixture, three for each expert, a router, and what all tokens share."""
    hidden = shape.hidden_size
    if not shape.num_experts or index < fields.count("first_k_dense_replace", low=0, default=0):
        return 3 * hidden * shape.mlp_size
    experts = shape.num_experts * 3 * hidden * shape.expert_size
    router = hidden * shape.num_experts
    if fields.model_type == "gpt_oss":
        return experts + router + shape.num_experts * (1 + 2 * shape.expert_size + hidden)
    if fields.model_type == "deepseek_v3":
        router += shape.num_experts  # what corrects the balance of its experts
    return experts + router + _shared(fields, shape)


def _shared(fields: ConfigFields, shape: ModelShape) -> int:
    size = fields.count("shared_expert_intermediate_size", low=0, default=0)  # Qwen2: with a gate
    if size:
        return 3 * shape.hidden_size * size + shape.hidden_size
    return fields.count("n_shared_experts", low=0, default=0) * 3 * shape.hidden_size * shape.expert_size
