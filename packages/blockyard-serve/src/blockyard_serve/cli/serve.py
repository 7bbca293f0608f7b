"""The command `blockyard serve`: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from blockyard.arguments import require_int
from blockyard.errors import InvalidArgument
from blockyard.metrics import MAX_SHOWN
from blockyard_engine.cli import engine_arguments, follow_torchrun, load_engine

from .. import ServerLimits
from ..http.access import KeyGuard, is_loopback, read_key_file, require_hosts, require_origins
from ..http.listening import open_sockets
from ..jobs.status_line import require_status_seconds
from ..otlp import otlp_tracer
from .tenant_keys import key_in, tenant_keys

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from blockyard_engine import Engine


def run_serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends it. Prints the address when clients can connect."""
    _require_ports_apart([(options.host, options.port)], options.kv_events)
    arguments, access = engine_arguments(options), server_arguments(options)
    require_status_seconds(options.status_seconds)
    require_int("tenant_metrics", options.tenant_metrics, 0, MAX_SHOWN)
    endpoint = options.otlp_traces_endpoint
    tracer = None if endpoint is None else otlp_tracer(endpoint)
    follow_torchrun(options)
    with ExitStack() as held:
        sockets = [held.enter_context(each) for each in open_sockets(options.host, options.port)]
        _require_ports_apart([each.getsockname()[:2] for each in sockets], options.kv_events)
        warn_about_access(access)
        return _serve(options, arguments, access, sockets, tracer)


def _serve(
    options: argparse.Namespace,
    arguments: dict[str, Any],
    access: dict[str, Any],
    sockets: list[socket.socket],
    tracer: Tracer | None,
) -> int:
    engine, name = load_engine(options, arguments, says=True)
    from .. import Server, ServerOptions  # imports torch, so only after the model's path is checked

    name = options.served_model_name or name
    print(f"blockyard: {name}, {_summary(engine)}\nblockyard: {engine.memory}", file=sys.stderr)
    events = engine.kv_events
    if events is not None:
        print(f"blockyard: KV events at {events.endpoint}, replays at {events.replay_endpoint}", file=sys.stderr)
    ui = options.ui or ("text" if is_loopback(options.host) else "map")
    server = Server(
        engine,
        ServerOptions(
            model_name=name,
            **access,
            status_seconds=options.status_seconds,
            tenant_metrics=options.tenant_metrics,
            tracer=tracer,
            ui=ui,
        ),
        on_listening=lambda address: _say_where(name, address, ui),
    )
    engine.on_rank_failure(server.stop)
    try:
        server.run(sockets)
    finally:
        lost = engine.rank_failure
        engine.close()
    if lost is not None:
        print(f"blockyard: the server has stopped: {lost}", file=sys.stderr)
    return 0 if server.started and lost is None else 1


def _require_ports_apart(addresses: list[tuple[str, int]], endpoint: str | None) -> None:
    """Raise `InvalidArgument` if KV events or their replays use the server's port.

    Otherwise the conflict would only be found after the model is loaded.
    """
    host, _, port = (endpoint or "").removeprefix("tcp://").rpartition(":")
    if not (endpoint or "").startswith("tcp://") or not (port.isascii() and port.isdecimal()) or len(port) > 5:
        return
    for own_host, own_port in addresses:
        is_same_host = host == own_host or {host, own_host} & {"*", "0.0.0.0", "localhost"}
        if is_same_host and own_port in (int(port), int(port) + 1):
            raise InvalidArgument(
                f"--kv-events is {endpoint}; neither this port nor the next one (for replays) may be the server's port "
                f"{own_port}"
            )


def _say_where(name: str, address: str, ui: str) -> None:
    with suppress(OSError):  # nothing reads stdout, or the disk is full: serve clients anyway
        print(f"blockyard serves {name} at {address}/v1", flush=True)
    if ui != "off":
        print(f"blockyard: page with its blocks at {address}/ui/", file=sys.stderr)


def _summary(engine: Engine) -> str:
    cache, model_len, longest = engine.kv_cache, engine.shape.max_model_len, engine.max_model_len
    least = f" (the model's context is {model_len:,})" if longest < model_len else ""
    dtype = str(cache.dtype).removeprefix("torch.")
    return (
        f"{dtype} on {cache.device}, attention by {engine.attention_backend}; {cache.num_blocks:,} blocks of "
        f"{cache.block_size} tokens, {cache.num_bytes / 2**30:.2f} GiB; sequences of up to {longest:,} tokens{least}"
    )


def server_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `ServerOptions` that every server has. Raises `InvalidArgument` for an invalid one."""
    if options.api_key_file is not None:  # keys on the command line would be visible in the list of processes
        api_key: str | None = read_key_file(options.api_key_file)
    else:
        api_key = None if options.api_key_env is None else key_in("--api-key-env", options.api_key_env)
    keys, limits = tenant_keys(options.tenant), [each.name for each in fields(ServerLimits)]
    KeyGuard(api_key, keys)
    require_origins(options.cors_origin)
    require_hosts(options.allowed_host)
    return {
        "host": options.host,
        "port": options.port,
        "api_key": api_key,
        "tenant_keys": keys,
        "limits": ServerLimits(**{name: getattr(options, name) for name in limits if hasattr(options, name)}),
        "access_log": options.access_log,
        "has_check": options.check_endpoint,
        "cors_origins": tuple(options.cors_origin),
        "allowed_hosts": tuple(options.allowed_host),
    }


def warn_about_access(access: dict[str, Any]) -> None:
    """Print a warning if everybody may use the server, or only tenants. `access` is from `server_arguments`."""
    host, keys, has_key = access["host"], access["tenant_keys"], access["api_key"] is not None
    if keys and not has_key:
        message = (
            f"the server has no key of its own (--api-key-env): only requests with the key of one of {len(keys)} "
            f"tenants are accepted, and /check and /ui are closed"
        )
        print(f"blockyard: {message}", file=sys.stderr)
    if not (has_key or keys or is_loopback(host)):
        print(f"blockyard: {host} is reachable from other machines and there is no API key", file=sys.stderr)
    if not (has_key or keys) and "*" in access["cors_origins"]:
        print("blockyard: every web page may use the server (--cors-origin) and there is no API key", file=sys.stderr)
