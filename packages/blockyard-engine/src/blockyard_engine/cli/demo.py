"""`blockyard demo`: answers chat requests with a real model, and reports what paging and prefix sharing saved."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from blockyard.arguments import require_int
from blockyard.config import cache_config
from blockyard.errors import ModelError
from blockyard.observe import PoolSnapshot, snapshot_pool

from .. import GenerationResult, SamplingParams, StepReport
from ..engine_options import require_model_path, require_step_budget
from .demo_report import DemoReport, as_json, as_text, demo_prompts

if TYPE_CHECKING:
    from .. import Engine

_MAX_REQUESTS = 10_000
_NOTE = "(SmolLM2-135M is a very small model: fluent, and often wrong. This is about its memory.)"


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo and print its report. Return 1 if a block leaked or a token differed, else 0."""
    require_int("--requests", options.requests, 1, _MAX_REQUESTS)
    require_int("--answers", options.answers, 0, _MAX_REQUESTS)
    sampling = SamplingParams(options.max_new_tokens, temperature=options.temperature, seed=options.seed)
    sizes = {name: getattr(options, name) for name in ("num_blocks", "block_size", "max_num_seqs")}
    cache_config(**sizes, max_model_len=1)
    require_step_budget(options.max_num_batched_tokens, options.max_num_seqs)
    if options.model:
        require_model_path(Path(options.model))
    started = time.perf_counter()
    path, model, tokenizer = _load(options)
    load_seconds = time.perf_counter() - started
    use_cache = not options.no_prefix_cache
    run = serve(options, sampling, model, tokenizer, use_cache)
    report = _report(options, run, path, load_seconds)
    if options.verify:
        other = serve(options, sampling, model, tokenizer, not use_cache)
        report.verified_same_tokens = other.token_ids == run.token_ids
        report.other_seconds = other.seconds
    print(as_json(report) if options.json else as_text(report, options.answers))
    return 0 if report.num_leaked_blocks == 0 and report.verified_same_tokens is not False else 1


def _load(options: argparse.Namespace) -> tuple[Path, Any, Any]:
    import torch

    from ..model import demo_model_path, load_model

    path = Path(options.model) if options.model else demo_model_path()
    status = "loading the model (a .gguf file is converted once, which takes a while)"
    with Console(file=sys.stderr).status(status):
        model, tokenizer = load_model(path, getattr(torch, options.dtype), options.device)
    if tokenizer is None:
        raise ModelError(f"{path} has no tokenizer; the demo needs one")
    return path, model, tokenizer


@dataclass(slots=True)
class DemoRun:
    """One run of all requests on a fresh engine, with statistics of its steps."""

    engine: Engine
    prompts: list[Any]
    results: list[GenerationResult] = field(default_factory=list)
    seconds: float = 0.0
    fullest: PoolSnapshot = field(default_factory=lambda: PoolSnapshot(""))
    max_running: int = 0
    slots_held: int = 0
    slots_wasted: int = 0

    @property
    def token_ids(self) -> list[list[int]]:
        """New tokens of every request."""
        return [result.token_ids for result in self.results]

    def watch(self, step: StepReport) -> None:
        """Update the statistics after a step."""
        cache = self.engine.cache
        stats = cache.stats()
        self.max_running = max(self.max_running, step.num_seqs)
        self.slots_held += stats.num_used_blocks * cache.config.block_size
        self.slots_wasted += stats.num_wasted_slots
        if stats.num_used_blocks > self.fullest.num_held:
            self.fullest = snapshot_pool(cache)


def serve(
    options: argparse.Namespace, sampling: SamplingParams, model: Any, tokenizer: Any, use_cache: bool
) -> DemoRun:
    """Answer all requests on a fresh engine. Raises `InvalidArgument` or `NeverFits` for sizes that cannot work."""
    from .. import Engine

    made = Engine(
        model,
        tokenizer,
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=use_cache,
    )
    run = DemoRun(made, demo_prompts(options.requests, tokenizer))
    started = time.perf_counter()
    run.results = made.generate(run.prompts, sampling, progress=True, on_step=run.watch)
    run.seconds = time.perf_counter() - started
    return run


def _report(options: argparse.Namespace, run: DemoRun, path: Path, load_seconds: float) -> DemoReport:
    cache, results = run.engine.cache, run.results
    stats = cache.stats()
    cache.check()
    return DemoReport(
        model=path.stem if path.suffix == ".gguf" else path.resolve().name,
        dtype=options.dtype,
        device=str(run.engine.kv_cache.device),
        prefix_cache=cache.config.enable_prefix_caching,
        results=results,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        max_model_len=run.engine.shape.max_model_len,
        bytes_per_block=run.engine.kv_cache.bytes_per_block,
        peak_used_blocks=stats.peak_used_blocks,
        max_running=run.max_running,
        wasted_share=run.slots_wasted / run.slots_held if run.slots_held else 0.0,
        load_seconds=load_seconds,
        seconds=run.seconds,
        fullest=run.fullest,
        at_end=snapshot_pool(cache),
        num_leaked_blocks=cache.num_used_blocks,
        leaking=cache.running(),
        note="" if options.model else _NOTE,
    )
