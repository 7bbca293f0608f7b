"""Bytes of quantized weights and their scales, from a config's `quantization_config`.

The methods are those of published files. An unknown method, format or width is rejected, because ignoring it would make
a plan wrong by a factor of two to four.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..arguments import shown
from ..errors import InvalidArgument
from .matrices import LINEAR, Matrix

_WHOLE, _ROW = 0, -1
_ADVICE = "give --weights (weights_gib), or a folder with its *.safetensors"


@dataclass(frozen=True, slots=True)
class Packing:
    """Storage format of a matrix.

    Attributes:
        bits: bits per element.
        group: columns per scale; -1 for a whole row, 0 for one scale per matrix.
        block_rows: rows per scale.
        scale_bytes: bytes of a scale.
        zero_bits: bits of a zero point per scale.
        fixed_bytes: further bytes per matrix.
        column_bytes: further bytes per column, such as its index.
    """

    bits: int
    group: int = _WHOLE
    block_rows: int = 1
    scale_bytes: int = 4
    zero_bits: int = 0
    fixed_bytes: int = 0
    column_bytes: int = 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of one matrix."""
        scales = 1 if self.group == _WHOLE else -(-rows // self.block_rows) * self._groups(columns)
        packed = rows * -(-columns * self.bits // 8)
        zeros = -(-scales * self.zero_bits // 8)
        return packed + scales * self.scale_bytes + zeros + self.fixed_bytes + columns * self.column_bytes

    def _groups(self, columns: int) -> int:
        return 1 if self.group == _ROW else -(-columns // self.group)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Storage of a model's matrices according to its quantization_config.

    Attributes:
        method: name of the method.
        rules: patterns of module names and their packing, None if not quantized; the first match applies.
        default: packing of linear layers that no rule matches.
        cache_dtype: type of keys and values that the file was made for; "" for the engine's default.
        pads_experts: whether kernels pad experts (MXFP4).
        is_exact: whether a plain pattern matches one module by its full name, and none inside it.
    """

    method: str
    rules: tuple[tuple[tuple[str, ...], Packing | None], ...]
    default: Packing | None
    cache_dtype: str = ""
    pads_experts: bool = False
    is_exact: bool = False

    def packing(self, matrix: Matrix) -> Packing | None:
        """Return the packing of a matrix; None if it is stored in the model's own type. O(patterns)."""
        if matrix.kind != LINEAR:
            return None
        name = matrix.name
        names = [name, *(new + name.removeprefix(old) for old, new in _PREFIXES if name.startswith(old))]
        for patterns, packing in self.rules:
            if any(_matches(pattern, name, self.is_exact) for pattern in patterns for name in names):
                return packing
        return self.default


def read_quantization(described: object) -> Quantization | None:
    """Return the quantization described by a mapping or an object with attributes; None for None.

    Raises `InvalidArgument` naming the method or the field that is unknown.
    """
    if described is None:
        return None
    found = _mapping(described)
    method = str(found.get("quant_method") or found.get("quant_type") or "").lower().replace("_", "-")
    if not method and "quant_algo" in found:
        method = "modelopt"
    reader = _READERS.get(method)
    if reader is None:
        raise InvalidArgument(
            f"quantization_config.quant_method is {shown(found.get('quant_method'))}; the size of such weights is "
            f"unknown (known: {', '.join(sorted(_READERS))}): {_ADVICE}"
        )
    return reader(method, found)


def quantization_beside(path: Path) -> object:
    """Return the content of the hf_quant_config.json in the folder of a config.json (ModelOpt); None without one."""
    file = (path if path.is_dir() else path.parent) / "hf_quant_config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    inner = content.get("quantization") if isinstance(content, dict) else None
    return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else None


def _mapping(described: object) -> Mapping[str, Any]:
    if isinstance(described, Mapping):
        return described
    if hasattr(described, "to_dict"):
        made = described.to_dict()
        if isinstance(made, Mapping):
            return made
    raise InvalidArgument(f"quantization_config is {shown(described)}; it must be an object with a quant_method")


#: Prefixes of module names, and the ones that multimodal wrappers use instead.
_PREFIXES = (
    ("model.", "model.language_model."),
    ("model.", "language_model.model."),
    ("model.", "language_model."),
    ("lm_head", "language_model.lm_head"),
    ("visual.", "model.visual."),
    ("vision_tower.", "model.vision_tower."),
    ("vision_model.", "model.vision_model."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("embed_vision.", "model.embed_vision."),
)


def _matches(pattern: str, name: str, is_exact: bool) -> bool:
    """Return whether a pattern matches a module.

    A pattern is "re:" and a regular expression, a name with wildcards, or whole parts of a name.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    if "*" in pattern:
        return any(fnmatchcase(text, pattern) for text in (name, f"{name}.weight"))
    if any(sign in pattern for sign in "^$|\\["):
        return re.search(pattern, name) is not None
    if is_exact:
        return pattern == name
    plain = pattern.strip(".")
    return bool(plain) and f".{plain}." in f".{name}."


def _patterns(found: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    patterns: list[str] = []
    for name in names:
        value = found.get(name)
        if value is None:
            continue
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
            raise InvalidArgument(f"quantization_config.{name} is {shown(value)}; it must be a list of modules' names")
        patterns += value
    for pattern in patterns:
        if pattern.startswith("re:"):
            _compiled(pattern.removeprefix("re:"))
    return tuple(patterns)


def _compiled(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(f"quantization_config has the invalid pattern {shown(pattern)}: {error}") from None


def _number(found: Mapping[str, Any], name: str, default: int | None, allowed: tuple[int, ...]) -> int:
    value = found.get(name, default)
    value = default if value is None else value
    if type(value) is not int or value not in allowed:
        raise InvalidArgument(
            f"quantization_config.{name} is {shown(value)}; it must be one of {', '.join(map(str, allowed))}: {_ADVICE}"
        )
    return value


def _group(found: Mapping[str, Any], name: str = "group_size", default: int = 128) -> int:
    value = found.get(name)
    value = default if value is None else value
    if type(value) is not int or (value != _ROW and not 1 <= value <= 2**20):
        raise InvalidArgument(f"quantization_config.{name} is {shown(value)}; it must be -1 or a number of columns")
    return value


def _pair(value: object, name: str) -> tuple[int, int]:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(v) is int and v > 0 for v in value):
        return value[0], value[1]
    raise InvalidArgument(f"quantization_config.{name} is {shown(value)}; it must be two numbers, of rows and columns")


_WIDTHS = (2, 3, 4, 5, 6, 8)
#: The head has the model's own type by default.
_HEAD: tuple[tuple[str, ...], None] = (("lm_head",), None)
#: Modules outside the text model's layers, which methods that quantize layers leave unchanged.
_OUTSIDE: tuple[tuple[str, ...], None] = (("re:(model\\.)?(visual|vision|multi_modal|embed_vision)", "lm_head"), None)


def _fp8(method: str, found: Mapping[str, Any]) -> Quantization:
    """Read FP8: one scale per block (DeepSeek, Qwen), per row (FBGEMM), or per matrix."""
    skipped = _patterns(found, "modules_to_not_convert", "ignored_layers", "ignore")
    blocks = found.get("weight_block_size")
    static = 4 if found.get("activation_scheme") == "static" else 0
    if method == "fbgemm-fp8":
        packing = Packing(8, _ROW)
    elif method == "mxfp8":
        packing = Packing(8, 32, scale_bytes=1)
    elif blocks is None:
        packing = Packing(8, fixed_bytes=static)
    else:
        rows, columns = _pair(blocks, "weight_block_size")
        packing = Packing(8, columns, rows, fixed_bytes=static)
    return Quantization(method, (_HEAD, (skipped, None)), packing)


def _mxfp4(method: str, found: Mapping[str, Any]) -> Quantization:
    """Read gpt-oss's format: experts have 4 bits per element and a byte of scale per 32 elements."""
    skipped = _patterns(found, "modules_to_not_convert")
    experts = ("experts",)
    return Quantization(method, ((skipped, None), (experts, Packing(4, 32, scale_bytes=1))), None, pads_experts=True)


def _awq(method: str, found: Mapping[str, Any]) -> Quantization:
    other = found.get("w_bit")
    bits, group = _number(found, "bits", other if type(other) is int else 4, _WIDTHS), _group(found, default=128)
    zeros = bits if found.get("zero_point", True) else 0
    skipped = _patterns(found, "modules_to_not_convert")
    return Quantization(method, (_OUTSIDE, (skipped, None)), Packing(bits, group, scale_bytes=2, zero_bits=zeros))


def _gptq(method: str, found: Mapping[str, Any]) -> Quantization:
    """Read GPTQ. Files include zero points even if they are all equal, and the order of the columns."""
    packing = _gptq_packing(found)
    rules: list[tuple[tuple[str, ...], Packing | None]] = []
    dynamic = found.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise InvalidArgument(f"quantization_config.dynamic is {shown(dynamic)}; it must map patterns to settings")
    for pattern, settings in dynamic.items():
        is_skipped = str(pattern).startswith("-:")
        expression = str(pattern).removeprefix("-:").removeprefix("+:")
        _compiled(expression)
        rules.append(((f"re:{expression}",), None if is_skipped else _gptq_packing({**found, **(settings or {})})))
    rules.append((_patterns(found, "modules_to_not_convert"), None))
    rules.append((("lm_head",), packing if found.get("lm_head") is True else None))
    rules.append(_OUTSIDE)
    inside = found.get("modules_in_block_to_quantize")
    if inside:
        names = [name for group in inside for name in ([group] if isinstance(group, str) else group)]
        return Quantization(method, (*rules, (tuple(names), packing)), None)
    return Quantization(method, tuple(rules), packing)


def _gptq_packing(found: Mapping[str, Any]) -> Packing:
    bits = _number(found, "bits", 4, _WIDTHS)
    return Packing(bits, _group(found), scale_bytes=2, zero_bits=bits, column_bytes=4)


def _auto_round(method: str, found: Mapping[str, Any]) -> Quantization:
    """Read Intel's AutoRound: `extra_config` sets the bits per module, with 16 for not quantized."""
    packing = _auto_round_packing(found)
    rules: list[tuple[tuple[str, ...], Packing | None]] = []
    for name, settings in (found.get("extra_config") or {}).items():
        own = {**found, **(settings or {})}
        bits = own.get("bits")
        pattern = f"re:{name}" if any(sign in name for sign in "*^$|\\[") else name
        if pattern.startswith("re:"):
            _compiled(name)
        rules.append(((pattern,), None if bits is not None and bits >= 16 else _auto_round_packing(own)))
    blocks = found.get("block_name_to_quantize")
    if blocks:
        names = tuple(blocks.split(",")) if isinstance(blocks, str) else _patterns(found, "block_name_to_quantize")
        whole = tuple(_stem(name.strip()) for name in names)
        return Quantization(method, (*rules, _HEAD, (whole, packing)), None)
    return Quantization(method, (*rules, _OUTSIDE), packing)


def _stem(block: str) -> str:
    """Return a pattern for the layers of a block's name, whatever prefix the text model has."""
    return "re:.*\\blayers\\." if block.endswith("layers") and "vis" not in block else block


def _auto_round_packing(found: Mapping[str, Any]) -> Packing:
    kind = str(found.get("data_type", "int"))
    bits = _number(found, "bits", 4, _WIDTHS)
    if kind.startswith(("mx", "nv")):
        return Packing(bits, _group(found, default=32 if kind.startswith("mx") else 16), scale_bytes=1, fixed_bytes=8)
    if kind.startswith("fp"):
        return Packing(bits, _group(found, default=_ROW))
    return Packing(bits, _group(found), scale_bytes=2, zero_bits=bits)


def _bitsandbytes(method: str, found: Mapping[str, Any]) -> Quantization:
    skipped = _patterns(found, "llm_int8_skip_modules")
    if found.get("load_in_8bit"):
        return Quantization(method, (_HEAD, (skipped, None)), Packing(8, _ROW))
    if not found.get("load_in_4bit"):
        raise InvalidArgument(
            f"quantization_config.load_in_4bit is {shown(found.get('load_in_4bit'))}; it or load_in_8bit must be true"
        )
    is_double = bool(found.get("bnb_4bit_use_double_quant"))
    packing = Packing(4, 64, scale_bytes=1 if is_double else 4)
    return Quantization(method, (_HEAD, (skipped, None)), packing)


_MODELOPT: dict[str, Packing] = {
    "FP8": Packing(8, fixed_bytes=4),
    "FP8_PER_CHANNEL_PER_TOKEN": Packing(8, _ROW),
    "FP8_PB_WO": Packing(8, 128, 128),
    "FP8_PB_REAL": Packing(8, 128, 128),
    "NVFP4": Packing(4, 16, scale_bytes=1, fixed_bytes=8),
    "NVFP4_AWQ": Packing(4, 16, scale_bytes=1, fixed_bytes=8),
    "NVFP4_SVD": Packing(4, 16, scale_bytes=1, fixed_bytes=8),
    "W4A16_NVFP4": Packing(4, 16, scale_bytes=1, fixed_bytes=8),
    "W4A8_NVFP4_FP8": Packing(4, 16, scale_bytes=1, fixed_bytes=8),
    "MXFP8": Packing(8, 32, scale_bytes=1),
    "MXFP4": Packing(4, 32, scale_bytes=1),
    "W4A8_MXFP4_FP8": Packing(4, 32, scale_bytes=1),
    "W4A16_AWQ": Packing(4, 128, scale_bytes=2),
    "W4A8_AWQ": Packing(4, 128, scale_bytes=2),
    "INT8_SQ": Packing(8, _ROW),
}


def _modelopt(method: str, found: Mapping[str, Any]) -> Quantization:
    inner = found.get("quantization")
    found = {**found, **inner} if isinstance(inner, Mapping) else found
    algorithm = str(found.get("quant_algo") or "").upper()
    skipped = _patterns(found, "exclude_modules", "ignore", "modules_to_not_convert")
    cache = _cache_dtype(found)
    if algorithm == "MIXED_PRECISION":
        layers = found.get("quantized_layers")
        if not isinstance(layers, Mapping):
            raise InvalidArgument(
                f"quantization_config.quantized_layers is {shown(layers)}; it must map modules: {_ADVICE}"
            )
        rules = tuple(((name,), _algorithm(str(_mapping(own).get("quant_algo")))) for name, own in layers.items())
        return Quantization(method, ((skipped, None), *rules), None, cache)
    return Quantization(method, ((skipped, None),), _algorithm(algorithm), cache)


def _algorithm(name: str) -> Packing:
    if name.upper() not in _MODELOPT:
        raise InvalidArgument(
            f"quantization_config.quant_algo is {shown(name)}; the size of such weights is unknown (known: "
            f"{', '.join(_MODELOPT)}): {_ADVICE}"
        )
    return _MODELOPT[name.upper()]


def _cache_dtype(found: Mapping[str, Any]) -> str:
    """Return the type of keys and values that the file has scales for, which engines use by default."""
    named = found.get("kv_cache_quant_algo")
    if isinstance(named, str) and named.upper() == "FP8":
        return "fp8"
    scheme = found.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float":
        return "fp8"
    return ""


def _compressed_tensors(method: str, found: Mapping[str, Any]) -> Quantization:
    sparsity = found.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise InvalidArgument(
            f"quantization_config.sparsity_config.format is {shown(sparsity.get('format'))}; the size of sparse "
            f"weights is unknown: {_ADVICE}"
        )
    groups = found.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise InvalidArgument(f"quantization_config.config_groups is {shown(groups)}; it must map names to groups")
    rules: list[tuple[tuple[str, ...], Packing | None]] = [(_patterns(found, "ignore"), None)]
    default: Packing | None = None
    for name, group in groups.items():
        packing = _group_packing(f"config_groups.{name}", _mapping(group), str(found.get("format", "")))
        targets = _patterns(group, "targets")
        named = tuple(target for target in targets if target not in _CLASSES)
        if named:
            rules.append((named, packing))
        if len(named) < len(targets):
            default = packing
    return Quantization(method, tuple(rules), default, _cache_dtype(found), is_exact=True)


#: Classes of layers that a target may name instead of a module.
_CLASSES = ("Linear", "FusedMoE")


def _group_packing(where: str, group: Mapping[str, Any], outer_format: str) -> Packing | None:
    weights = group.get("weights")
    layout = str(group.get("format") or outer_format)
    if weights is None or layout == "dense":
        return None
    if layout.startswith("marlin-24") or "sparse" in layout:
        raise InvalidArgument(f"quantization_config.format is {shown(layout)}; the size of sparse weights is unknown")
    weights = _mapping(weights)
    bits = _number(weights, "num_bits", 8, _WIDTHS)
    strategy, is_float = str(weights.get("strategy") or "tensor"), weights.get("type", "int") == "float"
    zeros = 0 if is_float or weights.get("symmetric", True) else bits
    shape_bytes = 16 if "pack" in layout and not is_float else 0
    if strategy == "tensor":
        return Packing(bits, scale_bytes=4, fixed_bytes=shape_bytes)
    if strategy == "channel":
        return Packing(bits, _ROW, scale_bytes=2, zero_bits=zeros, fixed_bytes=shape_bytes)
    if strategy == "block":
        rows, columns = _pair(weights.get("block_structure"), f"{where}.weights.block_structure")
        return Packing(bits, columns, rows, scale_bytes=2)
    if strategy in ("group", "tensor_group"):
        size = _group(weights, default=128)
        if is_float:  # NVFP4 and MXFP4 have a byte of scale a group
            return Packing(bits, size, scale_bytes=1 if bits == 4 or size == 32 else 2, fixed_bytes=8)
        return Packing(bits, size, scale_bytes=2, zero_bits=zeros, fixed_bytes=shape_bytes)
    raise InvalidArgument(
        f"quantization_config.{where}.weights.strategy is {shown(strategy)}; it must be tensor, channel, group, "
        f"tensor_group or block: {_ADVICE}"
    )


_QUARK: dict[str, int] = {"fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "uint8": 8, "int4": 4, "uint4": 4, "fp4": 4}


def _quark(method: str, found: Mapping[str, Any]) -> Quantization:
    """Read AMD's Quark: one type for all layers, and others by patterns."""
    rules: list[tuple[tuple[str, ...], Packing | None]] = [(_patterns(found, "exclude"), None)]
    for name, own in (found.get("layer_quant_config") or {}).items():
        rules.append(((name,), _quark_packing(_mapping(own).get("weight"))))
    default = _quark_packing(_mapping(found.get("global_quant_config") or {}).get("weight"))
    return Quantization(method, tuple(rules), default)


def _quark_packing(weight: object) -> Packing | None:
    if weight is None:
        return None
    if isinstance(weight, list):
        weight = weight[0]
    found = _mapping(weight)
    name, scheme = str(found.get("dtype")), str(found.get("qscheme"))
    if name not in _QUARK or scheme not in ("per_tensor", "per_channel", "per_group"):
        raise InvalidArgument(
            f"quantization_config has weights of dtype {shown(name)} with qscheme {shown(scheme)}; the size of such "
            f"weights is unknown: {_ADVICE}"
        )
    bits = _QUARK[name]
    if scheme == "per_group":
        size = _group(found, default=32)
        return Packing(bits, size, scale_bytes=1 if name == "fp4" else 2)
    return Packing(bits, _ROW if scheme == "per_channel" else _WHOLE)


_READERS = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "mxfp8": _fp8,
    "mxfp4": _mxfp4,
    "gpt-oss-mxfp4": _mxfp4,
    "awq": _awq,
    "awq-marlin": _awq,
    "gptq": _gptq,
    "gptq-marlin": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "modelopt-mixed": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "quark": _quark,
}
