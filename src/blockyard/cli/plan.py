"""`blockyard plan`: what a model, GPUs and a trace come to."""

from __future__ import annotations

import argparse
import dataclasses

from ..errors import InvalidArgument
from ..lab import References, Trace, UnknownContents, read_references
from ..lab.output_file import require_output
from ..lab.planning import CapacityPlan, LargestStep, plan_capacity
from ..lab.planning.limits import GIB
from ..lab.survey import TraceSurvey, survey
from ..lab.traces import open_trace
from ..sizing import known_gpu, model_names
from .amounts import parse_lengths, parse_memory
from .plan_model import ChosenModel, chosen_model
from .plan_page import write_plan_page
from .plan_report import as_json, as_text
from .trace_options import report_skips

_DEFAULT_GPU = "h100"


def run_plan(options: argparse.Namespace) -> int:
    """Print the plan. Exit status 1 if the model does not fit."""
    if options.list_models:
        print("\n".join(model_names()))
        return 0
    _check_ranks(options)
    for path in options.output:
        require_output(path, (".html",))
    model = chosen_model(options)
    trace = open_trace(options.trace, format=options.format, tokenizer=options.tokenizer) if options.trace else None
    plan = _plan(options, model, trace)
    name = "" if trace is None else trace.name
    for path in options.output:
        write_plan_page(plan, model.name, name, path)
    print(as_json(plan, model.name, name) if options.json else as_text(plan, model.name, name))
    return 0 if plan.fits else 1


def _check_ranks(options: argparse.Namespace) -> None:
    """In the words of the options; the plan itself checks them by its own names."""
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
    """GiB: as given, or what CUDA gives of the GPU."""
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
    """The trace's totals, and what its prompts contain; None where it does not say."""
    references = None
    try:
        references = read_references(trace, block_size=block_size)
        traffic = references.survey
    except UnknownContents:
        traffic = survey(trace)
    report_skips(trace)
    return traffic, references
