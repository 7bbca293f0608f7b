"""Weight matrices of image encoders, counted from a config's `vision_config`.

An engine loads the encoder with the text model unless it is started for text only. Unknown encoders are reported, so
that a plan can list them as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..arguments import require_int
from ..errors import InvalidArgument
from .activations import EncoderShape
from .config_fields import MAX_FIELD, ConfigFields
from .matrices import LINEAR, PLAIN, Matrix
from .shape import ModelShape

#: Fields of a config that describe encoders.
_PARTS = ("vision_config", "audio_config", "sound_config")


def encoder_matrices(fields: ConfigFields, shape: ModelShape) -> tuple[list[Matrix], tuple[str, ...]]:
    """Return the matrices of a model's encoders, and the fields of encoders that are not counted. O(layers).

    Raises `InvalidArgument` naming the field of a known encoder that is missing or out of range.
    """
    matrices: list[Matrix] = []
    uncounted = []
    for part in _PARTS:
        described = fields.outer(part)
        if described is None or described == {}:
            continue
        sizes = _Sizes(part, described, shape.hidden_size)
        family = _FAMILIES.get(sizes.model_type)
        if family is None:
            uncounted.append(part)
        else:
            matrices += family(sizes)
    return matrices, tuple(uncounted)


def encoder_shape(config: object) -> EncoderShape | None:
    """Return the widths of the image encoder in a Hugging Face config; None if there is none or it is unknown. O(1).

    Raises `InvalidArgument` naming the field of a known encoder that is missing or out of range.
    """
    described = ConfigFields(config).outer("vision_config")
    if described is None or described == {}:
        return None
    sizes = _Sizes("vision_config", described, 0)
    found = _IMAGES.get(sizes.model_type)
    if found is None:
        return None
    patches_per_token, max_item_tokens = found
    return EncoderShape(
        sizes.count("hidden_size"), sizes.count("intermediate_size"), patches_per_token, max_item_tokens
    )


class _Sizes:
    """The fields of one encoder. `text_size` is the text model's hidden size."""

    def __init__(self, part: str, described: object, text_size: int) -> None:
        self._part, self._described, self.text_size = part, described, text_size

    @property
    def model_type(self) -> str:
        value = self._value("model_type")
        if not value and self._value("vt_hidden_size") is not None:
            return _MOON_VIT  # Kimi K2.5 names no type
        return value if isinstance(value, str) else ""

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise InvalidArgument(f"{self._part}.{name} is missing; it is needed to count the encoder's weights")
        return require_int(f"{self._part}.{name}", value, 0, MAX_FIELD)

    def length(self, name: str) -> int:
        value = self._value(name)
        return len(value) if isinstance(value, (list, tuple)) else 0

    def _value(self, name: str) -> object:
        if isinstance(self._described, Mapping):
            return self._described.get(name)
        return getattr(self._described, name, None)


def _linear(name: str, rows: int, columns: int, has_bias: bool = True, count: int = 1) -> Iterator[Matrix]:
    yield Matrix(name, rows, columns, count, LINEAR)
    if has_bias:
        yield Matrix(f"{name}.bias", rows, 1, count, PLAIN)


def _other(name: str, size: int) -> Matrix:
    return Matrix(name, size, kind=PLAIN)


def _qwen(sizes: _Sizes) -> Iterator[Matrix]:
    """Yield the matrices of Qwen3-VL and Qwen3.5.

    A merger joins squares of patches, one for each level that the text model reads.
    """
    hidden, wide = sizes.count("hidden_size"), sizes.count("intermediate_size")
    patch, merge = sizes.count("patch_size"), sizes.count("spatial_merge_size")
    pixels = sizes.count("in_channels", 3) * sizes.count("temporal_patch_size", 2) * patch**2
    yield _other("visual.patch_embed", hidden * (pixels + 1))
    yield _other("visual.pos_embed", hidden * sizes.count("num_position_embeddings"))
    for index in range(sizes.count("depth")):
        base = f"visual.blocks.{index}"
        yield _other(f"{base}.norms", 4 * hidden)
        yield from _linear(f"{base}.attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{base}.attn.proj", hidden, hidden)
        yield from _linear(f"{base}.mlp.linear_fc1", wide, hidden)
        yield from _linear(f"{base}.mlp.linear_fc2", hidden, wide)
    levels = sizes.length("deepstack_visual_indexes")
    joined = hidden * merge**2
    yield _other("visual.merger.norm", 2 * hidden + 2 * joined * levels)
    for name in ["visual.merger", *(f"visual.deepstack_merger_list.{level}" for level in range(levels))]:
        yield from _linear(f"{name}.linear_fc1", joined, joined)
        yield from _linear(f"{name}.linear_fc2", sizes.count("out_hidden_size"), joined)


def _gemma_4(sizes: _Sizes) -> Iterator[Matrix]:
    hidden, wide, size = sizes.count("hidden_size"), sizes.count("intermediate_size"), sizes.count("head_dim")
    heads, kv_heads = sizes.count("num_attention_heads"), sizes.count("num_key_value_heads")
    yield _other("vision_tower.position_embedding_table", 2 * sizes.count("position_embedding_size") * hidden)
    yield _other("vision_tower.input_proj", 3 * sizes.count("patch_size") ** 2 * hidden)
    for index in range(sizes.count("num_hidden_layers")):
        base = f"vision_tower.encoder.layers.{index}"
        yield _other(f"{base}.norms", 4 * hidden + 2 * size)
        for name, rows, columns in (
            ("self_attn.q_proj", heads * size, hidden),
            ("self_attn.k_proj", kv_heads * size, hidden),
            ("self_attn.v_proj", kv_heads * size, hidden),
            ("self_attn.o_proj", hidden, heads * size),
            ("mlp.gate_proj", wide, hidden),
            ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide),
        ):
            yield from _linear(f"{base}.{name}", rows, columns, has_bias=False)
    yield from _linear("embed_vision.embedding_projection", sizes.text_size, hidden, has_bias=False)


def _siglip(sizes: _Sizes) -> Iterator[Matrix]:
    """Yield the matrices of Gemma 3's encoder, without the pooling head."""
    hidden, wide, patch = sizes.count("hidden_size"), sizes.count("intermediate_size"), sizes.count("patch_size")
    yield _other("vision_tower.embeddings", hidden * (3 * patch**2 + 1 + (sizes.count("image_size") // patch) ** 2))
    for index in range(sizes.count("num_hidden_layers")):
        base = f"vision_tower.encoder.layers.{index}"
        yield _other(f"{base}.norms", 4 * hidden)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{base}.self_attn.{name}", hidden, hidden)
        yield from _linear(f"{base}.mlp.fc1", wide, hidden)
        yield from _linear(f"{base}.mlp.fc2", hidden, wide)
    yield _other("vision_tower.post_layernorm", 2 * hidden)
    yield _other("multi_modal_projector", hidden * sizes.text_size + hidden)


def _pixtral(sizes: _Sizes) -> Iterator[Matrix]:
    """Yield the matrices of Mistral 3's encoder, which joins two by two patches."""
    hidden, wide = sizes.count("hidden_size"), sizes.count("intermediate_size")
    yield _other("vision_tower.patch_conv", 3 * hidden * sizes.count("patch_size") ** 2 + hidden)
    for index in range(sizes.count("num_hidden_layers")):
        base = f"vision_tower.transformer.layers.{index}"
        yield _other(f"{base}.norms", 2 * hidden)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from _linear(f"{base}.attention.{name}", hidden, hidden, has_bias=False)
        for name in ("gate_proj", "up_proj"):
            yield from _linear(f"{base}.feed_forward.{name}", wide, hidden, has_bias=False)
        yield from _linear(f"{base}.feed_forward.down_proj", hidden, wide, has_bias=False)
    yield _other("multi_modal_projector.norm", hidden)
    for name, rows, columns in (
        ("patch_merger.merging_layer", hidden, 4 * hidden),
        ("linear_1", sizes.text_size, hidden),
        ("linear_2", sizes.text_size, sizes.text_size),
    ):
        yield from _linear(f"multi_modal_projector.{name}", rows, columns, has_bias=False)


def _llama_4(sizes: _Sizes) -> Iterator[Matrix]:
    hidden, wide, patch = sizes.count("hidden_size"), sizes.count("intermediate_size"), sizes.count("patch_size")
    patches = (sizes.count("image_size") // patch) ** 2
    projected = sizes.count("projector_output_dim")
    yield _other("vision_model.embeddings", hidden * (patches + 2 + 3 * patch**2))
    yield _other("vision_model.norms", 4 * hidden)
    for index in range(sizes.count("num_hidden_layers")):
        base = f"vision_model.model.layers.{index}"
        yield _other(f"{base}.norms", 4 * hidden)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from _linear(f"{base}.self_attn.{name}", hidden, hidden)
        yield from _linear(f"{base}.mlp.fc1", wide, hidden)
        yield from _linear(f"{base}.mlp.fc2", hidden, wide)
    yield from _linear("vision_model.vision_adapter.mlp.fc1", sizes.count("projector_input_dim"), wide, has_bias=False)
    adapter = sizes.count("projector_input_dim")
    yield from _linear("vision_model.vision_adapter.mlp.fc2", projected, adapter, has_bias=False)
    output = sizes.count("vision_output_dim")
    yield from _linear("multi_modal_projector.linear_1", sizes.text_size, output, has_bias=False)


def _moon_vit(sizes: _Sizes) -> Iterator[Matrix]:
    """Yield MoonViT's of Kimi K2.5, which stay in bfloat16 in its quantized file."""
    hidden, wide, patch = sizes.count("vt_hidden_size"), sizes.count("vt_intermediate_size"), sizes.count("patch_size")
    positions = sizes.count("init_pos_emb_height") * sizes.count("init_pos_emb_width")
    yield _other("vision_tower.patch_embed", hidden * (3 * patch**2 + 1 + positions))
    for index in range(sizes.count("vt_num_hidden_layers")):
        attention, mlp = 4 * hidden * (hidden + 1), 2 * hidden * wide + hidden + wide
        yield _other(f"vision_tower.encoder.blocks.{index}", 4 * hidden + attention + mlp)
    yield _other("vision_tower.encoder.final_layernorm", 2 * hidden)
    merged = 4 * sizes.count("mm_hidden_size")  # two by two patches
    projected = merged * (merged + 1) + sizes.text_size * (merged + 1)
    yield _other("mm_projector", 2 * sizes.count("mm_hidden_size") + projected)


_MOON_VIT = "moonvit3d"
_FAMILIES: dict[str, Callable[[_Sizes], Iterator[Matrix]]] = {
    "qwen3_vl": _qwen,
    "qwen3_vl_vision": _qwen,
    "qwen3_vl_moe": _qwen,
    "qwen3_vl_moe_vision": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_vision": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_5_moe_vision": _qwen,
    "gemma4_vision": _gemma_4,
    "siglip_vision_model": _siglip,
    "pixtral": _pixtral,
    "llama4_vision_model": _llama_4,
    _MOON_VIT: _moon_vit,
}

#: Patches per token, and tokens of the largest image by the processor's default, by family.
_IMAGES = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"), (4, 16384)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"), (4, 16384)),
    "gemma4_vision": (9, 280),
    "siglip_vision_model": (16, 256),
    "pixtral": (4, 3025),
    "llama4_vision_model": (4, 2448),
}
