"""From the options of model and cache to an engine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..arguments import require_int
from ..engine import Engine, PromptLookup
from ..engine.decoding.speculation import MAX_DRAFT
from ..engine.model import demo_model_path, load_model
from ..engine.ranks.torchrun import TorchrunPeers, TorchrunRank
from ..errors import InvalidArgument, ModelError
from .amounts import parse_memory

_DEMO_NAME = "SmolLM2-135M-Instruct"
_CACHE_OPTIONS = (
    "eviction_policy",
    "watermark",
    "retention_blocks",
    "track_misses",
    "residency_sample",
    "history_size",
)


def follow_torchrun(options: argparse.Namespace) -> None:
    """Where torchrun started this process as another rank than 0, be it, and never return; else do nothing."""
    rank = TorchrunRank.of(os.environ)
    if rank is None or rank.shard.rank == 0:
        return
    device = f"cuda:{rank.local_rank}" if options.device == "cuda" else options.device
    model, _ = load_model(_model_path(options), getattr(torch, options.dtype), device)
    rank.follow(model, options.block_size, options.max_model_len)


def _model_path(options: argparse.Namespace) -> Path:
    return Path(options.model) if options.model else demo_model_path()


def _ranks(options: argparse.Namespace) -> dict[str, int | TorchrunPeers]:
    """Processes that torchrun started, or as many as are asked for: they share heads unless told to share tokens."""
    given = {name: getattr(options, name) for name in ("tensor_parallel", "context_parallel")}
    asked: dict[str, int] = {name: number for name, number in given.items() if number is not None}
    rank = TorchrunRank.of(os.environ)
    if rank is None:
        return {**asked}
    for name, number in asked.items():
        if number != rank.shard.size:
            option = name.replace("_", "-")
            raise InvalidArgument(f"--{option} is {number}; torchrun started {rank.shard.size} processes")
    return dict.fromkeys(asked or ["tensor_parallel"], TorchrunPeers(rank))


def engine_of(options: argparse.Namespace) -> tuple[Engine, str]:
    """The engine that the options ask for, and the model's name. Raises `ModelError` and `InvalidArgument`."""
    require_int("--speculate", options.speculate, 0, MAX_DRAFT)
    swap_space = 0 if options.swap_space is None else parse_memory("--swap-space", options.swap_space)
    path = _model_path(options)
    with Console(file=sys.stderr).status("loading the model (a .gguf file is converted once, which takes a while)"):
        engine = Engine.from_pretrained(
            path,
            dtype=getattr(torch, options.dtype),
            device=options.device,
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            enable_prefix_caching=not options.no_prefix_cache,
            gpu_memory_utilization=options.gpu_memory_utilization,
            num_cpu_blocks=options.num_cpu_blocks,
            swap_space_bytes=swap_space,
            preemption=options.preemption,
            attention_backend=options.attention_backend,
            cache_options=_cache_options(options),
            kv_events=_kv_events(options),
            speculation=PromptLookup(num_tokens=options.speculate) if options.speculate else None,
            **_ranks(options),
        )
    if engine.tokenizer is None:
        raise ModelError(f"{path} has no tokenizer, and this command works with text")
    return engine, (path.resolve().name if options.model else _DEMO_NAME)


def _kv_events(options: argparse.Namespace) -> dict[str, Any] | None:
    """Where they go, for the commands that publish them."""
    if getattr(options, "kv_events", None) is None:
        return None
    from ..events.sockets import require_endpoint  # needs the extra `events`

    endpoint = require_endpoint("--kv-events", options.kv_events)
    return {"endpoint": endpoint, "topic": options.kv_events_topic}


def _cache_options(options: argparse.Namespace) -> dict[str, Any]:
    """Those that were given."""
    given = {name: getattr(options, name) for name in _CACHE_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}
