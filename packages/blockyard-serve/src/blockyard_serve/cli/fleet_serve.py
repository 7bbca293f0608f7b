"""`blockyard fleet serve` is an OpenAI-compatible server over several engines, each in a process of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
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

from .. import ServerLimits
from ..http.access import KeyGuard, is_loopback, require_hosts, require_origins
from ..http.listening import open_sockets
from ..otlp import otlp_tracer
from .serve import api_key_of
from .tenant_keys import say_who_is_refused, tenant_keys

if TYPE_CHECKING:
    from .. import ServerOptions

MAX_REPLICAS = 64
MAX_RESUMES = 100
#: What was measured, in bytes: Ray without replicas and this process; a replica without weights and blocks; an ingress
#: of its own.
BASE_BYTES, REPLICA_BYTES, INGRESS_BYTES = 1100 * 2**20, 450 * 2**20, 450 * 2**20


@dataclass(frozen=True, slots=True)
class FleetMemory:
    """Bytes that a fleet on CPUs takes. weights, pool: of each replica; buffers of swap and tiers count as pool."""

    num_replicas: int
    num_ingresses: int
    weights: int
    pool: int

    @property
    def total(self) -> int:
        """Add it all up."""
        replicas = self.num_replicas * (REPLICA_BYTES + self.weights + self.pool)
        return BASE_BYTES + self.num_ingresses * INGRESS_BYTES + replicas

    def require_room(self, available: int | None) -> None:
        """Raise `InvalidArgument`, with the sum, where the machine has not that much. None: it does not say."""
        if available is not None and self.total > available:
            raise InvalidArgument(
                f"--replicas is {self.num_replicas}; each takes {_gib(REPLICA_BYTES)} GiB and {_gib(self.weights)} of "
                f"weights and {_gib(self.pool)} of keys and values, buffers included, Ray and ingresses "
                f"{_gib(BASE_BYTES + self.num_ingresses * INGRESS_BYTES)}: {_gib(self.total)} together, and the "
                f"machine has {_gib(available)} left"
            )


def run_fleet_serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends it. Prints the address when clients can connect."""
    _require(options)
    arguments = _engine_arguments(options)
    path = require_model_path(Path(options.model)) if options.model else engine.demo_model_path()
    with ExitStack() as held:
        sockets = [held.enter_context(each) for each in open_sockets(options.host, options.port)]
        from blockyard_engine import available_bytes

        asked = _server_options(options)
        if not asked.has_key and not is_loopback(options.host):
            print(f"blockyard: {options.host} is open to other machines and there is no API key", file=sys.stderr)
        say_who_is_refused(asked.api_key, asked.tenant_keys)
        threads = options.threads or max((os.cpu_count() or 1) // options.replicas, 1)
        setup = _setup(options, path, asked, threads, is_local=True)
        if options.device == "cpu":
            memory = memory_of(setup.folder, options, arguments)
            memory.require_room(available_bytes())
            _say(f"{_most(options)} replicas of {threads} threads take up to {_gib(memory.total)} GiB, Ray included")
        if not options.ingresses:
            return _serve_here(setup, sockets)
        port = sockets[0].getsockname()[1]
    return _serve_behind_ray(setup, replace(setup.asked, port=port), options.ingresses)


def cluster_setup(options: argparse.Namespace) -> Setup:
    """Returns what a fleet on the nodes of a cluster is made of. Raises what the command raises."""
    _require(options)
    _engine_arguments(options)
    path = require_model_path(Path(options.model)) if options.model else engine.demo_model_path()
    return _setup(options, path, _server_options(options), options.threads or os.cpu_count() or 1, is_local=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """This is a fleet before it starts. size, plan: `FleetSize` and `ReplicaPlan`. tokenizer: of the model's folder."""

    folder: Path
    asked: ServerOptions
    size: Any
    plan: Any
    cost: str
    silence: float
    endurance: Any
    tokenizer: Any

    def front(self, asked: ServerOptions) -> Any:
        """Return what an ingress in a replica of Ray Serve is made of."""
        from ..fleet.app import IngressPlan

        more = (self.cost, self.silence, self.endurance, self.plan.is_local)
        return IngressPlan(str(self.folder), self.size.most, asked, *more)


def _require(options: argparse.Namespace) -> None:
    """Raise `InvalidArgument` for numbers outside their limits."""
    require_int("--replicas", options.replicas, 1, MAX_REPLICAS)
    require_int("--max-replicas", _most(options), options.replicas, MAX_REPLICAS)
    require_int("--ingresses", options.ingresses, 0, MAX_REPLICAS)
    make_cost(options.cost)
    for name in ("silence", "stall", "idle-seconds"):
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
            f"--prefill-replicas is {options.prefill_replicas} and --max-replicas {options.max_replicas}; a fleet that "
            f"grows has none of these"
        )
    if options.threads is not None:
        require_int("--threads", options.threads, 1, 1024)
    require_origins(options.cors_origin)
    require_hosts(options.allowed_host)
    KeyGuard(api_key_of(options), tenant_keys(options.tenant))
    _limits(options)
    if options.otlp_traces_endpoint is not None:
        otlp_tracer(options.otlp_traces_endpoint)  # each replica makes its own


def _limits(options: argparse.Namespace) -> ServerLimits:
    names = [each.name for each in fields(ServerLimits) if hasattr(options, each.name)]
    return ServerLimits(**{name: getattr(options, name) for name in names})


def _most(options: argparse.Namespace) -> int:
    most: int = options.replicas if options.max_replicas is None else options.max_replicas
    return most


def _engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    if options.device == "cpu" and options.num_blocks is None and options.kv_cache_memory_bytes is None:
        options.kv_cache_memory_bytes = str(CPU_KV_BYTES)  # each would take it, and none sees the others
    arguments = engine_arguments(options)
    uses = arguments.get("tiers", ())
    for use in uses:  # each replica opens its own
        use.tier.close()
    if options.prefill_replicas and all(use.write != "through" for use in uses):
        raise InvalidArgument(
            f"--prefill-replicas is {options.prefill_replicas}; prompts go to the other engines by a tier that is "
            f"written through: --tier file:/dev/shm/kv,bytes=4GiB, say"
        )
    return arguments


def _server_options(options: argparse.Namespace) -> ServerOptions:
    from .. import ServerOptions

    name = options.served_model_name or (Path(options.model).resolve().name if options.model else DEMO_NAME)
    return ServerOptions(
        model_name=name,
        host=options.host,
        port=options.port,
        api_key=api_key_of(options),
        tenant_keys=tenant_keys(options.tenant),
        limits=_limits(options),
        access_log=options.access_log,
        has_check=options.check_endpoint,
        cors_origins=tuple(options.cors_origin),
        allowed_hosts=tuple(options.allowed_host),
        ui="off",
    )


def _setup(options: argparse.Namespace, path: Path, asked: ServerOptions, threads: int, *, is_local: bool) -> Setup:
    """Returns what is needed to start a fleet. Raises `ModelError` for a model without a tokenizer."""
    # What takes seconds to import is imported when all that can be told without it was told.
    from blockyard_engine.model import load_tokenizer, model_folder

    from ..fleet.cluster import FleetSize
    from ..fleet.dispatcher import Endurance
    from ..fleet.replica import ReplicaPlan

    folder = model_folder(path)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ModelError(f"{path} has no tokenizer, and this command works with text")
    size = FleetSize(options.replicas, _most(options), options.token_load, options.idle_seconds)
    capacity = size.most * options.max_num_seqs + asked.limits.max_waiting
    arguments = partial(engine_arguments, options)
    sizes = (threads, capacity, is_local, arguments, options.otlp_traces_endpoint)
    plan = ReplicaPlan(str(folder), asked.model_name, options.dtype, options.device, *sizes, options.prefill_replicas)
    endurance = Endurance(options.resumes, options.stall, options.prefill_tokens)
    return Setup(folder, asked, size, plan, options.cost, options.silence, endurance, tokenizer)


def _serve_here(setup: Setup, sockets: list[Any]) -> int:
    """Serve from this process."""
    from ..fleet.app import Fleetwork, Front
    from ..fleet.cluster import engines_here
    from ..http.server import AppServer

    asked, size = setup.asked, setup.size
    drain_seconds = asked.limits.request_seconds
    with engines_here(setup.plan, size, setup.cost, setup.silence, drain_seconds) as (handle, model):
        work = Fleetwork(handle, model, setup.tokenizer, size.most, setup.cost, setup.silence, setup.endurance)
        server = AppServer(Front(work, asked).app, asked, partial(_say_where, setup, ""))
        server.run(sockets)
        return 0 if server.started else 1


def _serve_behind_ray(setup: Setup, asked: ServerOptions, num_ingresses: int) -> int:
    """Serve from ingresses that are processes of their own."""
    from ..fleet.cluster import fleet_here

    with fleet_here(setup.plan, setup.size, setup.front(asked), num_ingresses):
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: ended.set())
        host = f"[{asked.host}]" if ":" in asked.host else asked.host
        _say_where(setup, f" through {num_ingresses} ingresses", f"http://{host}:{asked.port}")
        while not ended.wait(1):
            pass
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait
    return 0


def _say_where(setup: Setup, through: str, address: str) -> None:
    size, name = setup.size, setup.asked.model_name
    number = f"{size.least}" if size.most == size.least else f"{size.least} to {size.most}"
    with suppress(OSError):  # it is not read, or the disk is full: clients are served all the same
        print(f"blockyard serves {name} from {number} replicas{through} at {address}/v1", flush=True)
    _say(f"watch the fleet at {address}/ui/")


def memory_of(folder: Path, options: argparse.Namespace, arguments: dict[str, Any]) -> FleetMemory:
    """Returns what a fleet on CPUs will take. Raises what `KVCacheSpec.from_config` raises."""
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
