"""Parameters and bytes of a model's weights, counted from its config.

    from blockyard.sizing import count_parameters, model_weights

Matrices are counted for known architectures (`matrices`, `encoders`); their bytes follow from the config's
`quantization_config` (`quantization`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from ..arguments import require_int
from .config_fields import ConfigFields
from .encoders import encoder_matrices
from .layers import dtype_bytes, dtype_name
from .matrices import Matrix, draft_matrices, text_matrices
from .quantization import Quantization, quantization_beside, read_quantization
from .shape import ModelShape
from .shards import MAX_RANKS

#: vLLM's kernels for MXFP4 experts pad the width to a multiple of this.
_EXPERT_MULTIPLE = 256


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of a model.

    Attributes:
        num_parameters: parameters of the text model.
        num_encoder_parameters: parameters of image encoders.
        num_draft_parameters: parameters of the draft layers (multi-token prediction).
        file_bytes: bytes of text model and encoders as published.
        rank_bytes: bytes of these on each rank of an engine, with the kernels' padding.
        encoder_rank_bytes: bytes of the encoders among them.
        draft_rank_bytes: bytes of the draft layers on each rank.
        method: quantization method, "" for none.
        cache_dtype: type of keys and values that the file asks for, "" for none.
        uncounted: fields of the config whose weights are not counted.
    """

    num_parameters: int
    num_encoder_parameters: int
    num_draft_parameters: int
    file_bytes: int
    rank_bytes: int
    encoder_rank_bytes: int
    draft_rank_bytes: int
    method: str
    cache_dtype: str
    uncounted: tuple[str, ...]


def count_parameters(config: object) -> int:
    """Return the parameters of the text model in a Hugging Face config, as for `KVCacheSpec.from_config`. O(layers).

    A head tied to the embedding counts once. Encoders and draft layers are not counted. Raises `InvalidArgument` naming
    the architecture that is unknown, or the field that is missing.
    """
    return sum(matrix.num_elements for matrix in text_matrices(config))


def model_weights(config: object, *, dtype: object = None, tensor_parallel_size: int = 1) -> ModelWeights:
    """Return the weights of the model in a Hugging Face config. O(layers * patterns).

    Args:
        config: the config.
        dtype: type of weights that are not quantized; the config's own if None, else bfloat16. If given, the
            quantization_config is ignored.
        tensor_parallel_size: number of ranks.

    Raises:
        InvalidArgument: the architecture or the quantization is unknown.
    """
    ranks = require_int("tensor_parallel_size", tensor_parallel_size, 1, MAX_RANKS)
    fields = ConfigFields(config)
    own = fields.top("dtype", "torch_dtype") or "bfloat16"
    size = dtype_bytes("dtype", dtype_name("dtype", own if dtype is None else dtype))
    quantization = None if dtype is not None else read_quantization(_described(config, fields))
    if quantization is not None:
        size = max(size, 2)
    text, drafts = text_matrices(config), draft_matrices(config)
    encoders, uncounted = encoder_matrices(fields, ModelShape.from_config(config))
    held = [*text, *encoders]
    return ModelWeights(
        num_parameters=sum(matrix.num_elements for matrix in text),
        num_encoder_parameters=sum(matrix.num_elements for matrix in encoders),
        num_draft_parameters=sum(matrix.num_elements for matrix in drafts),
        file_bytes=sum(_file_bytes(matrix, quantization, size) for matrix in held),
        rank_bytes=_rank_bytes(held, quantization, size, ranks),
        encoder_rank_bytes=_rank_bytes(encoders, quantization, size, ranks),
        draft_rank_bytes=_rank_bytes(drafts, quantization, size, ranks),
        method="" if quantization is None else quantization.method,
        cache_dtype="" if quantization is None else quantization.cache_dtype,
        uncounted=uncounted,
    )


def num_draft_layers(config: object) -> int:
    """Return the number of draft layers in a Hugging Face config; 0 if it has none. O(1)."""
    return ConfigFields(config).count("num_nextn_predict_layers", "mtp_num_hidden_layers", low=0, default=0)


def _described(config: object, fields: ConfigFields) -> object:
    found = fields.outer("quantization_config", "compression_config")
    if found is None and isinstance(config, (str, PathLike)):
        return quantization_beside(Path(config))
    return found


def _file_bytes(matrix: Matrix, quantization: Quantization | None, size: int) -> int:
    packing = None if quantization is None else quantization.packing(matrix)
    if packing is None:
        return matrix.num_elements * size
    return matrix.count * packing.num_bytes(matrix.rows, matrix.columns)


def _rank_bytes(matrices: Iterable[Matrix], quantization: Quantization | None, size: int, ranks: int) -> int:
    """Return the bytes on one rank: its part of each divisible matrix, and the copies that an engine makes."""
    total = 0
    for matrix in matrices:
        parts = min(ranks, matrix.ways) if matrix.ways else ranks
        padded = _padded(matrix, parts) if quantization is not None and quantization.pads_experts else matrix
        total += math.ceil(_file_bytes(padded, quantization, size) / parts)
        if matrix.name.endswith("kv_b_proj") and quantization is not None and quantization.packing(matrix) is not None:
            total += math.ceil(matrix.num_elements * size / parts)  # MLA's kernels take it in the model's own type
    return total


def _padded(matrix: Matrix, parts: int) -> Matrix:
    """Return an expert matrix of gpt-oss with its width padded on each rank."""
    if matrix.name.endswith("experts.gate_up_proj"):
        return replace(matrix, rows=2 * parts * _up(matrix.rows // 2, parts))
    if matrix.name.endswith("experts.down_proj"):
        return replace(matrix, columns=parts * _up(matrix.columns, parts))
    return matrix


def _up(width: int, parts: int) -> int:
    return -(-math.ceil(width / parts) // _EXPERT_MULTIPLE) * _EXPERT_MULTIPLE
