"""These are the options of `blockyard plan`, apart from the work."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import POLICY_HELP
from .trace_options import add_format_options

_DESCRIPTION = """\
Plan the memory of an engine before it runs: from a model, GPUs and perhaps a trace, how many blocks fit, how many
requests of given lengths run at once, which hit rate to expect, which block size to take, and what one more GiB or a
CPU tier would bring. Everything that is assumed is said at the end, with its numbers.

Exit status: 0 if the model fits, 1 if it does not, 2 for what you can fix.
"""

_EPILOG = """\
examples:
  blockyard plan llama-3.1-8b                                        one H100
  blockyard plan llama-3.1-70b --gpus 8 --tensor-parallel 4          two replicas
  blockyard plan ./my-model --gpu-memory 24GiB --cache-dtype fp8     a folder with config.json and *.safetensors
  blockyard plan qwen3-8b --trace trace.jsonl --cpu-memory 64GiB     hit rates too
"""


def add_plan_options(commands: Any) -> None:
    """Add the parser of `plan` to argparse's `commands`."""
    parser = commands.add_parser(
        "plan",
        help="from a model, GPUs and a trace: blocks, concurrent requests, hit rate, what more memory brings",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's folder, its config.json, or a name of --list-models"
    )
    parser.add_argument("--list-models", action="store_true", help="print the names of known models, and end")
    _add_model(parser.add_argument_group("model"))
    _add_memory(parser.add_argument_group("memory"))
    _add_work(parser.add_argument_group("work"))
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE.html",
        help="the plan as a page; may be given often",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def _add_model(group: Any) -> None:
    group.add_argument(
        "--dtype",
        metavar="NAME",
        help="of the weights, and of the cache if it has 16 bits or more; default: the model's",
    )
    group.add_argument(
        "--cache-dtype", metavar="NAME", help="of keys and values, like fp8; default: --dtype's, or the model's"
    )
    group.add_argument(
        "--weights",
        metavar="SIZE",
        help="of the whole model, like 15GiB; default: the folder's *.safetensors, or the config's parameters times "
        "--dtype's bytes",
    )
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a block; default: 16")


def _add_memory(group: Any) -> None:
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs in all; default: one replica's")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--gpu", metavar="NAME", help="h100, a100-80gb, l4, rtx-4090, ...; default: h100")
    size.add_argument("--gpu-memory", metavar="SIZE", help="of each GPU, like 24GiB; default: what CUDA gives of --gpu")
    group.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share a model; default: 1"
    )
    group.add_argument(
        "--utilization", type=float, default=0.9, metavar="SHARE", help="of a GPU's memory, 0 to 1; default: 0.9"
    )
    group.add_argument(
        "--activations",
        metavar="SIZE",
        help="what a step takes on each GPU beside weights and blocks; default: from the model and the step",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens of a step; default: vLLM's, 8192 on a GPU of 70 GiB or more, else 2048",
    )
    group.add_argument(
        "--sampler",
        choices=("fused", "sorting"),
        default="fused",
        help="how the engine draws: sorting takes more memory (vLLM before 0.17); default: fused",
    )
    group.add_argument(
        "--cpu-memory", default="0GiB", metavar="SIZE", help="of a CPU tier, for all GPUs together; default: none"
    )


def _add_work(group: Any) -> None:
    group.add_argument(
        "--lengths",
        default="2k,8k,32k",
        metavar="LIST",
        help="tokens of a request, prompt and output; 2k is 2,000 and 2Ki 2,048; default: 2k,8k,32k",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="requests that run at once at most on a replica, and sequences that a step samples for; default: no "
        "limit, and vLLM's: 1024 on a GPU of 70 GiB or more, else 256",
    )
    group.add_argument(
        "--trace", metavar="TRACE", help="a trace file, or a generator such as chat:requests=1000,seed=1"
    )
    add_format_options(group)
    group.add_argument(
        "--running", type=int, metavar="N", help="requests at work on a replica; default: from the trace's arrivals"
    )
    group.add_argument(
        "--seconds-per-token",
        type=float,
        default=0.03,
        metavar="S",
        help="from one output token of a request to the next, for --running's default; default: 0.03",
    )
    group.add_argument(
        "--policy", default="lru", metavar="NAME", help=f"which block is evicted: {POLICY_HELP}; default: lru"
    )
