"""A small copy of a model: its class and the form of its config, with few and narrow layers and random weights.

What decides how tokens attend to each other stays: kinds of layers and their order, shared heads, windows (shorter
ones, so that a short prompt outgrows them). What only makes a model large is cut down.
"""

from __future__ import annotations

import math
from typing import Any

import torch

#: The windows of a small copy and the steps by which it scales attention, in tokens.
SMALL_WINDOW = 13
_MAX_POSITIONS = 512
_VOCABULARY = 128
_MAX_LAYERS = 8
#: Fields of a config that only set a size, under each value that a small copy has there at most.
_SIZES = {
    64: "hidden_size d_model n_embd word_embed_proj_dim embedding_size attention_hidden_size d_inner",
    96: "intermediate_size ffn_dim n_inner ffn_hidden_size expert_ffn_hidden_size decoder_ffn_dim "
    "intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size moe_intermediate_size "
    "shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size moe_latent_size",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads swa_num_attention_heads "
    "num_local_experts num_experts n_routed_experts zero_expert_num linear_num_key_heads "
    "linear_num_value_heads index_n_heads",
    16: "head_dim global_head_dim swa_head_dim attention_head_dim kv_channels qk_nope_head_dim index_head_dim "
    "mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input laurel_rank "
    "router_hidden_size adapter_rank query_pre_attn_scalar indexer_head_dim",
    12: "v_head_dim",
    8: "qk_rope_head_dim rotary_dim mamba_d_state ssm_state_size state_size mamba_dt_rank time_step_rank "
    "mamba_n_heads n_mamba_heads mamba_num_heads",
    24: "q_lora_rank kv_lora_rank o_lora_rank",
    2: "num_experts_per_tok num_experts_per_token top_k_experts num_kv_shared_layers moe_topk",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers "
    "mamba_n_groups n_groups mamba_ngroups",
    _VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size mamba_d_ssm",
    SMALL_WINDOW: "sliding_window sliding_window_size window_size floor_scale",
    _MAX_POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len",
}
_AT_MOST = {name: size for size, names in _SIZES.items() for name in names.split()}
#: Fields that follow from others.
_DERIVED = {"qk_head_dim", "quantization_config"}
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "swa_num_key_value_heads")


def small_model(model_class: Any, config: Any) -> Any:
    """A model of this class and config with sharp random weights, in float32 on the CPU. Raises what its class does."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = model_class(config).float().eval()
    sharpen(model)
    return model


def small_config(config: Any) -> Any:
    """The config of a small copy; raises what its class raises where the small sizes do not fit together. O(fields)."""
    return type(config).from_dict(_shrunk(config.to_dict()))


def sharpen(model: Any, seed: int = 0) -> None:
    """Give a model random weights under which every part of it matters, which is not so with freshly made ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim >= 2:
                weights.normal_(0, 1.5 / math.sqrt(weights.shape[-1]), generator=generator)
            elif "norm" not in name:
                weights.add_(torch.randn(weights.shape, generator=generator) * 0.3)


def _shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """Each of the fields, of nested configs too, cut down to what a small copy has."""
    num_layers = next((fields[name] for name in _NUM_LAYERS if isinstance(fields.get(name), int)), 0)
    kept = _kept_layers(fields, num_layers)
    heads = _heads(fields)
    made = {name: _cut(name, value, num_layers, kept) for name, value in fields.items()}
    made.update({name: kept for name in _NUM_LAYERS if isinstance(fields.get(name), int)})
    made.update({name: heads for name in _NUM_KV_HEADS if isinstance(fields.get(name), int)})
    if "qk_rope_head_dim" in fields and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        made["head_dim"] = made["qk_rope_head_dim"]
    return {name: value for name, value in made.items() if name not in _DERIVED}


def _cut(name: str, value: Any, num_layers: int, kept: int) -> Any:
    if isinstance(value, dict):
        return _shrunk_entries(name, value, kept)
    if isinstance(value, (list, tuple)) and num_layers and len(value) == num_layers:
        value = value[:kept]
        return [_cut(name, entry, 0, 0) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool):
        most = _VOCABULARY - 1 if name.endswith("token_id") else _AT_MOST.get(name, value)
        return min(value, most)
    return value


def _shrunk_entries(name: str, entries: dict[str, Any], kept: int) -> dict[str, Any]:
    """A nested config, or a dict of the layers that differ from the others."""
    if name == "per_layer_config":
        return {layer: _shrunk(fields) for layer, fields in entries.items() if int(layer) < kept}
    return _shrunk(entries) if name.endswith("_config") else entries


def _kept_layers(fields: dict[str, Any], num_layers: int) -> int:
    """The fewest first layers that have one of every kind, at least two."""
    rows = [value for value in fields.values() if isinstance(value, (list, tuple)) and len(value) == num_layers]
    kinds = [str(kind) for kind in zip(*rows, strict=True)]
    needed = max((kinds.index(kind) + 1 for kind in set(kinds)), default=2)
    for name, value in fields.items():
        if isinstance(value, int) and ("pattern" in name or "interval" in name or "period" in name):
            needed = max(needed, value)
    return min(max(needed, 2), num_layers, _MAX_LAYERS)


def _heads(fields: dict[str, Any]) -> int:
    """Heads of keys and values: one, all or half of four, as the model has one, all or some."""
    num_heads = next((fields[name] for name in _NUM_HEADS if isinstance(fields.get(name), int)), 0)
    own = next((fields[name] for name in _NUM_KV_HEADS if isinstance(fields.get(name), int)), num_heads)
    return 1 if own == 1 else min(num_heads, 4) if own == num_heads else 2
