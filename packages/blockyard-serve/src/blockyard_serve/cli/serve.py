"""`blockyard serve` is an OpenAI-compatible server over one engine."""

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
from .tenant_keys import key_in, say_who_is_refused, tenant_keys

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from blockyard_engine import Engine


def run_serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends it. Prints the address when clients can connect."""
    _require_ports_apart([(options.host, options.port)], options.kv_events)
    arguments = engine_arguments(options)
    api_key, keys = api_key_of(options), tenant_keys(options.tenant)
    has_key = KeyGuard(api_key, keys).has_key
    require_origins(options.cors_origin)
    require_hosts(options.allowed_host)
    require_status_seconds(options.status_seconds)
    require_int("tenant_metrics", options.tenant_metrics, 0, MAX_SHOWN)
    limits = ServerLimits(
        **{each.name: getattr(options, each.name) for each in fields(ServerLimits) if hasattr(options, each.name)}
    )
    endpoint = options.otlp_traces_endpoint
    tracer = None if endpoint is None else otlp_tracer(endpoint)
    follow_torchrun(options)
    with ExitStack() as held:
        sockets = [held.enter_context(each) for each in open_sockets(options.host, options.port)]
        _require_ports_apart([each.getsockname()[:2] for each in sockets], options.kv_events)
        if not has_key and not is_loopback(options.host):
            print(f"blockyard: {options.host} is open to other machines and there is no API key", file=sys.stderr)
        say_who_is_refused(api_key, keys)
        if not has_key and "*" in options.cors_origin:
            print("blockyard: every web page may use the server and there is no API key", file=sys.stderr)
        return _serve(options, arguments, limits, api_key, keys, sockets, tracer)


def _serve(
    options: argparse.Namespace,
    arguments: dict[str, Any],
    limits: ServerLimits,
    api_key: str | None,
    keys: dict[str, str],
    sockets: list[socket.socket],
    tracer: Tracer | None,
) -> int:
    engine, name = load_engine(options, arguments, says=True)
    from .. import Server, ServerOptions  # after the model's path was checked: it imports torch

    name = options.served_model_name or name
    print(f"blockyard: {name}, {_summary(engine)}\nblockyard: {engine.memory}", file=sys.stderr)
    events = engine.kv_events
    if events is not None:
        print(f"blockyard: KV events at {events.endpoint}, replays at {events.replay_endpoint}", file=sys.stderr)
    server = Server(
        engine,
        ServerOptions(
            model_name=name,
            host=options.host,
            port=options.port,
            api_key=api_key,
            tenant_keys=keys,
            limits=limits,
            access_log=options.access_log,
            has_check=options.check_endpoint,
            cors_origins=tuple(options.cors_origin),
            allowed_hosts=tuple(options.allowed_host),
            status_seconds=options.status_seconds,
            tenant_metrics=options.tenant_metrics,
            tracer=tracer,
            ui=_ui(options),
        ),
        on_listening=lambda address: _say_where(name, address, _ui(options)),
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
    """Raise `InvalidArgument` where KV events or their replays want the server's own port: the system lets all three be
    bound, and says no when the model has been loaded."""
    host, _, port = (endpoint or "").removeprefix("tcp://").rpartition(":")
    if not (endpoint or "").startswith("tcp://") or not (port.isascii() and port.isdecimal()) or len(port) > 5:
        return
    for own_host, own_port in addresses:
        is_same_host = host == own_host or {host, own_host} & {"*", "0.0.0.0", "localhost"}
        if is_same_host and own_port in (int(port), int(port) + 1):
            raise InvalidArgument(
                f"--kv-events is {endpoint}; that and the next port, for replays, must not be {own_port}, which is the "
                "server's"
            )


def _say_where(name: str, address: str, ui: str) -> None:
    with suppress(OSError):  # it is not read, or the disk is full: clients are served all the same
        print(f"blockyard serves {name} at {address}/v1", flush=True)
    if ui != "off":
        print(f"blockyard: watch its blocks at {address}/ui/", file=sys.stderr)


def _ui(options: argparse.Namespace) -> str:
    """Returns what the page shows: prompts of all clients only where just this machine can connect, unless told so."""
    asked: str | None = options.ui
    return asked or ("text" if is_loopback(options.host) else "map")


def _summary(engine: Engine) -> str:
    """Says where the model runs, who computes its attention, the pool, and the longest sequence that it holds."""
    cache, model_len, longest = engine.kv_cache, engine.shape.max_model_len, engine.max_model_len
    least = f" (the model's context is {model_len:,})" if longest < model_len else ""
    dtype = str(cache.dtype).removeprefix("torch.")
    return (
        f"{dtype} on {cache.device}, attention by {engine.attention_backend}; {cache.num_blocks:,} blocks of "
        f"{cache.block_size} tokens, {cache.num_bytes / 2**30:.2f} GiB; sequences of up to {longest:,} tokens{least}"
    )


def api_key_of(options: argparse.Namespace) -> str | None:
    """Returns the key from a place that is not seen in the list of processes."""
    if options.api_key_file is not None:
        return read_key_file(options.api_key_file)
    if options.api_key_env is None:
        return None
    return key_in("--api-key-env", options.api_key_env)
