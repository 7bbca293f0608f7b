"""Options of `blockyard serve` and `blockyard fleet serve`."""

from __future__ import annotations

from typing import Any

from blockyard.cli import add_cache_field, add_command
from blockyard_engine.cli import (
    add_cache_options,
    add_device_options,
    add_model_options,
    add_rank_options,
    add_tenant_options,
)

_SERVE_DESCRIPTION = """\
Serve a language model to clients of OpenAI's API: models, completions and chat completions, whole or streamed.

It listens on loopback only unless --host is given. SIGTERM, Ctrl-C or closing the terminal shuts it down: new requests
are refused, and running ones may continue for --drain-seconds.
"""


_SERVE_EPILOG = """\
examples:
  blockyard serve                                       SmolLM2-135M-Instruct on http://127.0.0.1:8000
  blockyard serve --model ./my-llama --port 0           your own model, on any free port (it is printed)
  blockyard serve --tier file:/var/kv,bytes=50GiB       cached prompts survive a restart
  blockyard serve --tensor-parallel 2                   split the model over two processes or GPUs
  torchrun --nproc-per-node 2 -m blockyard serve        the same, with torchrun's processes
  blockyard serve --host 0.0.0.0 --api-key-env MY_KEY   for other machines, with a key
  blockyard serve --tenant acme,min=50%,key-env=ACME    guarantee half of the pool to that key's requests

paths: /v1/models  /v1/completions  /v1/chat/completions  /tokenize  /detokenize  /health  /ping  /version  /metrics
       /ui (page with the blocks)
"""


def add_serve_options(commands: Any) -> None:
    """Add the parser of `serve` to argparse's `commands`."""
    parser = add_command(
        commands, "serve", "serve a model to clients of OpenAI's API", _SERVE_DESCRIPTION, _SERVE_EPILOG
    )
    model = parser.add_argument_group("model")
    add_model_options(model)
    add_rank_options(model)
    add_cache_options(parser.add_argument_group("cache"), max_num_seqs=32)
    add_tenant_options(parser.add_argument_group("tenants"))
    _add_serve_address(parser.add_argument_group("server"))
    _add_serve_events(parser.add_argument_group("KV events"))
    _add_serve_limits(parser.add_argument_group("limits"))


def _add_serve_address(group: Any) -> None:
    _add_address(group)
    group.add_argument(
        "--ui",
        choices=("text", "map", "off"),
        help="page under /ui: text (with all clients' prompts), map (without prompts) or off; default: text on a "
        "loopback address, map otherwise",
    )
    group.add_argument(
        "--status-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds of work between two status lines on stderr; 0 for none; default: 10",
    )
    group.add_argument(
        "--tenant-metrics",
        type=int,
        default=0,
        metavar="N",
        help="show tokens and hits of the N largest tenants in /metrics (cache salts as digests); default: 0",
    )
    _add_traces(group)
    group.add_argument(
        "--check-endpoint", action="store_true", help="add GET /check, which verifies the cache's invariants; for tests"
    )


def _add_traces(group: Any) -> None:
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send spans of requests to this OTLP/HTTP collector, such as http://localhost:4318/v1/traces",
    )


def _add_address(group: Any) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1, only this machine"
    )
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on; 0 for any free one; default: 8000"
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="name of the model for clients; default: its folder's name"
    )
    key = group.add_mutually_exclusive_group()
    key.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable that holds the API key")
    key.add_argument("--api-key-file", metavar="FILE", help="file that holds the API key")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow web pages of this origin (http://localhost:3000; '*' for all) to use the server; repeatable",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept requests with this name in the header Host ('*' for all); repeatable; default: on loopback "
        "without a key only 127.0.0.1, localhost, [::1] and --host, otherwise all",
    )
    group.add_argument("--access-log", action="store_true", help="log every request on stderr")


_FLEET_SERVE_DESCRIPTION = """\
Serve a language model from several replicas of the engine behind one address, for clients of OpenAI's API.

Replicas are processes of Ray Serve on this machine. The router follows their KV events, and sends each request to the
replica that has most of its prompt cached, without overloading any. A replica that dies is replaced, and its answers
continue on another one. SIGTERM, Ctrl-C or closing the terminal shuts everything down.
"""


_FLEET_SERVE_EPILOG = """\
examples:
  blockyard fleet serve                                 two replicas of SmolLM2-135M-Instruct on http://127.0.0.1:8000
  blockyard fleet serve ./my-llama --replicas 3 --num-blocks 2000
  blockyard fleet serve --resumes 0                     answers of a lost replica end with an error

paths: /v1/models  /v1/completions  /v1/chat/completions  /tokenize  /detokenize  /health  /ping  /version  /metrics
       /fleet (replicas, claimed and true hits, routing decisions)  /ui (the same as a page)
"""


def add_fleet_serve_options(commands: Any) -> None:
    """Add the parser of `fleet serve` to argparse's `commands`."""
    parser = add_command(
        commands,
        "fleet serve",
        "serve a model from several replicas behind one address",
        _FLEET_SERVE_DESCRIPTION,
        _FLEET_SERVE_EPILOG,
    )
    model = parser.add_argument_group("model")
    model.add_argument("model", nargs="?", metavar="MODEL", help="folder or .gguf file, as for serve --model")
    add_device_options(model)
    add_cache_field(model, "max_model_len", "; default: the model's limit", says_default=True)
    _add_fleet(parser.add_argument_group("fleet"))
    add_cache_options(parser.add_argument_group("cache, of each replica"), max_num_seqs=32)
    add_tenant_options(parser.add_argument_group("tenants (sizes are per replica)"))
    server = parser.add_argument_group("server")
    _add_address(server)
    _add_traces(server)
    server.add_argument(
        "--check-endpoint",
        action="store_true",
        help="add GET /check, which compares the router's knowledge with the replicas; for tests",
    )
    _add_serve_limits(parser.add_argument_group("limits"))
    parser.set_defaults(tensor_parallel=None, context_parallel=None)


def _add_fleet(group: Any) -> None:
    group.add_argument("--replicas", type=int, default=2, metavar="N", help="number of engines; default: 2")
    group.add_argument("--max-replicas", type=int, metavar="N", help="maximum for scaling by load; default: --replicas")
    group.add_argument(
        "--token-load",
        type=float,
        default=0.8,
        metavar="X",
        help="target load: running requests, with answers at full length, fill this fraction of each pool; "
        "default: 0.8",
    )
    group.add_argument(
        "--idle-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds of less load after which a replica is stopped; default: 120",
    )
    group.add_argument(
        "--ingresses",
        type=int,
        default=0,
        metavar="N",
        help="number of ingress processes behind Ray's HTTP proxy; default: 0, this process is the ingress",
    )
    group.add_argument(
        "--prefill-replicas",
        type=int,
        default=0,
        metavar="N",
        help="number of replicas that prefill long prompts for the others, through a --tier; default: 0",
    )
    group.add_argument(
        "--prefill-tokens",
        type=int,
        default=512,
        metavar="N",
        help="uncached tokens from which a prompt counts as long; default: 512",
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="threads of each replica; default: cores divided by --replicas"
    )
    group.add_argument(
        "--cost", default="robust", metavar="NAME", help="routing cost, see docs/fleet.md; default: robust"
    )
    group.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=3.0,
        metavar="S",
        help="seconds without a heartbeat after which a replica's contents are not trusted; default: 3",
    )
    group.add_argument(
        "--progress-timeout",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds without a message about a request after which its replica counts as lost; default: 5",
    )
    group.add_argument(
        "--resumes",
        type=int,
        default=3,
        metavar="N",
        help="how often a request continues on another replica if its own is lost; 0 for never; default: 3",
    )


def _add_serve_events(group: Any) -> None:
    group.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish KV events in vLLM's format: tcp://127.0.0.1:5557 (replays use the next port)",
    )
    group.add_argument("--kv-events-topic", default="", metavar="TOPIC", help="topic, the first frame of every message")


def _add_serve_limits(group: Any) -> None:
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    seconds: dict[str, Any] = {"type": float, "metavar": "S"}
    group.add_argument("--max-body-bytes", default=2**20, help="size of a request body; default: 1 MiB", **number)
    group.add_argument("--max-waiting", default=128, help="completions that may wait; default: 128", **number)
    group.add_argument("--max-completions", default=64, help="completions of one request; default: 64", **number)
    group.add_argument("--max-tokens", help="new tokens of a completion; default: all that fit", **number)
    group.add_argument(
        "--default-max-tokens", help="new tokens of a chat without a limit; default: --max-tokens", **number
    )
    group.add_argument("--max-connections", default=512, help="open connections; default: 512", **number)
    group.add_argument(
        "--request-seconds", default=600.0, help="time until a response is complete; default: 600", **seconds
    )
    group.add_argument(
        "--header-seconds", default=15.0, help="time for a client to send headers; default: 15", **seconds
    )
    group.add_argument("--body-seconds", default=15.0, help="time for a client to send a body; default: 15", **seconds)
    group.add_argument(
        "--client-seconds", default=30.0, help="time for a client to receive what was sent; default: 30", **seconds
    )
    group.add_argument(
        "--drain-seconds", default=30.0, help="time for running requests at shutdown; default: 30", **seconds
    )
