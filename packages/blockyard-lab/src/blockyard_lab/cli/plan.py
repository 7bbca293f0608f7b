"""`blockyard plan` reads the model and the GPUs from the options, and prints what they come to."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockyard.amounts import parse_memory
from blockyard.cache_options import MAX_MODEL_LEN
from blockyard.cli import parse_lengths
from blockyard.errors import InvalidArgument, ModelError
from blockyard.sizing import (
    EncoderShape,
    KnownModel,
    KVCacheSpec,
    ModelShape,
    ModelWeights,
    dtype_bytes,
    encoder_shape,
    known_gpu,
    known_model,
    model_names,
    model_weights,
    num_draft_layers,
)

from .. import References, Trace, UnknownContents, read_references
from ..output_file import require_output
from ..planning import CapacityPlan, LargestStep, plan_capacity
from ..planning.memory import GIB
from ..survey import TraceSurvey, survey
from ..traces import open_trace
from .lab_options import report_skips, require_tier
from .plan_report import as_json, as_text, write_plan_page


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """name: for people. shape: None where the config does not give the widths. weights_on: bytes on each of n ranks.

    source: of the weights, sentences. encoder: of images, where the engine runs it.
    """

    name: str
    spec: KVCacheSpec
    shape: ModelShape | None
    weights_on: Callable[[int], int]
    source: tuple[str, ...]
    encoder: EncoderShape | None


def chosen_model(options: argparse.Namespace) -> ChosenModel:
    """Returns the model that the options name. Raises what `KVCacheSpec.from_config` raises."""
    if not options.model:
        raise InvalidArgument("MODEL is missing; give a folder, a config.json or a name of --list-models")
    path = Path(options.model)
    known = None if path.exists() else known_model(options.model)
    config: object = path if known is None else known.config
    counted, reason = _counted(options, config)
    spec = KVCacheSpec.from_config(
        config,
        block_size=options.block_size,
        dtype=_cache_dtype(options, known, counted),
        tensor_parallel_size=options.tensor_parallel,
    )
    if options.mtp:
        spec = _with_drafts(spec, config)
    weights_on, source = _weights(options, path, known, counted, reason, spec.model_dtype)
    name = path.resolve().name if known is None else known.name
    encoder = None if options.text_only else encoder_shape(config)
    return ChosenModel(name, spec, _shape(config, options.dtype), weights_on, source, encoder)


def _shape(config: object, dtype: str | None) -> ModelShape | None:
    try:
        return ModelShape.from_config(config, dtype=dtype)
    except InvalidArgument:
        return None  # the plan says that it guesses


def _counted(options: argparse.Namespace, config: object) -> tuple[ModelWeights | None, str]:
    """Returns the weights as the config gives them, or None and the reason why they cannot be counted."""
    try:
        return model_weights(config, dtype=options.dtype), ""
    except InvalidArgument as error:
        return None, str(error)


def _cache_dtype(options: argparse.Namespace, known: KnownModel | None, counted: ModelWeights | None) -> str | None:
    """Returns None for the config's own. An engine keeps 16 bits where the weights have 8, unless told otherwise."""
    if options.cache_dtype:
        return str(options.cache_dtype)
    if options.dtype and dtype_bytes("--dtype", options.dtype) > 1:
        return str(options.dtype)
    if counted is not None and counted.cache_dtype:
        return counted.cache_dtype
    has_own = known is None or "torch_dtype" in known.config or "text_config" in known.config
    return None if has_own else "bfloat16"


def _with_drafts(spec: KVCacheSpec, config: object) -> KVCacheSpec:
    """Returns the spec with the layers that predict further tokens, each like the model's last."""
    count = num_draft_layers(config)
    if not count:
        raise InvalidArgument("--mtp was given, and the model's config has no layers that predict further tokens")
    last = spec.layers[-1]
    first = max([layer.index for layer in spec.layers] + [state.index for state in spec.states]) + 1
    drafts = tuple(dataclasses.replace(last, index=first + number) for number in range(count))
    return dataclasses.replace(spec, layers=(*spec.layers, *drafts))


def _weights(
    options: argparse.Namespace,
    path: Path,
    known: KnownModel | None,
    counted: ModelWeights | None,
    reason: str,
    own_dtype: str,
) -> tuple[Callable[[int], int], tuple[str, ...]]:
    if options.weights:
        total = parse_memory("--weights", options.weights)
        return _divided(total), ("The size of the weights is as given.",)
    found = _files(path) if known is None else None
    if found is not None:
        return _of_files(options, path, *found, own_dtype)
    if counted is not None:
        return _of_config(options, path if known is None else known.config, counted)
    if known is None:
        raise InvalidArgument(f"--weights is missing; {_folder(path)} has no *.safetensors, and {reason}")
    size = dtype_bytes("--dtype", options.dtype or "bfloat16")
    sentence = f"The weights are {known.num_parameters:,} parameters of {size} byte{'s' * (size > 1)}."
    return _divided(known.num_parameters * size), (sentence,)


def _divided(total: int) -> Callable[[int], int]:
    return lambda ranks: -(-total // ranks)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _files(path: Path) -> tuple[int, str] | None:
    """Returns the bytes of a folder's weights and what they are, by its files or their index; None without either."""
    folder = _folder(path)
    # Some folders have the weights a second time, under another name.
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    try:
        if files:
            return sum(file.stat().st_size for file in files), f"the {len(files)} *.safetensors of {folder}"
        index = folder / "model.safetensors.index.json"
        total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
        return (int(total), f"those of {index}") if total else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{error.filename} could not be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        return None


def _of_files(
    options: argparse.Namespace, path: Path, total: int, what: str, own_dtype: str
) -> tuple[Callable[[int], int], tuple[str, ...]]:
    dtype = options.dtype
    if dtype and (not own_dtype or dtype_bytes("--dtype", dtype) != dtype_bytes("dtype", own_dtype)):
        raise InvalidArgument(
            f"--dtype is {dtype!r}, and the *.safetensors of {_folder(path)} have a type of their own; give --weights "
            f"for another one, or --cache-dtype for the cache's"
        )
    return _divided(total), (f"The weights are {what}.",)


def _of_config(
    options: argparse.Namespace, config: object, counted: ModelWeights
) -> tuple[Callable[[int], int], tuple[str, ...]]:
    def weights_on(ranks: int) -> int:
        found = model_weights(config, dtype=options.dtype, tensor_parallel_size=ranks)
        total = found.rank_bytes - (found.encoder_rank_bytes if options.text_only else 0)
        return total + (found.draft_rank_bytes if options.mtp else 0)

    how = f", quantized ({counted.method}): {counted.file_bytes / GIB:.2f} GiB" if counted.method else ""
    parts = [f"The weights are {counted.num_parameters:,} parameters"]
    if counted.num_encoder_parameters:
        without = "without" if options.text_only else "and"
        parts.append(f" {without} {counted.num_encoder_parameters:,} of the encoder of images")
    if options.mtp:
        parts.append(f", and {counted.num_draft_parameters:,} of layers that predict further tokens")
    sentences = ["".join(parts) + f"{how}."]
    if counted.cache_dtype and not options.cache_dtype:
        sentences.append(f"The cache has {counted.cache_dtype}, for which the weights' file has scales.")
    if counted.uncounted and not options.text_only:
        sentences.append(f"Weights that the config describes in {' and '.join(counted.uncounted)} are not counted.")
    return weights_on, tuple(sentences)


_DEFAULT_GPU = "h100"


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan. Exit status 1 if the model does not fit."""
    if options.list_models:
        print("\n".join(model_names()))
        return 0
    _check_ranks(options)
    require_tier(options)
    for path in options.output:
        require_output(path, (".html",))
    model = chosen_model(options)
    trace = open_trace(options.trace, format=options.format, tokenizer=options.tokenizer) if options.trace else None
    plan = _plan(options, model, trace)
    name = "" if trace is None else trace.name
    tiers = _tiers(options, plan, trace) if options.tier and plan.fits else []
    for path in options.output:
        write_plan_page(plan, model.name, name, path, tiers)
    print((as_json if options.json else as_text)(plan, model.name, name, tiers))
    return 0 if plan.fits else 1


def _tiers(options: argparse.Namespace, plan: CapacityPlan, trace: Trace | None) -> list[dict[str, Any]]:
    """Runs the trace in one replica's expected pool, with every combination of tiers below it."""
    from .tier_table import replay_tiers

    if trace is None:
        raise InvalidArgument("--tier was given without --trace, which says what would be hit")
    if plan.spec.states:
        raise InvalidArgument("--tier was given for a model that keeps states, whose tiers a plan does not count")
    size = plan.spec.block_size
    num_blocks = max(plan.num_blocks if plan.cache_budget is None else plan.cache_budget.num_blocks + 1, 2)
    longest = min(survey(trace).longest_sequence, num_blocks * size, MAX_MODEL_LEN)
    pool = {"num_blocks": num_blocks, "block_size": size, "policy": options.policy, "max_model_len": longest}
    return replay_tiers(options, trace, [pool], plan.spec.bytes_per_token * plan.spec.tensor_parallel_size)


def _check_ranks(options: argparse.Namespace) -> None:
    """Checks the ranks in the words of the options; the plan itself checks them by its own names."""
    for name in ("gpus", "tensor_parallel"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidArgument(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.gpus is not None and options.gpus % options.tensor_parallel:
        ranks = options.tensor_parallel
        raise InvalidArgument(f"--gpus is {options.gpus}; it must be a multiple of --tensor-parallel, {ranks}")


def _plan(options: argparse.Namespace, model: ChosenModel, trace: Trace | None) -> CapacityPlan:
    traffic, references = (None, None) if trace is None else _read(trace, model.spec.block_size)
    plan = plan_capacity(
        model.spec,
        gpu_memory_gib=_gpu_memory(options),
        weights_gib=model.weights_on(1) / GIB,
        weights_on=model.weights_on,
        num_gpus=options.gpus,
        gpu_memory_utilization=options.utilization,
        activation_gib=_activations(options),
        step=_step(options, model),
        lengths=parse_lengths("--lengths", options.lengths),
        max_num_seqs=options.max_num_seqs,
        running=options.running,
        seconds_per_token=options.seconds_per_token,
        cpu_gib=parse_memory("--cpu-memory", options.cpu_memory) / GIB,
        traffic=traffic,
        references=references,
        policy=options.policy,
    )
    return dataclasses.replace(plan, assumptions=(*model.source, *plan.assumptions))


def _gpu_memory(options: argparse.Namespace) -> float:
    """Returns the GiB that were given, or what CUDA gives of the GPU."""
    if options.gpu_memory is None:
        return known_gpu(options.gpu or _DEFAULT_GPU).memory_gib
    return parse_memory("--gpu-memory", options.gpu_memory) / GIB


def _step(options: argparse.Namespace, model: ChosenModel) -> LargestStep | None:
    if model.shape is None:
        return None
    gpu = known_gpu(options.gpu or _DEFAULT_GPU) if options.gpu_memory is None else None
    layers = 0 if options.no_cuda_graphs else len(model.spec.layers) + len(model.spec.states)
    return LargestStep(model.shape, options.max_num_batched_tokens, options.sampler, gpu, layers, model.encoder)


def _activations(options: argparse.Namespace) -> float | None:
    return None if options.activations is None else parse_memory("--activations", options.activations) / GIB


def _read(trace: Trace, block_size: int) -> tuple[TraceSurvey, References | None]:
    """Returns the trace's totals, and what its prompts contain; None where it does not say."""
    references = None
    try:
        references = read_references(trace, block_size=block_size)
        traffic = references.survey
    except UnknownContents:
        traffic = survey(trace)
    report_skips(trace)
    return traffic, references
