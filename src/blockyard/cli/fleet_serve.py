"""`blockyard fleet serve` is an OpenAI-compatible server over several engines, each in a process of its own."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from .. import engine
from ..arguments import require_int, require_number
from ..engine.memory.account import CPU_KV_BYTES
from ..engine.options import require_model_path
from ..errors import InvalidArgument, ModelError
from ..fleet.costs import make_cost
from ..serving import ServerLimits
from ..serving.http.access import is_loopback, require_hosts, require_origins
from ..serving.http.listening import open_sockets
from ..sizing import KVCacheSpec
from ..sizing.layers import dtype_bytes
from .model_loading import DEMO_NAME, engine_arguments
from .serve import api_key_of

MAX_REPLICAS = 64
MAX_RESUMES = 100
#: What was measured, in bytes: Ray without replicas and this process; a replica without weights and blocks.
BASE_BYTES, REPLICA_BYTES = 1100 * 2**20, 450 * 2**20


@dataclass(frozen=True, slots=True)
class FleetMemory:
    """Bytes that a fleet on CPUs takes. weights, pool: of each replica; buffers of swap and tiers count as pool."""

    num_replicas: int
    weights: int
    pool: int

    @property
    def total(self) -> int:
        """Add it all up."""
        return BASE_BYTES + self.num_replicas * (REPLICA_BYTES + self.weights + self.pool)

    def require_room(self, available: int | None) -> None:
        """Raise `InvalidArgument`, with the sum, where the machine has not that much. None: it does not say."""
        if available is not None and self.total > available:
            raise InvalidArgument(
                f"--replicas is {self.num_replicas}; each takes {_gib(REPLICA_BYTES)} GiB and {_gib(self.weights)} of "
                f"weights and {_gib(self.pool)} of keys and values, buffers included, Ray and this process "
                f"{_gib(BASE_BYTES)}: {_gib(self.total)} together, and the machine has {_gib(available)} left"
            )


def run_fleet_serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends it. Prints the address when clients can connect."""
    require_int("--replicas", options.replicas, 1, MAX_REPLICAS)
    make_cost(options.cost)
    for name in ("silence", "stall"):
        if not 0 < require_number(f"--{name}", getattr(options, name)) <= 3600:
            raise InvalidArgument(f"--{name} is {getattr(options, name)}; it must be above 0 and at most 3600 seconds")
    require_int("--resumes", options.resumes, 0, MAX_RESUMES)
    threads = max((os.cpu_count() or 1) // options.replicas, 1) if options.threads is None else options.threads
    require_int("--threads", threads, 1, 1024)
    if options.device == "cpu" and options.num_blocks is None and options.kv_cache_memory_bytes is None:
        options.kv_cache_memory_bytes = str(CPU_KV_BYTES)  # each would take it, and none sees the others
    arguments = engine_arguments(options)
    for use in arguments.get("tiers", ()):  # each replica opens its own
        use.tier.close()
    api_key = api_key_of(options)
    require_origins(options.cors_origin)
    require_hosts(options.allowed_host)
    limits = ServerLimits(
        **{each.name: getattr(options, each.name) for each in fields(ServerLimits) if hasattr(options, each.name)}
    )
    path = require_model_path(Path(options.model)) if options.model else engine.demo_model_path()
    with ExitStack() as held:
        sockets = [held.enter_context(each) for each in open_sockets(options.host, options.port)]
        if api_key is None and not is_loopback(options.host):
            print(f"blockyard: {options.host} is open to other machines and there is no API key", file=sys.stderr)
        return _serve(options, path, arguments, threads, limits, api_key, sockets)


def _serve(
    options: argparse.Namespace,
    path: Path,
    arguments: dict[str, Any],
    threads: int,
    limits: ServerLimits,
    api_key: str | None,
    sockets: list[Any],
) -> int:
    # What takes seconds to import is imported when all that can be told without it was told.
    from ..engine.memory.finding import available_bytes
    from ..engine.model import load_tokenizer, model_folder
    from ..serving.fleet.cluster import replicas_here
    from ..serving.fleet.replica import ReplicaPlan

    folder = model_folder(path)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ModelError(f"{path} has no tokenizer, and this command works with text")
    name = options.served_model_name or (path.resolve().name if options.model else DEMO_NAME)
    if options.device == "cpu":
        memory = memory_of(folder, options, arguments)
        memory.require_room(available_bytes())
        _say(f"{options.replicas} replicas of {threads} threads take up to {_gib(memory.total)} GiB, Ray included")
    capacity = options.replicas * options.max_num_seqs + limits.max_waiting
    asked = partial(engine_arguments, options)
    plan = ReplicaPlan(str(folder), name, options.dtype, options.device, threads, capacity, asked)
    with replicas_here(plan, options.replicas, options.cost, options.silence) as (handle, model):
        return _listen(options, name, limits, api_key, sockets, handle, model, tokenizer)


def _listen(
    options: argparse.Namespace,
    name: str,
    limits: ServerLimits,
    api_key: str | None,
    sockets: list[Any],
    handle: Any,
    model: Any,
    tokenizer: Any,
) -> int:
    from ..serving.fleet.app import Fleetwork, create_fleet_app
    from ..serving.fleet.dispatcher import Endurance
    from ..serving.http.server import AppServer, ServerOptions

    endurance = Endurance(options.resumes, options.stall)
    work = Fleetwork(handle, model, tokenizer, options.replicas, options.cost, options.silence, endurance)
    asked = ServerOptions(
        model_name=name,
        host=options.host,
        port=options.port,
        api_key=api_key,
        limits=limits,
        access_log=options.access_log,
        has_check=options.check_endpoint,
        cors_origins=tuple(options.cors_origin),
        allowed_hosts=tuple(options.allowed_host),
        ui="off",
    )

    def say_where(address: str) -> None:
        with suppress(OSError):  # it is not read, or the disk is full: clients are served all the same
            print(f"blockyard serves {name} from {options.replicas} replicas at {address}/v1", flush=True)
        _say(f"watch the fleet at {address}/ui/")

    server = AppServer(create_fleet_app(work, asked), asked, say_where)
    server.run(sockets)
    return 0 if server.started else 1


def memory_of(folder: Path, options: argparse.Namespace, arguments: dict[str, Any]) -> FleetMemory:
    """Returns what a fleet on CPUs will take. Raises what `KVCacheSpec.from_config` raises."""
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    spec = KVCacheSpec.from_config(folder, block_size=options.block_size, dtype=options.dtype)
    stored = dtype_bytes("dtype", spec.model_dtype) if spec.model_dtype else dtype_bytes("dtype", options.dtype)
    weights = sum(file.stat().st_size for file in files) * dtype_bytes("--dtype", options.dtype) // stored
    pool: int = arguments["kv_cache_memory_bytes"] or arguments["num_blocks"] * spec.bytes_per_block
    swap = arguments["swap_space_bytes"] or arguments["num_cpu_blocks"] * spec.bytes_per_block
    return FleetMemory(options.replicas, weights, pool + swap + arguments.get("tier_buffer_bytes", 0))


def _say(message: str) -> None:
    print(f"blockyard: {message}", file=sys.stderr)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
