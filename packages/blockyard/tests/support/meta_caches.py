"""What the models of transformers keep, read from the caches that they fill on the meta device: no memory, no weights.

A meta tensor has a shape and no numbers. Where a model asks for a number, it is told 1, which changes no shape of a
cache: experts and masks ask, keys and values do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

#: Tokens of the run; fewer than any window.
NUM_TOKENS = 5
NUM_LAYERS = 8
_TABLES = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
_LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TEXT_NAMES = ("text_config", "llm_config", "language_config")
#: Lists with an entry for each layer, which a class makes again for another number of layers.
_OF_LAYERS = ("layer_types", "mlp_layer_types", "indexer_types", "per_layer_config", "mtp_layer_types")
_HALF_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
#: What the default config of a class lacks.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGA": 5, "IMGIMGB": 6}},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 8, "rope_theta": 10000.0}},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5, "<|visual token 000000|>": 6}},
    **{kind: {"text_config": _HALF_ROTARY} for kind in ("glm4v", "glm46v", "glmga")},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "jetmoe": {"num_local_experts": 2 * NUM_TOKENS, "num_experts_per_tok": 2},  # as many as tokens that experts take
    "bamba": {"attn_layer_indices": [1, 5], "num_hidden_layers": NUM_LAYERS},
    "deepseek_v2": {
        "topk_method": "greedy",
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 1408,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4, "num_hidden_layers": NUM_LAYERS},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": NUM_LAYERS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": NUM_LAYERS},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 8},
    "step3p7": {"text_config": {"sliding_window": 512}},
}


def generating_classes() -> list[tuple[str, str]]:
    """Return each model type of transformers that generates text, with each of its classes."""
    found: dict[tuple[str, str], None] = {}
    for table in _TABLES:
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                found[kind, name] = None
    return list(found)


def small_meta_config(kind: str, class_name: str, **fields: Any) -> tuple[Any, Any]:
    """Return a class, and its config with 8 layers where the class allows it and all other sizes its own."""
    model_class = getattr(transformers, class_name)
    try:
        config = _with_few_layers(CONFIG_MAPPING[kind], {**_DEFAULTS.get(kind, {}), **fields})
    except Exception:  # what a config raises that needs those of its parts
        config = _with_few_layers(model_class.config_class, fields)
    if model_class.config_class is not type(config):
        config = config.get_text_config(decoder=True)
    return model_class, config


def _with_few_layers(config_class: Any, given: dict[str, Any]) -> Any:
    whole = config_class(**given)
    if "layer_types" in given or "num_hidden_layers" in given:
        return whole
    name = next((name for name in _TEXT_NAMES if getattr(whole, name, None) is not None), None)
    try:
        if name is not None:
            text = {key: value for key, value in getattr(whole, name).to_dict().items() if key not in _OF_LAYERS}
            return config_class(**{**given, name: {**text, "num_hidden_layers": NUM_LAYERS}})
        count = next((name for name in _LAYER_NAMES if isinstance(getattr(whole, name, None), int)), None)
        return whole if count is None else config_class(**{**given, count: NUM_LAYERS})
    except Exception:  # what a class raises whose other fields do not fit 8 layers
        return whole


def text_models(model_class: Any, config: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the classes of a multimodal model's text layers, with their config."""
    text = config.get_text_config(decoder=True)
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = None
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        with suppress(ValueError):  # transformers lists a class that it does not export
            found = mapping.get(type(text), None)
            if found is not None and found is not model_class:
                yield found, text


class _Answers(TorchFunctionMode):  # type: ignore[misc]  # torch has no types here
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if name in ("item", "__int__", "__index__"):
                return 1
            if name == "__bool__":
                return True
            if name == "tolist":
                return torch.ones(args[0].shape, dtype=torch.long).tolist()
            if name == "nonzero":
                return torch.zeros((1, args[0].dim()), dtype=torch.long, device="meta")
        return func(*args, **(kwargs or {}))


def kept_elements(model_class: Any, config: Any) -> tuple[int, int, int]:
    """Return the elements that a token, the convolutions of a sequence and its recurrent states take.

    Of a convolution over k tokens transformers keeps k; the k - 1 that are needed are counted.
    """
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation="eager", dtype=torch.bfloat16).eval()
    ids = torch.ones((1, NUM_TOKENS), dtype=torch.long, device="meta")
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.no_grad(), _Answers(), fx_config.patch(meta_nonzero_assume_all_nonzero=True):
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
    finally:
        torch.set_default_dtype(default)
    cache = getattr(output, "past_key_values", None)
    cache = output.cache_params if cache is None else cache
    if hasattr(cache, "rnn_state"):  # xLSTM's: three tensors a layer
        return 0, 0, sum(state.numel() for states in cache.rnn_state.values() for state in states)
    return _elements_of(cache)


def _elements_of(cache: Any) -> tuple[int, int, int]:
    tokens = sum(tensor.numel() for layer in cache.layers for tensor in _token_tensors(layer))
    assert tokens % NUM_TOKENS == 0, "a cache of another length than the prompt"
    convolutions = [state for layer in cache.layers for state in _states(layer, "conv_states")]
    recurrent = [state for layer in cache.layers for state in _states(layer, "recurrent_states")]
    recurrent += [state for state in getattr(cache, "linear_cache", []) if isinstance(state, torch.Tensor)]
    before = sum(state.numel() // state.shape[-1] * (state.shape[-1] - 1) for state in convolutions)
    return tokens // NUM_TOKENS, before, sum(state.numel() for state in recurrent)


def _token_tensors(layer: Any) -> Iterator[Any]:
    """Yield keys, values and whatever else a layer holds as a tensor for its tokens: index keys of any name."""
    for value in vars(layer).values():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            yield value


def _states(layer: Any, name: str) -> list[Any]:
    return [state for state in getattr(layer, name, {}).values() if isinstance(state, torch.Tensor)]
