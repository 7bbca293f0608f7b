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

It listens on this machine alone unless --host says otherwise. SIGTERM, Ctrl-C or a closed terminal stops it in order:
no new requests, running ones end within --drain-seconds.
"""


_SERVE_EPILOG = """\
examples:
  blockyard serve                                       SmolLM2-135M-Instruct on http://127.0.0.1:8000
  blockyard serve --model ./my-llama --port 0           your own model, on any free port (it is printed)
  blockyard serve --tier file:/var/kv,bytes=50GiB       what was computed is found again after a restart
  blockyard serve --tensor-parallel 2                   the model's heads and features over two processes
  torchrun --nproc-per-node 2 -m blockyard serve        the same, with torchrun's processes
  blockyard serve --host 0.0.0.0 --api-key-env MY_KEY   for other machines, with a key
  blockyard serve --tenant acme,min=50%,key-env=ACME    half of the pool is sure to requests with that key

paths: /v1/models  /v1/completions  /v1/chat/completions  /tokenize  /detokenize  /health  /ping  /version  /metrics
       /ui (a page that shows the blocks)
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
        help="the page under /ui: with the prompts of all clients, the map and figures alone, or no page; "
        "default: text on a loopback address, map elsewhere",
    )
    group.add_argument(
        "--status-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="of work between two lines on stderr that say how it goes; 0 for none; default: 10",
    )
    group.add_argument(
        "--tenant-metrics",
        type=int,
        default=0,
        metavar="N",
        help="show tokens and hits of the N largest tenants (cache salts, as digests) in /metrics; default: none",
    )
    _add_traces(group)
    group.add_argument(
        "--check-endpoint", action="store_true", help="GET /check verifies the cache's invariants; for tests"
    )


def _add_traces(group: Any) -> None:
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send spans of requests there by OTLP over HTTP, like http://localhost:4318/v1/traces; default: none",
    )


def _add_address(group: Any) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1, this machine alone"
    )
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0 for any free one; default: 8000")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model; default: its folder")
    key = group.add_mutually_exclusive_group()
    key.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable that holds the API key")
    key.add_argument("--api-key-file", metavar="FILE", help="file that holds the API key")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin (http://localhost:3000; '*' for all) use the server; may be repeated",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests for this name too, as a proxy sends it in the header Host ('*' for all); may be "
        "repeated; default: on loopback without a key 127.0.0.1, localhost, [::1] and --host alone, else all",
    )
    group.add_argument("--access-log", action="store_true", help="log a line for each request, on stderr")


_FLEET_SERVE_DESCRIPTION = """\
Serve a language model from several replicas of the engine behind one address, for clients of OpenAI's API.

Replicas are processes of Ray Serve on this machine. Each request goes where most of its prompt is cached already, as
the replicas' KV events say, and no replica is flooded. A replica that dies is replaced, and its answers go on elsewhere
behind the tokens that their clients have. SIGTERM, Ctrl-C or a closed terminal stops all in order.
"""


_FLEET_SERVE_EPILOG = """\
examples:
  blockyard fleet serve                                 two replicas of SmolLM2-135M-Instruct on http://127.0.0.1:8000
  blockyard fleet serve ./my-llama --replicas 3 --num-blocks 2000
  blockyard fleet serve --resumes 0                     a lost replica ends its answers with an error

paths: /v1/models  /v1/completions  /v1/chat/completions  /tokenize  /detokenize  /health  /ping  /version  /metrics
       /fleet (replicas, claims that came true, choices and why)  /ui (the same as a page)
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
    model.add_argument("model", nargs="?", metavar="MODEL", help="a folder or a .gguf file, as for serve --model")
    add_device_options(model)
    add_cache_field(model, "max_model_len", "; default: the model's limit", says_default=True)
    _add_fleet(parser.add_argument_group("fleet"))
    add_cache_options(parser.add_argument_group("cache, of each replica"), max_num_seqs=32)
    add_tenant_options(parser.add_argument_group("tenants, whose shares are of each replica's pool"))
    server = parser.add_argument_group("server")
    _add_address(server)
    _add_traces(server)
    server.add_argument(
        "--check-endpoint",
        action="store_true",
        help="GET /check compares the router's knowledge with what replicas hold; for tests",
    )
    _add_serve_limits(parser.add_argument_group("limits"))
    parser.set_defaults(tensor_parallel=None, context_parallel=None)


def _add_fleet(group: Any) -> None:
    group.add_argument("--replicas", type=int, default=2, metavar="N", help="engines; default: 2")
    group.add_argument("--max-replicas", type=int, metavar="N", help="up to which they grow with their load in tokens")
    group.add_argument(
        "--token-load",
        type=float,
        default=0.8,
        metavar="X",
        help="tokens of requests, answers at their longest, over those of the pool, that a replica is to have; "
        "default: 0.8",
    )
    group.add_argument(
        "--idle-seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="of less load, after which a replica is let go when its answers have ended; default: 120",
    )
    group.add_argument(
        "--ingresses",
        type=int,
        default=0,
        metavar="N",
        help="processes before the engines, behind Ray's HTTP proxy; default: 0, this process",
    )
    group.add_argument(
        "--prefill-replicas",
        type=int,
        default=0,
        metavar="N",
        help="of the engines, that compute long prompts for the others, who get them by a --tier; default: 0",
    )
    group.add_argument(
        "--prefill-tokens",
        type=int,
        default=512,
        metavar="N",
        help="that no other engine has, from which a prompt is long; default: 512",
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="of each replica; default: the machine's cores over the replicas"
    )
    group.add_argument("--cost", default="robust", metavar="NAME", help="how to choose; default: robust")
    group.add_argument(
        "--silence",
        type=float,
        default=3.0,
        metavar="S",
        help="without a heartbeat, after which what a replica holds is not believed; default: 3",
    )
    group.add_argument(
        "--stall",
        type=float,
        default=5.0,
        metavar="S",
        help="without a word about a request, after which its replica counts as lost; default: 5",
    )
    group.add_argument(
        "--resumes",
        type=int,
        default=3,
        metavar="N",
        help="how often a request whose replica is lost goes on elsewhere; 0 for never; default: 3",
    )


def _add_serve_events(group: Any) -> None:
    group.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish what the cache holds, as vLLM does: tcp://127.0.0.1:5557 (replays one port higher)",
    )
    group.add_argument("--kv-events-topic", default="", metavar="TOPIC", help="first frame of the messages")


def _add_serve_limits(group: Any) -> None:
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    seconds: dict[str, Any] = {"type": float, "metavar": "S"}
    group.add_argument("--max-body-bytes", default=2**20, help="of a request; default: 1 MiB", **number)
    group.add_argument("--max-waiting", default=128, help="completions in the queue; default: 128", **number)
    group.add_argument("--max-completions", default=64, help="of one request; default: 64", **number)
    group.add_argument("--max-tokens", help="new tokens of a completion; default: the room in the context", **number)
    group.add_argument("--default-max-tokens", help="of a chat that does not say; default: --max-tokens", **number)
    group.add_argument("--max-connections", default=512, help="open at once; default: 512", **number)
    group.add_argument("--request-seconds", default=600.0, help="until an answer is whole; default: 600", **seconds)
    group.add_argument("--header-seconds", default=15.0, help="until a client sent its headers; default: 15", **seconds)
    group.add_argument("--body-seconds", default=15.0, help="until it sent its body; default: 15", **seconds)
    group.add_argument("--client-seconds", default=30.0, help="until it took what was sent; default: 30", **seconds)
    group.add_argument("--drain-seconds", default=30.0, help="for running requests at a stop; default: 30", **seconds)
