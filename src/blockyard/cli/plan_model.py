"""MODEL of `blockyard plan`: what the cache keeps, and how large the weights are."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidArgument, ModelError
from ..sizing import KnownModel, KVCacheSpec, ModelShape, count_parameters, known_model
from ..sizing.dtypes import dtype_bytes
from .amounts import parse_memory


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """name: for people. shape: None where the config does not give the widths. weight_bytes: of the whole model.

    source: of the weights, a sentence.
    """

    name: str
    spec: KVCacheSpec
    shape: ModelShape | None
    weight_bytes: int
    source: str


def chosen_model(options: argparse.Namespace) -> ChosenModel:
    """The model that the options name. Raises `InvalidArgument` and `ModelError` as `KVCacheSpec.from_config`."""
    if not options.model:
        raise InvalidArgument("MODEL is missing; give a folder, a config.json or a name of --list-models")
    path = Path(options.model)
    known = None if path.exists() else known_model(options.model)
    config = path if known is None else known.config
    spec = KVCacheSpec.from_config(
        config,
        block_size=options.block_size,
        dtype=_cache_dtype(options, known),
        tensor_parallel_size=options.tensor_parallel,
    )
    weight_bytes, source = _weights(options, path, known, spec.model_dtype)
    name = path.resolve().name if known is None else known.name
    return ChosenModel(name, spec, _shape(config, options.dtype), weight_bytes, source)


def _shape(config: object, dtype: str | None) -> ModelShape | None:
    try:
        return ModelShape.from_config(config, dtype=dtype)
    except InvalidArgument:
        return None  # the plan says that it guesses


def _cache_dtype(options: argparse.Namespace, known: KnownModel | None) -> str | None:
    """None for the config's own. An engine keeps 16 bits where the weights have 8, unless it is told otherwise."""
    if options.cache_dtype:
        return str(options.cache_dtype)
    if options.dtype and dtype_bytes("--dtype", options.dtype) > 1:
        return str(options.dtype)
    has_own = known is None or "torch_dtype" in known.config
    return None if has_own else "bfloat16"


def _weights(options: argparse.Namespace, path: Path, known: KnownModel | None, own_dtype: str) -> tuple[int, str]:
    if options.weights:
        return parse_memory("--weights", options.weights), "The size of the weights is as given."
    if known is None:
        return _weights_of_folder(path, options.dtype, own_dtype)
    if known.served_bytes and not options.dtype:
        return known.served_bytes, (
            f"The weights are {known.name}'s as an engine holds them, in several types, padded for its kernels; "
            f"{known.weight_bytes / 2**30:.2f} GiB are published."
        )
    return _parameters(known.num_parameters, options.dtype or known.weight_dtype)


def _parameters(count: int, dtype: str) -> tuple[int, str]:
    size = dtype_bytes("--dtype", dtype)
    return count * size, f"The weights are {count:,} parameters of {size} byte{'s' * (size > 1)} ({dtype})."


def _weights_of_folder(path: Path, dtype: str | None, own_dtype: str) -> tuple[int, str]:
    folder = path if path.is_dir() else path.parent
    # Some folders have the weights a second time, under another name.
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        return _weights_of_config(path, folder, dtype or own_dtype)
    if dtype and (not own_dtype or dtype_bytes("--dtype", dtype) != dtype_bytes("dtype", own_dtype)):
        raise InvalidArgument(
            f"--dtype is {dtype!r}, and the *.safetensors of {folder} have a type of their own; give --weights for "
            f"another one, or --cache-dtype for the cache's"
        )
    try:
        total = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise ModelError(f"{error.filename} could not be read: {error.strerror}") from error
    return total, f"The weights are the {len(files)} *.safetensors of {folder}."


def _weights_of_config(path: Path, folder: Path, dtype: str) -> tuple[int, str]:
    """Counted, where there is nothing to measure."""
    try:
        return _parameters(count_parameters(path), dtype or "bfloat16")
    except InvalidArgument as error:
        raise InvalidArgument(f"--weights is missing; {folder} has no *.safetensors, and {error}") from None
