"""`blockyard plan` reads the model and the GPUs from the options, and prints what they come to."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..amounts import parse_memory
from ..config import MAX_MODEL_LEN
from ..errors import InvalidArgument, ModelError
from ..lab import References, Trace, UnknownContents, read_references
from ..lab.output_file import require_output
from ..lab.planning import CapacityPlan, LargestStep, plan_capacity
from ..lab.planning.memory import GIB
from ..lab.survey import TraceSurvey, survey
from ..lab.traces import open_trace
from ..sizing import KnownModel, KVCacheSpec, ModelShape, count_parameters, known_gpu, known_model, model_names
from ..sizing.layers import dtype_bytes
from .lab_options import report_skips, require_tier
from .options import parse_lengths
from .plan_report import as_json, as_text, write_plan_page


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
    """Returns the model that the options name. Raises what `KVCacheSpec.from_config` raises."""
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
    """Returns None for the config's own. An engine keeps 16 bits where the weights have 8, unless told otherwise."""
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
        weights_gib=model.weight_bytes / GIB,
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
    return dataclasses.replace(plan, assumptions=(model.source, *plan.assumptions))


def _gpu_memory(options: argparse.Namespace) -> float:
    """Returns the GiB that were given, or what CUDA gives of the GPU."""
    if options.gpu_memory is None:
        return known_gpu(options.gpu or _DEFAULT_GPU).memory_gib
    return parse_memory("--gpu-memory", options.gpu_memory) / GIB


def _step(options: argparse.Namespace, model: ChosenModel) -> LargestStep | None:
    if model.shape is None:
        return None
    return LargestStep(model.shape, options.max_num_batched_tokens, options.sampler)


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
