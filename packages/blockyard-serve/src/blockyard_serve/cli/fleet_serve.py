"""The command `blockyard fleet serve`: an OpenAI-compatible server over several engines in separate processes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blockyard_engine as engine
from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument, ModelError
from blockyard.routing import make_cost
from blockyard.sizing import KVCacheSpec, dtype_bytes
from blockyard_engine import CPU_KV_BYTES
from blockyard_engine.cli import DEMO_NAME, engine_arguments
from blockyard_engine.engine_options import require_model_path

from ..http.listening import open_sockets
from ..otlp import otlp_tracer
from .serve import server_arguments, warn_about_access

if TYPE_CHECKING:
    from .. import ServerOptions

MAX_REPLICAS = 64
MAX_RESUMES = 100
#: Measured bytes: Ray without replicas, and this process; a replica without weights and blocks; a separate ingress.
BASE_BYTES, REPLICA_BYTES, INGRESS_BYTES = 1100 * 2**20, 450 * 2**20, 450 * 2**20


@dataclass(frozen=True, slots=True)
class FleetMemory:
    """Memory of a fleet on CPUs, in bytes.

    Attributes:
        num_ingresses: number of ingresses in separate processes.
        pool: KV cache of each replica, with the buffers of swapping and tiers.
    """

    num_replicas: int
    num_ingresses: int
    weights: int
    pool: int

    @property
    def total(self) -> int:
        """Memory of the whole fleet."""
        replicas = self.num_replicas * (REPLICA_BYTES + self.weights + self.pool)
        return BASE_BYTES + self.num_ingresses * INGRESS_BYTES + replicas

    def require_room(self, available: int | None) -> None:
        """Raise `InvalidArgument` if the fleet needs more than `available`; None means unknown."""
        if available is not None and self.total > available:
            raise InvalidArgument(
                f"--replicas is {self.num_replicas}; each takes {_gib(REPLICA_BYTES)} GiB, {_gib(self.weights)} of "
                f"weights and {_gib(self.pool)} of KV cache with buffers; Ray and ingresses take "
                f"{_gib(BASE_BYTES + self.num_ingresses * INGRESS_BYTES)}: {_gib(self.total)} in total, and the "
                f"machine has {_gib(available)} available"
            )


def run_fleet_serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends it. Prints the address when clients can connect."""
    _require(options)
    arguments = _engine_arguments(options)
    path = require_model_path(Path(options.model)) if options.model else engine.demo_model_path()
    with ExitStack() as held:
        sockets = [held.enter_context(each) for each in open_sockets(options.host, options.port)]
        from blockyard_engine import available_bytes

        access = server_arguments(options)
        warn_about_access(access)
        server_options = _server_options(options, access)
        threads = options.threads or max((os.cpu_count() or 1) // options.replicas, 1)
        setup = _setup(options, path, server_options, threads, is_local=True)
        if options.device == "cpu":
            memory = memory_of(setup.folder, options, arguments)
            memory.require_room(available_bytes())
            _say(f"{_most(options)} replicas of {threads} threads take up to {_gib(memory.total)} GiB, Ray included")
        if not options.ingresses:
            return _serve_here(setup, sockets)
        port = sockets[0].getsockname()[1]
    return _serve_behind_ray(setup, replace(setup.server_options, port=port), options.ingresses)


def cluster_setup(options: argparse.Namespace) -> FleetSetup:
    """Return the setup of a fleet on the nodes of a cluster. Raises like the command."""
    _require(options)
    _engine_arguments(options)
    path = require_model_path(Path(options.model)) if options.model else engine.demo_model_path()
    server_options = _server_options(options, server_arguments(options))
    return _setup(options, path, server_options, options.threads or os.cpu_count() or 1, is_local=False)


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """A fleet before it starts.

    Attributes:
        server_options: options of each ingress.
        size: number of engines (`FleetSize`).
        plan: arguments of a replica (`ReplicaPlan`).
        policy: how requests are routed and resumed (`RoutingPolicy`).
    """

    folder: Path
    server_options: ServerOptions
    size: Any
    plan: Any
    policy: Any
    tokenizer: Any

    def ingress_plan(self, server_options: ServerOptions) -> Any:
        """Return the arguments of an ingress in a separate process."""
        from ..fleet.app import IngressPlan

        return IngressPlan(str(self.folder), self.size.most, server_options, self.policy, self.plan.is_local)


def _require(options: argparse.Namespace) -> None:
    require_int("--replicas", options.replicas, 1, MAX_REPLICAS)
    require_int("--max-replicas", _most(options), options.replicas, MAX_REPLICAS)
    require_int("--ingresses", options.ingresses, 0, MAX_REPLICAS)
    make_cost(options.cost)
    for name in ("heartbeat-timeout", "progress-timeout", "idle-seconds"):
        if not 0 < require_number(f"--{name}", getattr(options, name.replace("-", "_"))) <= 3600:
            value = getattr(options, name.replace("-", "_"))
            raise InvalidArgument(f"--{name} is {value}; it must be above 0 and at most 3600 seconds")
    if not 0 < require_number("--token-load", options.token_load) <= 100:
        raise InvalidArgument(f"--token-load is {options.token_load}; it must be above 0 and at most 100")
    require_int("--resumes", options.resumes, 0, MAX_RESUMES)
    require_int("--prefill-replicas", options.prefill_replicas, 0, options.replicas - 1)
    require_int("--prefill-tokens", options.prefill_tokens, 1, 2**31)
    if options.prefill_replicas and _most(options) != options.replicas:
        raise InvalidArgument(
            f"--prefill-replicas is {options.prefill_replicas} and --max-replicas is {options.max_replicas}; a fleet "
            f"that grows cannot have prefilling replicas: leave out one of the two"
        )
    if options.threads is not None:
        require_int("--threads", options.threads, 1, 1024)
    server_arguments(options)
    if options.otlp_traces_endpoint is not None:
        otlp_tracer(options.otlp_traces_endpoint)  # only a check: each replica makes its own


def _most(options: argparse.Namespace) -> int:
    most: int = options.replicas if options.max_replicas is None else options.max_replicas
    return most


def _engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == "cpu" and options.num_blocks is None and options.kv_cache_memory_bytes is None:
        options.kv_cache_memory_bytes = str(CPU_KV_BYTES)  # replicas do not know each other's memory
    arguments = engine_arguments(options)
    uses = arguments.get("tiers", ())
    for use in uses:  # each replica opens them again
        use.tier.close()
    if options.prefill_replicas and all(use.write != "through" for use in uses):
        raise InvalidArgument(
            f"--prefill-replicas is {options.prefill_replicas}; they hand prompts over through a tier with "
            f"write=through: add one, for example --tier file:/dev/shm/kv,bytes=4GiB"
        )
    return arguments


def _server_options(options: argparse.Namespace, access: dict[str, Any]) -> ServerOptions:
    from .. import ServerOptions

    name = options.served_model_name or (Path(options.model).resolve().name if options.model else DEMO_NAME)
    return ServerOptions(model_name=name, **access, ui="off")


def _setup(
    options: argparse.Namespace, path: Path, server_options: ServerOptions, threads: int, *, is_local: bool
) -> FleetSetup:
    # Imported late: these take seconds, and errors that do not need them should come first.
    from blockyard_engine.model import load_tokenizer, model_folder

    from ..fleet.cluster import FleetSize
    from ..fleet.dispatcher import RoutingPolicy
    from ..fleet.replica import ReplicaPlan

    folder = model_folder(path)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ModelError(f"{path} has no tokenizer; this command needs one")
    size = FleetSize(options.replicas, _most(options), options.token_load, options.idle_seconds)
    capacity = size.most * options.max_num_seqs + server_options.limits.max_waiting
    arguments = partial(engine_arguments, options)
    sizes = (threads, capacity, is_local, arguments, options.otlp_traces_endpoint)
    plan = ReplicaPlan(
        str(folder), server_options.model_name, options.dtype, options.device, *sizes, options.prefill_replicas
    )
    times = (options.heartbeat_timeout, options.resumes, options.progress_timeout)
    policy = RoutingPolicy(options.cost, *times, options.prefill_tokens)
    return FleetSetup(folder, server_options, size, plan, policy, tokenizer)


def _serve_here(setup: FleetSetup, sockets: list[Any]) -> int:
    from ..fleet.app import FleetBackend, IngressApp
    from ..fleet.cluster import local_engines
    from ..http.server import AppServer

    server_options, size = setup.server_options, setup.size
    drain_seconds = server_options.limits.request_seconds
    with local_engines(setup.plan, size, setup.policy, drain_seconds) as (handle, model):
        work = FleetBackend(handle, model, setup.tokenizer, size.most, setup.policy)
        server = AppServer(IngressApp(work, server_options).app, server_options, partial(_say_where, setup, ""))
        server.run(sockets)
        return 0 if server.started else 1


def _serve_behind_ray(setup: FleetSetup, server_options: ServerOptions, num_ingresses: int) -> int:
    from ..fleet.cluster import local_fleet

    with local_fleet(setup.plan, setup.size, setup.ingress_plan(server_options), num_ingresses):
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: ended.set())
        host = f"[{server_options.host}]" if ":" in server_options.host else server_options.host
        _say_where(setup, f" through {num_ingresses} ingresses", f"http://{host}:{server_options.port}")
        while not ended.wait(1):
            pass
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends the process at once
    return 0


def _say_where(setup: FleetSetup, through: str, address: str) -> None:
    size, name = setup.size, setup.server_options.model_name
    number = f"{size.least}" if size.most == size.least else f"{size.least} to {size.most}"
    with suppress(OSError):  # nothing reads stdout, or the disk is full: serve clients anyway
        print(f"blockyard serves {name} from {number} replicas{through} at {address}/v1", flush=True)
    _say(f"watch the fleet at {address}/ui/")


def memory_of(folder: Path, options: argparse.Namespace, arguments: dict[str, Any]) -> FleetMemory:
    """Return the memory of a fleet on CPUs. Raises like `KVCacheSpec.from_config`."""
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    spec = KVCacheSpec.from_config(folder, block_size=options.block_size, dtype=options.dtype)
    stored = dtype_bytes("dtype", spec.model_dtype) if spec.model_dtype else dtype_bytes("dtype", options.dtype)
    weights = sum(file.stat().st_size for file in files) * dtype_bytes("--dtype", options.dtype) // stored
    pool: int = arguments["kv_cache_memory_bytes"] or arguments["num_blocks"] * spec.bytes_per_block
    swap = arguments["swap_space_bytes"] or arguments["num_cpu_blocks"] * spec.bytes_per_block
    return FleetMemory(_most(options), options.ingresses, weights, pool + swap + arguments.get("tier_buffer_bytes", 0))


def _say(message: str) -> None:
    print(f"blockyard: {message}", file=sys.stderr)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
