"""These are the options of `blockyard serve`, apart from the work, so that --help needs no torch."""

from __future__ import annotations

import argparse
from typing import Any

from .model_options import add_cache_options, add_model_options, add_rank_options

_DESCRIPTION = """\
Serve a language model to clients of OpenAI's API: models, completions and chat completions, whole or streamed.

It listens on this machine alone unless --host says otherwise. SIGTERM, Ctrl-C or a closed terminal stops it in order:
no new requests, running ones end within --drain-seconds.
"""

_EPILOG = """\
examples:
  blockyard serve                                       SmolLM2-135M-Instruct on http://127.0.0.1:8000
  blockyard serve --model ./my-llama --port 0           your own model, on any free port (it is printed)
  blockyard serve --tensor-parallel 2                   the model's heads and features over two processes
  torchrun --nproc-per-node 2 -m blockyard serve        the same, with torchrun's processes
  blockyard serve --host 0.0.0.0 --api-key-env MY_KEY   for other machines, with a key

paths: /v1/models  /v1/completions  /v1/chat/completions  /tokenize  /detokenize  /health  /ping  /version  /metrics
       /ui (a page that shows the blocks)
"""


def add_serve_options(commands: Any) -> None:
    """Add the parser of `serve` to argparse's `commands`."""
    parser = commands.add_parser(
        "serve",
        help="serve a model to clients of OpenAI's API",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    add_model_options(model)
    add_rank_options(model)
    add_cache_options(parser.add_argument_group("cache"), max_num_seqs=32)
    _add_address(parser.add_argument_group("server"))
    _add_events(parser.add_argument_group("KV events"))
    _add_limits(parser.add_argument_group("limits"))


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
    group.add_argument(
        "--ui",
        choices=("text", "map", "off"),
        help="the page under /ui: with the prompts of all clients, the map and figures alone, or no page; "
        "default: text on a loopback address, map elsewhere",
    )
    group.add_argument("--access-log", action="store_true", help="log a line for each request, on stderr")
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
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send spans of requests there by OTLP over HTTP, like http://localhost:4318/v1/traces; default: none",
    )
    group.add_argument(
        "--check-endpoint", action="store_true", help="GET /check verifies the cache's invariants; for tests"
    )


def _add_events(group: Any) -> None:
    group.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish what the cache holds, as vLLM does: tcp://127.0.0.1:5557 (replays one port higher)",
    )
    group.add_argument("--kv-events-topic", default="", metavar="TOPIC", help="first frame of the messages")


def _add_limits(group: Any) -> None:
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
