"""Makes an engine from command-line options, after checking all that can be checked before torch is imported."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from blockyard.amounts import parse_memory
from blockyard.arguments import require_int
from blockyard.config import COMMAND_OPTIONS
from blockyard.errors import InvalidArgument, ModelError
from blockyard.sizing import MAX_RANKS

from .. import PromptLookup
from ..decoding.speculation import MAX_DRAFT
from ..engine_options import EngineOptions, require_model_path
from .command_options import ENGINE_OPTIONS
from .tenant_options import tenant_factory

if TYPE_CHECKING:
    from .. import Engine
    from ..ranks.peers import TorchrunPeers

#: Name of the default model.
DEMO_NAME = "SmolLM2-135M-Instruct"
_MAX_DIGITS = 40


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's arguments from the options, by the names of `EngineOptions`.

    Raises `InvalidArgument` for values that are invalid for every model, and `MissingExtra` for --kv-events without
    pyzmq.
    """
    require_int("--speculate", options.speculate, 0, MAX_DRAFT)
    _num_ranks(options)
    cache_options = {name: getattr(options, name) for name in COMMAND_OPTIONS}
    cache_options["tenants"] = tenant_factory(getattr(options, "tenant", ()), getattr(options, "tenant_group", ()))
    arguments = {
        **{name: getattr(options, name) for name in ENGINE_OPTIONS},
        "enable_prefix_caching": not options.no_prefix_cache,
        "kv_cache_memory_bytes": _pool_bytes(options.kv_cache_memory_bytes),
        "swap_space_bytes": 0 if options.swap_space is None else parse_memory("--swap-space", options.swap_space),
        "cache_options": {name: value for name, value in cache_options.items() if value is not None},
        "kv_events": _kv_events(options),
        "speculation": PromptLookup(num_tokens=options.speculate) if options.speculate else None,
    }
    EngineOptions(**arguments).require_valid_without_a_model()
    return {**arguments, **_tiers(options)}


def _tiers(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's tiers, opened: a folder is scanned while the model loads."""
    if not options.tier:
        return {}
    from blockyard_tiers import open_tier_use

    buffer_bytes = parse_memory("--tier-buffer", options.tier_buffer)
    return {"tiers": [open_tier_use("--tier", text) for text in options.tier], "tier_buffer_bytes": buffer_bytes}


def _pool_bytes(text: str | None) -> int | None:
    """Return the bytes of a plain number, as in vLLM, or of an amount with a unit."""
    if text is None or (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None if text is None else int(text)
    return parse_memory("--kv-cache-memory-bytes", text)


def _kv_events(options: argparse.Namespace) -> dict[str, Any] | None:
    if getattr(options, "kv_events", None) is None:
        return None
    from blockyard.events import require_endpoint  # needs the extra `events`

    endpoint = require_endpoint("--kv-events", options.kv_events)
    return {"endpoint": endpoint, "topic": options.kv_events_topic}


def _num_ranks(options: argparse.Namespace) -> dict[str, int]:
    given = {name: getattr(options, name) for name in ("tensor_parallel", "context_parallel")}
    return {name: require_int(name, number, 1, MAX_RANKS) for name, number in given.items() if number is not None}


def follow_torchrun(options: argparse.Namespace) -> None:
    """Run as a rank other than 0 if torchrun started this process as one, and do not return."""
    if os.environ.get("RANK", "0") == "0":
        return
    import torch

    from ..model import load_model
    from ..ranks.follower import follow
    from ..ranks.peers import TorchrunRank

    rank = TorchrunRank.of(os.environ)
    if rank is None:
        return
    device = f"cuda:{rank.local_rank}" if options.device == "cuda" else options.device
    model, _ = load_model(_model_path(options), getattr(torch, options.dtype), device)
    follow(rank, model, options.block_size, options.max_model_len)


def _model_path(options: argparse.Namespace) -> Path:
    if options.model:
        return Path(options.model)
    from .. import demo_model_path

    return demo_model_path()


def _ranks(options: argparse.Namespace) -> dict[str, int | TorchrunPeers]:
    """Return the engine's rank arguments: torchrun's processes, tensor parallel by default, or numbers."""
    from ..ranks.peers import TorchrunPeers, TorchrunRank

    asked = _num_ranks(options)
    rank = TorchrunRank.of(os.environ)
    if rank is None:
        return {**asked}
    for name, number in asked.items():
        if number != rank.shard.size:
            option = name.replace("_", "-")
            raise InvalidArgument(f"--{option} is {number}; torchrun started {rank.shard.size} processes")
    return dict.fromkeys(asked or ["tensor_parallel"], TorchrunPeers(rank))


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"blockyard: {message}", file=sys.stderr)


def load_engine(options: argparse.Namespace, arguments: dict[str, Any], says: bool = False) -> tuple[Engine, str]:
    """Return the engine for the options, and the model's name. Raises `ModelError` and `InvalidArgument`.

    `arguments` are the `engine_arguments` of the same options. With `says`, a line for logs tells that loading has
    started; terminals show a spinner.
    """
    if options.model:
        require_model_path(Path(options.model))
    if says and not sys.stderr.isatty():
        _print_warning("loading the model")
    import torch

    from .. import Engine

    path = _model_path(options)
    waiting = Console(file=sys.stderr).status("loading the model (a .gguf file is converted once, which takes a while)")
    with waiting, warnings.catch_warnings():
        warnings.showwarning = _print_warning
        made = Engine.from_pretrained(
            path, dtype=getattr(torch, options.dtype), device=options.device, **arguments, **_ranks(options)
        )
    if made.tokenizer is None:
        raise ModelError(f"{path} has no tokenizer; this command needs one")
    return made, (path.resolve().name if options.model else DEMO_NAME)
