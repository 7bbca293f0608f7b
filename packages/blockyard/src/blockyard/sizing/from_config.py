"""Reads the layers of a Hugging Face config: attention layers and layers with a state."""

from __future__ import annotations

from collections.abc import Mapping

from ..arguments import require_int, shown
from ..errors import InvalidArgument
from .config_fields import ConfigFields, FamilyFields
from .families import find_family, wrapped_model_type
from .family import Family
from .field_names import can_change_cache, is_off
from .layer_rules import (
    CHUNKED,
    CONVOLUTION,
    FULL,
    HYBRID,
    INDEXED,
    MAX_LAYERS,
    SLIDING,
    STATE,
    exactly,
    layer_kinds,
    num_listed_layers,
)
from .layers import AttentionLayer, StateLayer
from .state_layers import convolution

#: Fields that no family supports, and how they change the cache.
_NOT_COUNTED = {
    "is_encoder_decoder": "the decoder also keeps keys and values of the encoder",
    "cross_attention_layers": "these layers keep keys and values of another input",
    "add_cross_attention": "the layers also keep keys and values of another input",
    "use_cla": "layers share keys and values in a pattern",
    "block_configs": "layers differ in their attention",
    "num_key_value_heads_per_layer": "layers differ in their attention",
}
#: Kinds of layers with keys and values, and with a state; a hybrid layer has both.
_WITH_KEYS = {FULL, SLIDING, CHUNKED, HYBRID, INDEXED}
_WITH_STATE = {STATE, CONVOLUTION, HYBRID}
#: Keys of DBRX's and MPT's `attn_config` that are read or harmless.
_ATTN_CONFIG = frozenset(["kv_n_heads", "attn_impl", "attn_type", "attn_pdrop", "attn_uses_sequence_id", "qk_ln"])
#: Keys of MiniMax M3's `sparse_attention_config` that are harmless.
_SPARSE_HARMLESS = frozenset(
    [
        "sparse_num_index_heads",
        "sparse_block_size",
        "sparse_topk_blocks",
        "sparse_local_block",
        "sparse_init_block",
        "sparse_score_type",
        "use_sparse_attention",
        "sparse_attention_freq",
        "sparse_index_dim",
    ]
)


def read_layers(fields: ConfigFields) -> tuple[tuple[AttentionLayer, ...], tuple[StateLayer, ...]]:
    """Return the layers that keep keys and values, and those that keep a state. O(layers).

    Raises `InvalidArgument` naming the field that is missing, out of range or not understood, or `model_type` if the
    family is unknown.
    """
    for name, reason in _NOT_COUNTED.items():
        if not is_off(fields.get(name)):
            raise InvalidArgument(f"{name} is {shown(fields.get(name))}; such models are not supported: {reason}")
    family = family_of(fields)
    known = FamilyFields(fields, family)
    _require_understood(fields, family)
    num_layers = _num_layers(known)
    kinds = layer_kinds(known, num_layers, family.rule)
    num_own = num_layers - _num_shared(known, num_layers)
    attention = [
        _attention_layer(known, index, kinds[index], num_layers)
        for index in range(num_own)
        if kinds[index] in _WITH_KEYS
    ]
    states = [_state_layer(known, family, i, kind) for i, kind in enumerate(kinds) if kind in _WITH_STATE]
    return tuple(attention), tuple(states)


def family_of(fields: ConfigFields) -> Family:
    """Return the family of a config. O(1). Raises `InvalidArgument` naming `model_type` if it is unknown."""
    if fields.outer_model_type and not _is_known(fields.outer_model_type) and fields.is_nested:
        raise InvalidArgument(_unknown_type(fields.outer_model_type))
    if fields.is_nested and not fields.model_type:
        family = find_family(*fields.architectures, wrapped_model_type(fields.outer_model_type) or "")
    elif fields.model_type or fields.architectures:
        family = find_family(fields.model_type, wrapped_model_type(fields.model_type) or "", *fields.architectures)
    else:
        is_params = all(fields.get(name) is not None for name in ("dim", "n_layers", "n_heads"))
        family = find_family("params.json") if is_params else None
    if family is None:
        raise InvalidArgument(_unknown_type(fields.model_type))
    return family


def _is_known(model_type: str) -> bool:
    """Return whether only the text layers keep keys and values in models of this outer type."""
    return wrapped_model_type(model_type) is not None or find_family(model_type) is not None


def _unknown_type(model_type: str) -> str:
    given = f"model_type is {shown(model_type)}" if model_type else "model_type is missing, or empty"
    return (
        f"{given}; the layers of such a model are unknown. Give them yourself, as in "
        f"KVCacheSpec(layers=(AttentionLayer(0, num_kv_heads, key_size, value_size), ...)), or "
        f"KVCacheSpec.uniform(num_layers, num_kv_heads, head_size)"
    )


def _require_understood(fields: ConfigFields, family: Family) -> None:
    """Raise `InvalidArgument` if a field may change the cache and the family does not read it."""
    present = fields.present()
    for name, value in present.items():
        if family.reads_field(name) or name in family.harmless or is_off(value):
            continue
        if can_change_cache(name):
            raise InvalidArgument(
                f"{name} is {shown(value)}; it may change the cache, and is unknown for model_type "
                f"{family.model_types[0]!r}. If it does not, remove it from the config"
            )
    for name in family.reads:
        values = [present[spelling] for spelling in family.names_of(name) if present.get(spelling) is not None]
        if any(value != values[0] for value in values):
            spelled = " and ".join(spelling for spelling in family.names_of(name) if present.get(spelling) is not None)
            raise InvalidArgument(
                f"{spelled} are {' and '.join(map(shown, values))}; they must be equal, or one absent"
            )
    if "is_decoder" in family.reads and not FamilyFields(fields, family).flag("is_decoder"):
        raise InvalidArgument("is_decoder is not true; an encoder has no KV cache")
    both_ways = fields.get("use_bidirectional_attention")
    if "use_bidirectional_attention" in family.reads and both_ways not in (None, False, "vision"):
        # Gemma 4's "vision" only concerns attention among the tokens of an image, which are cached like others.
        raise InvalidArgument(
            f"use_bidirectional_attention is {shown(both_ways)}; a model that attends to later tokens has no KV cache"
        )


def _num_layers(fields: FamilyFields) -> int:
    listed = num_listed_layers(fields)
    if fields.fixed("is_listed", False) and listed is not None:  # Nemotron-H ignores the number if there is a list
        return require_int("num_hidden_layers", listed, 1, MAX_LAYERS)
    if "num_layers" in fields.read_names:  # each of LongCat's layers has two attentions
        attentions = 2 * fields.count("num_layers", high=MAX_LAYERS // 2)
        if fields.count("num_hidden_layers", default=attentions) != attentions:
            raise InvalidArgument(
                f"num_hidden_layers is {shown(fields.get('num_hidden_layers'))}; it must be twice num_layers, "
                f"{attentions // 2}"
            )
        return attentions
    return fields.count("num_hidden_layers", default=listed, high=MAX_LAYERS)


def _num_shared(fields: FamilyFields, num_layers: int) -> int:
    """Return the number of last layers that reuse the keys and values of earlier ones (Gemma 3n, Gemma 4)."""
    return require_int(
        "num_kv_shared_layers", fields.count("num_kv_shared_layers", low=0, default=0), 0, num_layers - 1
    )


def _state_layer(fields: FamilyFields, family: Family, index: int, kind: str) -> StateLayer:
    if kind == CONVOLUTION:
        return convolution(fields, index)
    if family.state is None:
        raise InvalidArgument(
            f"layer {index} keeps a state (linear attention or Mamba); model_type {family.model_types[0]!r} is not "
            f"known to have such layers"
        )
    return family.state(fields, index)


def _attention_layer(model: FamilyFields, index: int, kind: str, num_layers: int) -> AttentionLayer:
    fields = model.of_layer(index)
    assert isinstance(fields, FamilyFields)
    window = _window(fields, kind)
    if _is_latent(fields):
        rope = fields.count("qk_rope_head_dim", low=0)
        latent = fields.count("kv_lora_rank") + rope
        size = _index_size(fields, index, num_layers)
        is_sparse = "index_head_dim" in fields.read_names
        return AttentionLayer(index, 1, latent, 0, window, True, size, rope if is_sparse else 0)
    key_size = _head_size(fields, kind)
    value_size = _value_size(fields, kind, key_size)
    index_size = _sparse_size(fields) if kind == INDEXED else 0
    return AttentionLayer(index, _num_kv_heads(fields, kind), key_size, value_size, window, index_size=index_size)


def _is_latent(fields: FamilyFields) -> bool:
    if "kv_lora_rank" not in fields.read_names:
        return False
    if "use_mla" in fields.read_names and not fields.flag("use_mla"):  # DeepSeek-OCR, deepseek-vl2-tiny
        return False
    return fields.get("kv_lora_rank") is not None or "head_dim" not in fields.read_names


def _index_size(fields: FamilyFields, index: int, num_layers: int) -> int:
    """Return the elements of an index key; 0 for layers that use the selection of an earlier one (GLM 5)."""
    if "index_head_dim" not in fields.read_names:
        return 0
    return 0 if _shares_index(fields, index, num_layers) else fields.count("index_head_dim")


def _shares_index(fields: FamilyFields, index: int, num_layers: int) -> bool:
    listed = fields.items("indexer_types")
    if listed is None and fields.get("index_topk_pattern") is not None:
        pattern = fields.get("index_topk_pattern")
        listed = list(pattern) if isinstance(pattern, str) else fields.items("index_topk_pattern")
    if listed is not None:
        value = exactly("indexer_types", listed, num_layers)[index]
        if value not in ("full", "shared", "F", "S"):
            raise InvalidArgument(f"indexer_types[{index}] is {shown(value)}; it must be 'full' or 'shared'")
        return value in ("shared", "S")
    every = fields.count("index_topk_freq", default=fields.fixed("index_freq", 1))
    offset = fields.count("index_skip_topk_offset", low=0, default=fields.fixed("index_offset", 2))
    return max(index - offset + 1, 0) % every != 0


def _sparse_size(fields: FamilyFields) -> int:
    """Return the elements of MiniMax M3's index key, from `index_head_dim` or its nested config."""
    nested = fields.get("sparse_attention_config")
    if not isinstance(nested, Mapping):
        return fields.count("index_head_dim")
    if nested.get("sparse_disable_index_value") is not None:
        kept = nested["sparse_disable_index_value"]
        listed = nested.get("sparse_attention_freq")
        sparse = listed if isinstance(listed, (list, tuple)) else []
        if not isinstance(kept, (list, tuple)) or not all(kept[i] for i, on in enumerate(sparse) if on):
            raise InvalidArgument(
                f"sparse_attention_config.sparse_disable_index_value is {shown(kept)}; it must be 1 for every sparse "
                f"layer: layers with index values are not supported"
            )
    for name, value in nested.items():
        if name not in _SPARSE_HARMLESS | {"sparse_disable_index_value"} and not is_off(value):
            raise InvalidArgument(f"sparse_attention_config.{name} is {shown(value)}; this key is unknown")
    return ConfigFields(nested).count("sparse_index_dim", default=fields.count("index_head_dim"))


def _window(fields: FamilyFields, kind: str) -> int:
    if kind == SLIDING and "local_attention" in fields.read_names:  # ModernBERT counts both sides of a token
        return fields.count("local_attention", low=2) // 2
    if kind == SLIDING:
        return fields.count("sliding_window")
    # A token attends at most to its chunk, so a window of the chunk's size is an upper bound.
    return fields.count("attention_chunk_size") if kind == CHUNKED else 0


def _num_kv_heads(fields: FamilyFields, kind: str) -> int:
    """Return the number of KV heads; as many as query heads by default."""
    if not fields.fixed("query_heads", True):  # JetMoE gives only the number of KV heads
        return fields.count("num_key_value_heads")
    num_heads = fields.count("num_attention_heads")
    if kind == SLIDING:
        own = _of_sliding_layers(fields, num_heads)
        if own is not None:
            return own
    if kind == FULL and _differs_when_full(fields) and fields.get("num_global_key_value_heads") is not None:
        return fields.count("num_global_key_value_heads")
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):  # Falcon, GPTBigCode
        return 1
    if fields.flag("multi_query_attention"):  # ChatGLM
        return fields.count("multi_query_group_num")
    nested = fields.get("attn_config")  # DBRX, MPT
    if nested is not None:
        _require_known_attention(nested)
        return require_int("attn_config.kv_n_heads", _of_nested(nested, "kv_n_heads", num_heads), 1, num_heads)
    if fields.get("new_decoder_architecture") is not None and not fields.flag("new_decoder_architecture"):
        return num_heads
    name = "num_kv_heads" if "num_kv_heads" in fields.read_names else "num_key_value_heads"
    num_kv_heads = fields.count(name, default=num_heads)
    if num_heads % num_kv_heads:
        raise InvalidArgument(
            f"{fields.name_in_config(name)} is {num_kv_heads}; it must divide "
            f"{fields.name_in_config('num_attention_heads')}, {num_heads}"
        )
    return num_kv_heads


def _require_known_attention(nested: object) -> None:
    """Raise `InvalidArgument` if a key of `attn_config` may change the cache and is unknown."""
    for name, value in nested.items() if isinstance(nested, Mapping) else ():
        is_known = name in _ATTN_CONFIG or is_off(value) or not can_change_cache(str(name))
        if not is_known or (name == "attn_type" and value not in ("multihead_attention", "grouped_query_attention")):
            raise InvalidArgument(
                f"attn_config.{name} is {shown(value)}; it may change the cache. If it does not, remove it from the "
                f"config"
            )


def _of_nested(nested: object, name: str, default: int) -> object:
    value = nested.get(name) if isinstance(nested, Mapping) else getattr(nested, name, None)
    return default if value is None else value


def _of_sliding_layers(fields: FamilyFields, num_heads: int) -> int | None:
    """Return the KV heads of sliding layers if they differ (MiMo-V2, Step 3.5), else None."""
    if fields.get("swa_num_key_value_heads") is not None:
        return fields.count("swa_num_key_value_heads")
    other = fields.get("attention_other_setting")
    if other is not None:
        return _other_setting(other, "num_attention_groups", fields.count("num_key_value_heads", default=num_heads))
    times: int = fields.fixed("sliding_kv_heads", 1)
    if times > 1 and fields.get("hybrid_layer_pattern") is not None:  # the publisher's configs always have both
        raise InvalidArgument("swa_num_key_value_heads is missing; a config with hybrid_layer_pattern must have it")
    return times * fields.count("num_key_value_heads") if times > 1 else None


def _other_setting(other: object, name: str, default: int) -> int:
    """Return a size of Step 3.5's sliding layers. Raises `InvalidArgument` for a setting that is not understood."""
    if not isinstance(other, Mapping):
        raise InvalidArgument(f"attention_other_setting is {shown(other)}; it must be an object")
    kind = other.get("attention_type")
    if kind not in (None, "sliding_attention"):
        raise InvalidArgument(
            f"attention_other_setting.attention_type is {shown(kind)}; it must be 'sliding_attention'"
        )
    for key, value in other.items():
        if key not in ("attention_type", "num_attention_heads", "num_attention_groups", "head_dim", "true_head_dim"):
            raise InvalidArgument(f"attention_other_setting.{key} is {shown(value)}; this key is unknown")
    given = other.get(name)
    return default if given is None else require_int(f"attention_other_setting.{name}", given, 1, 2**20)


def _differs_when_full(fields: FamilyFields) -> bool:
    """Return whether Gemma 4's full layers have sizes that differ and are not given per layer."""
    own = fields.read_names & {"attention_k_eq_v"} and not fields.has_layer_configs
    return bool(own) and fields.flag("attention_k_eq_v")


def _head_size(fields: FamilyFields, kind: str) -> int:
    """Return the elements of a key; by default hidden_size / num_attention_heads."""
    if kind == FULL and "global_head_dim" in fields.read_names and not fields.has_layer_configs:  # Gemma 4
        return fields.count("global_head_dim")
    if kind == SLIDING and fields.get("swa_head_dim") is not None:
        return fields.count("swa_head_dim")
    own = _own_head_size(fields)
    other = fields.get("attention_other_setting") if kind == SLIDING else None
    return own if other is None else _other_setting(other, "head_dim", own)


def _own_head_size(fields: FamilyFields) -> int:
    for name in ("head_dim", "kv_channels"):
        if fields.get(name) is not None:
            return fields.count(name)
    times: int = fields.fixed("hidden_sizes_per_head", 1)
    hidden_size = times * fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    if hidden_size % num_heads:
        raise InvalidArgument(
            f"head_dim is missing; without it hidden_size, {hidden_size}, must be a multiple of num_attention_heads, "
            f"{num_heads}"
        )
    return hidden_size // num_heads


def _value_size(fields: FamilyFields, kind: str, key_size: int) -> int:
    if kind == SLIDING and fields.get("swa_v_head_dim") is not None:
        return fields.count("swa_v_head_dim")
    return fields.count("v_head_dim", default=key_size)
