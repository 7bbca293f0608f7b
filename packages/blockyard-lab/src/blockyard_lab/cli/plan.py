"""The command `blockyard plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blockyard.amounts import parse_memory
from blockyard.cache_options import MAX_MODEL_LEN
from blockyard.cli import as_json, parse_lengths
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
from ..planning.gpu_memory import GIB
from ..planning.plan_page import write_plan_page
from ..replay.tier_result import TierRow
from ..survey import TraceSurvey, survey
from ..traces import open_trace
from .lab_options import report_skips, require_tier


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The model that the options name.

    Attributes:
        name: name to show.
        spec: its cache.
        shape: its widths; None if the config does not give them.
        weights_on: returns the weights' bytes on each of n ranks.
        source: sentences about the weights.
        encoder: the image encoder, if the engine runs it.
    """

    name: str
    spec: KVCacheSpec
    shape: ModelShape | None
    weights_on: Callable[[int], int]
    source: tuple[str, ...]
    encoder: EncoderShape | None


def chosen_model(options: argparse.Namespace) -> ChosenModel:
    """Return the model that the options name.

    Raises:
        InvalidArgument: for invalid options.
        ModelError: if the model's config cannot be read.
    """
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
    try:
        shape = ModelShape.from_config(config, dtype=options.dtype)
    except InvalidArgument:
        shape = None  # the plan says that it guesses
    return ChosenModel(name, spec, shape, weights_on, source, encoder)


def _counted(options: argparse.Namespace, config: object) -> tuple[ModelWeights | None, str]:
    """Return the weights counted from the config, or None and the reason."""
    try:
        return model_weights(config, dtype=options.dtype), ""
    except InvalidArgument as error:
        return None, str(error)


def _cache_dtype(options: argparse.Namespace, known: KnownModel | None, counted: ModelWeights | None) -> str | None:
    """Return the cache's dtype, or None for the config's own. Engines keep 16 bits for 8-bit weights by default."""
    if options.cache_dtype:
        return str(options.cache_dtype)
    if options.dtype and dtype_bytes("--dtype", options.dtype) > 1:
        return str(options.dtype)
    if counted is not None and counted.cache_dtype:
        return counted.cache_dtype
    has_own = known is None or "torch_dtype" in known.config or "text_config" in known.config
    return None if has_own else "bfloat16"


def _with_drafts(spec: KVCacheSpec, config: object) -> KVCacheSpec:
    """Return the spec with the model's layers for multi-token prediction, each like its last layer."""
    count = num_draft_layers(config)
    if not count:
        raise InvalidArgument("--mtp was given, but the model's config has no layers for multi-token prediction")
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
        return _divide(total), ("The size of the weights is as given.",)
    found = _files(path) if known is None else None
    if found is not None:
        return _of_files(options, path, *found, own_dtype)
    if counted is not None:
        return _of_config(options, path if known is None else known.config, counted)
    if known is None:
        raise InvalidArgument(f"--weights is missing; {_folder(path)} has no *.safetensors, and {reason}")
    size = dtype_bytes("--dtype", options.dtype or "bfloat16")
    sentence = f"The weights are {known.num_parameters:,} parameters of {size} byte{'s' * (size > 1)}."
    return _divide(known.num_parameters * size), (sentence,)


def _divide(total: int) -> Callable[[int], int]:
    return lambda ranks: -(-total // ranks)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _files(path: Path) -> tuple[int, str] | None:
    """Return the bytes of a folder's weights from its files or their index, and a description; None without either."""
    folder = _folder(path)
    # Some folders hold the weights twice, under two names.
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
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        return None


def _of_files(
    options: argparse.Namespace, path: Path, total: int, what: str, own_dtype: str
) -> tuple[Callable[[int], int], tuple[str, ...]]:
    dtype = options.dtype
    if dtype and (not own_dtype or dtype_bytes("--dtype", dtype) != dtype_bytes("dtype", own_dtype)):
        raise InvalidArgument(
            f"--dtype is {dtype!r}, but the *.safetensors in {_folder(path)} have another type; give --weights for "
            f"other weights, or --cache-dtype for the cache"
        )
    return _divide(total), (f"The weights are {what}.",)


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
    """Print the plan. The exit status is 1 if the model does not fit."""
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
    about = (model.name, name, tiers)
    print(as_json(plan.as_dict(*about)) if options.json else plan.as_text(*about))
    return 0 if plan.fits else 1


def _tiers(options: argparse.Namespace, plan: CapacityPlan, trace: Trace | None) -> list[TierRow]:
    """Replay the trace in one replica's expected pool with every combination of tiers."""
    from .tier_table import replay_tiers

    if trace is None:
        raise InvalidArgument("--tier was given without --trace, whose prompts it replays")
    if plan.spec.states:
        raise InvalidArgument("--tier was given for a model that keeps states; a plan cannot count their tiers")
    size = plan.spec.block_size
    num_blocks = max(plan.num_blocks if plan.cache_budget is None else plan.cache_budget.num_blocks + 1, 2)
    longest = min(survey(trace).longest_sequence, num_blocks * size, MAX_MODEL_LEN)
    pool = {"num_blocks": num_blocks, "block_size": size, "policy": options.policy, "max_model_len": longest}
    return replay_tiers(options, trace, [pool], plan.spec.bytes_per_token * plan.spec.tensor_parallel_size)


def _check_ranks(options: argparse.Namespace) -> None:
    """Check the ranks under the options' names. The plan checks them too, but under its own names."""
    for name in ("gpus", "tensor_parallel"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidArgument(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.gpus is not None and options.gpus % options.tensor_parallel:
        ranks = options.tensor_parallel
        raise InvalidArgument(f"--gpus is {options.gpus}; it must be a multiple of --tensor-parallel, {ranks}")


def _plan(options: argparse.Namespace, model: ChosenModel, trace: Trace | None) -> CapacityPlan:
    traffic, references = (None, None) if trace is None else _read(trace, model.spec.block_size)
    if options.gpu_memory is None:
        gpu_gib = known_gpu(options.gpu or _DEFAULT_GPU).memory_gib
    else:
        gpu_gib = parse_memory("--gpu-memory", options.gpu_memory) / GIB
    activations = options.activations
    plan = plan_capacity(
        model.spec,
        gpu_memory_gib=gpu_gib,
        weights_gib=model.weights_on(1) / GIB,
        weights_on=model.weights_on,
        num_gpus=options.gpus,
        gpu_memory_utilization=options.utilization,
        activation_gib=None if activations is None else parse_memory("--activations", activations) / GIB,
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


def _step(options: argparse.Namespace, model: ChosenModel) -> LargestStep | None:
    if model.shape is None:
        return None
    gpu = known_gpu(options.gpu or _DEFAULT_GPU) if options.gpu_memory is None else None
    layers = 0 if options.no_cuda_graphs else len(model.spec.layers) + len(model.spec.states)
    return LargestStep(model.shape, options.max_num_batched_tokens, options.sampler, gpu, layers, model.encoder)


def _read(trace: Trace, block_size: int) -> tuple[TraceSurvey, References | None]:
    """Return the trace's totals, and its contents or None if it does not have them."""
    references = None
    try:
        references = read_references(trace, block_size=block_size)
        traffic = references.survey
    except UnknownContents:
        traffic = survey(trace)
    report_skips(trace)
    return traffic, references
