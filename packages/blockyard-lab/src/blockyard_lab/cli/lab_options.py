"""Options of the lab's commands (`replay`, `curve`, `plan`, `fleet`), and helpers that evaluate shared ones."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from blockyard.arguments import require_int
from blockyard.cli import add_cache_field, add_command
from blockyard.config import POLICY_HELP
from blockyard.errors import InvalidArgument

from .. import Trace
from ..sweep import MAX_JOBS, require_backend

_TRACE_HELP = (
    "a file (Mooncake or Qwen-Bailian JSONL, Azure or BurstGPT CSV, JSONL of token ids or text; .gz and .zst too), or "
    "a generator such as chat:requests=10000,seed=1; default: the small trace that ships with the package"
)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the trace argument and the options for reading it."""
    parser.add_argument("trace", nargs="?", default="small", metavar="TRACE", help=_TRACE_HELP)
    _add_reading(parser.add_argument_group("reading"))


def _add_reading(group: Any) -> None:
    add_format_options(group)
    group.add_argument("--max-requests", type=int, metavar="N", help="read N requests at most")
    group.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first bad line or request that never fits; default: count it",
    )


def add_format_options(group: Any) -> None:
    """Add the options for a trace file's format."""
    group.add_argument(
        "--format", default="auto", metavar="NAME", help="the trace's format; default: by its first line"
    )
    group.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer for a trace of text")


def add_running_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for parallel runs."""
    group = parser.add_argument_group("running")
    group.add_argument("--jobs", type=int, metavar="N", help="number of processes; default: one per core")
    group.add_argument(
        "--backend", default="processes", metavar="NAME", help="processes, ray or dask (joblib's); default: processes"
    )
    group.add_argument("--quiet", action="store_true", help="draw no progress bar")


def _add_files(parser: argparse.ArgumentParser, metavar: str, line: str) -> None:
    parser.add_argument("-o", "--output", action="append", default=[], metavar=metavar, help=f"{line}; may be repeated")


def add_output_options(parser: argparse.ArgumentParser, line: str) -> None:
    """Add --json and --csv. `line` names the content of a CSV line."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    output.add_argument("--csv", action="store_true", help=f"print a line for each {line}")


def open_chosen_trace(options: argparse.Namespace, name: str | None = None) -> Trace:
    """Open the trace that the options name, or the trace `name` with the same options."""
    from ..traces import open_trace

    return open_trace(
        options.trace if name is None else name,
        format=options.format,
        strict=options.strict,
        tokenizer=options.tokenizer,
        max_requests=options.max_requests,
    )


def chosen_jobs(options: argparse.Namespace, num_cells: int) -> int:
    """Return the number of processes: as requested, or one per core, but at most one per cell."""
    require_backend(options.backend)
    wanted = len(os.sched_getaffinity(0)) if options.jobs is None else require_int("--jobs", options.jobs, 1, MAX_JOBS)
    return max(1, min(wanted, num_cells))


def require_tier(options: argparse.Namespace) -> None:
    """Raise `InvalidArgument` for a tier option without --tier."""
    if options.seconds_per_prompt_token is not None and not options.tier:
        raise InvalidArgument("--seconds-per-prompt-token was given without --tier")


def short_name(trace: Trace) -> str:
    """Return the trace's name without folders."""
    return Path(trace.name).name


def report_skips(trace: Trace) -> None:
    """Print on stderr the lines that the latest walk skipped or corrected."""
    for cause, (count, first) in trace.skips.causes.items():
        print(f"blockyard: {count} x {cause} (first: {first})", file=sys.stderr)


def skips_as_dict(trace: Trace) -> dict[str, Any]:
    """Return the lines that the latest walk skipped or corrected, for JSON."""
    return {cause: {"count": count, "first": first} for cause, (count, first) in trace.skips.causes.items()}


_REPLAY_DESCRIPTION = """\
Send a trace through the real block manager, for every policy and pool size, and report hits, causes of misses,
evictions and the use of the pool. A second table shows the same memory without paging, one piece reserved for each
request: how much of it stays empty, and how many requests run at once.

Requests run one after another. With --timed they arrive by their timestamps, run together, hold their blocks, wait
for admission, and are preempted if blocks run short.
"""

_REPLAY_EPILOG = """\
examples:
  blockyard replay                                              the small trace, four sizes, LRU
  blockyard replay trace.jsonl --blocks 10k,100k,25%            sizes as numbers, or percent of the working set
  blockyard replay trace.jsonl --policies lru,arc,mine.py:Mine  your own policy compared with others
  blockyard replay trace.jsonl --timed --blocks 30k             by the trace's timestamps
  blockyard replay trace.jsonl --max-model-len 32768            paging against 32,768 tokens reserved a request
  blockyard replay trace.jsonl --timed -o run.html --blocks 30k requests, blocks and hits over time, as a page
  blockyard replay trace.jsonl --blocks 30k --num-cpu-blocks 90k  evicted blocks kept in the CPU's memory
  blockyard replay trace.jsonl --kv-bytes 128KiB --tier 50GiB/1TiB   how many GiB of files for which hit rate
  blockyard replay trace.jsonl --csv > runs.csv                 for a spreadsheet
"""


def add_replay_options(commands: Any) -> None:
    """Add the parser of `replay` to argparse's `commands`."""
    parser = add_command(
        commands,
        "replay",
        "send a trace through the block manager: hit rates, causes of misses, evictions, preemptions",
        _REPLAY_DESCRIPTION,
        _REPLAY_EPILOG,
    )
    add_trace_options(parser)
    _add_replay_cache(parser.add_argument_group("cache"))
    _add_replay_time(parser.add_argument_group("time"))
    loops = parser.add_argument_group("closed loops")
    _add_loops(loops, "turns per hour, hits, latency, waiting", "; with --timed, requests arrive by their timestamps")
    loops.add_argument(
        "--beside", action="append", default=[], metavar="N:TRACE", help="N sessions of another trace at the same time"
    )
    add_running_options(parser)
    _add_files(parser, "FILE.html", "with --timed: a page of requests, blocks and hits over time")
    add_output_options(parser, "run")


def _add_replay_cache(group: Any) -> None:
    group.add_argument(
        "--policies",
        "--policy",
        default="lru",
        metavar="LIST",
        help=f"names of {POLICY_HELP}, or file.py:ClassName for your own; default: lru",
    )
    group.add_argument(
        "--blocks",
        default="10%,25%,50%,100%",
        metavar="LIST",
        help="pool sizes, like 10k,100k,25%%; percent of the trace's distinct blocks; default: 10%%,25%%,50%%,100%%",
    )
    add_cache_field(group, "block_size", "; default: 16, with --closed 512", says_default=True, default=None)
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of the longest request that the model serves, which an engine without paging reserves for each "
        "request; default: the trace's longest request, rounded up to a power of two",
    )
    add_cache_field(group, "num_cpu_blocks", " that keeps evicted blocks for later hits", default=0)
    add_cache_field(group, "watermark", "; default: 0, with --closed 0.01", says_default=True, default=None)
    _add_tiers(group, "; needs --kv-bytes")
    _add_kv_bytes(group)
    group.add_argument("--no-causes", action="store_true", help="do not look for the causes of misses; a little faster")


def _add_tiers(group: Any, note: str) -> None:
    group.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="SIZES",
        help="a tier below the pool, like 50GiB/200GiB,write=selective,policy=lru,speed=2GB,start=0.001; each size is "
        f"tried, auto tries five, at which LRU finds part of the pool's misses; may be repeated, nearest first{note}",
    )


def _add_seconds_per_prompt_token(group: Any) -> None:
    group.add_argument("--seconds-per-prompt-token", type=float, metavar="S", help="with --tier; default: 5e-05")


def _add_kv_bytes(group: Any) -> None:
    group.add_argument(
        "--kv-bytes", metavar="SIZE", help="bytes of a token's keys and values in all layers, like 128KiB"
    )


def _add_replay_time(group: Any) -> None:
    group.add_argument("--timed", action="store_true", help="replay by timestamps, under a model of an engine's steps")
    _add_device(group)
    _add_constant(group, "prompt-token", "a prompt token computed")
    add_cache_field(group, "max_num_seqs", "; default: 256, with --closed 64", says_default=True, default=None)
    group.add_argument(
        "--speedup", type=float, default=1.0, metavar="X", help="arrivals come X times faster; default: 1"
    )


def _add_device(group: Any) -> None:
    """Add the constants of a `ServiceModel`, and names of devices."""
    group.add_argument(
        "--device",
        choices=("default", "8b", "70b"),
        default="default",
        help="constants of a step; 8b: Llama 8B in bf16 on one H100; 70b: Llama 70B in fp8 on four; both computed from "
        "FLOPs and bandwidths, not measured; default: an 8B model, roughly",
    )
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, metavar="N", help="tokens of a step; default: 8192"
    )
    for name, what in (
        ("step", "every step"),
        ("decode", "a sequence that decodes"),
        ("context-token", "a token that a decode attends to"),
        ("attention", "a prompt token computed and a token that it attends to"),
        ("moved-block", "a block moved between the pool and the CPU pool"),
    ):
        _add_constant(group, name, what)


def _add_constant(group: Any, name: str, what: str) -> None:
    group.add_argument(f"--seconds-per-{name}", type=float, metavar="S", help=f"{what}; default: that of --device")


def _add_loops(group: Any, what: str, admission: str = "") -> None:
    group.add_argument(
        "--closed",
        action="store_true",
        help=f"a session's next turn comes its pause after the answer, on a simulated engine: {what}",
    )
    group.add_argument(
        "--admission",
        metavar="LIST",
        help=f"orders of admission, like arrival,fewest,room:4{admission}; default: arrival",
    )
    group.add_argument("--sessions", default="16", metavar="LIST", help="sessions at once, like 5,10,20; default: 16")
    group.add_argument(
        "--max-pause", type=float, default=600.0, metavar="S", help="longer pauses are cut; default: 600"
    )
    group.add_argument("--hours", type=float, default=3.0, metavar="H", help="simulated hours measured; default: 3")
    group.add_argument("--warm-up", type=float, default=1.0, metavar="H", help="simulated hours before; default: 1")
    group.add_argument("--runs", type=int, default=1, metavar="N", help="seeds, each from --seed on; default: 1")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run; default: 0")


_CURVE_DESCRIPTION = """\
Draw the hit rate of a trace against the capacity of the cache, for many policies and for the offline optimum, which no
policy can beat, from a thousandth of the working set to all of it. Mark the knee, beyond which more blocks add few
hits.

Requests run one after another through a cache of the trace's own blocks (512 tokens in a Mooncake trace), with the
manager's policies. The hit rate is a fraction of the block references. A trace of more than 8 million references is
sampled, and the standard error is printed.
"""

_CURVE_EPILOG = """\
examples:
  blockyard curve                                           the small trace
  blockyard curve trace.jsonl -o curve.html -o curve.png    a page with hover, and a picture
  blockyard curve trace.jsonl --model llama-3.1-8b          sizes in GiB too
  blockyard curve mon.jsonl --beside tue.jsonl --policies lru,optimum -o days.html   two traces in one picture
  blockyard curve trace.jsonl --policies lru,mine.py:Mine,optimum --blocks 1k,3k,10k,30k
  blockyard curve trace.jsonl --kv-bytes 128KiB --blocks 10k --tier auto,speed=2GB -o tiers.svg   by tier
  blockyard curve trace.jsonl --policies lru,density,optimum --hints --hint-coverage 0.5
"""


def add_curve_options(commands: Any) -> None:
    """Add the parser of `curve` to argparse's `commands`."""
    parser = add_command(
        commands,
        "curve",
        "hit rate against capacity, policy by policy, with the offline optimum: table, picture, page",
        _CURVE_DESCRIPTION,
        _CURVE_EPILOG,
    )
    add_trace_options(parser)
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="TRACE",
        help="another trace in the same table and pictures, with blocks of the same size; may be repeated",
    )
    _add_curve_cache(parser.add_argument_group("cache"))
    _add_curve_hints(parser.add_argument_group("hints"))
    loops = parser.add_argument_group("closed loops")
    _add_loops(loops, "turns per hour over the number of sessions; --blocks is one size")
    _add_device(loops)
    add_running_options(parser)
    _add_files(parser, "FILE", ".png, .svg or .html")
    add_output_options(parser, "size")


def _add_curve_hints(group: Any) -> None:
    group.add_argument(
        "--hints",
        action="store_true",
        help="also run each policy with hints: after a session's last request a hint says that it is over",
    )
    group.add_argument(
        "--hint-coverage", type=float, metavar="X", help="fraction of the sessions with hints, 0 to 1; default: 1"
    )
    group.add_argument(
        "--hint-wrong", type=float, metavar="X", help="fraction of the hints that are inverted, 0 to 1; default: 0"
    )
    group.add_argument(
        "--hint-seed", type=int, metavar="N", help="seed that chooses sessions and wrong hints; default: 0"
    )


def _add_curve_cache(group: Any) -> None:
    group.add_argument(
        "--policies",
        "--policy",
        metavar="LIST",
        help=f"names of {POLICY_HELP}, optimum for the offline bound, or file.py:ClassName for your own; default: all "
        "names and optimum, with --beside lru,optimum",
    )
    group.add_argument("--blocks", metavar="LIST", help="capacities, like 1k,10k,25%%; default: see --sizes")
    group.add_argument(
        "--sizes",
        type=int,
        metavar="N",
        help="number of capacities, from a thousandth of the working set to all of it; default: 40 (with tiers 8, "
        "from a hundredth)",
    )
    add_cache_field(
        group, "block_size", ", of a trace of tokens; default: 16, with --closed 512", says_default=True, default=None
    )
    group.add_argument(
        "--max-references", type=int, metavar="N", help="sample a trace with more references; default: 8388608"
    )
    group.add_argument(
        "--model", metavar="MODEL", help="a config.json, its folder, or a known name: show sizes in GiB too"
    )
    group.add_argument("--dtype", metavar="NAME", help="type of the model's cache; default: the model's")
    _add_tiers(group, "; either --blocks or one tier has several sizes, the axis; auto is --sizes of them")
    _add_kv_bytes(group)
    _add_seconds_per_prompt_token(group)


_PLAN_DESCRIPTION = """\
Plan the memory of an engine before it runs, from a model, GPUs and optionally a trace: how many blocks fit, how many
requests of given lengths run at once, which hit rate to expect, which block size to take, and what one more GiB or a
CPU tier would bring. The end of the output lists all assumptions, with their numbers.

Exit status: 0 if the model fits, 1 if it does not, 2 for invalid options.
"""

_PLAN_EPILOG = """\
examples:
  blockyard plan llama-3.1-8b                                        one H100
  blockyard plan llama-3.1-70b --gpus 8 --tensor-parallel 4          two replicas
  blockyard plan ./my-model --gpu-memory 24GiB --cache-dtype fp8     a folder with config.json and *.safetensors
  blockyard plan qwen3-8b --trace trace.jsonl --cpu-memory 64GiB     hit rates too
  blockyard plan qwen3-8b --trace trace.jsonl --tier auto,speed=2GB  how many GiB of files for which hit rate
"""


def add_plan_options(commands: Any) -> None:
    """Add the parser of `plan` to argparse's `commands`."""
    parser = add_command(
        commands,
        "plan",
        "from a model, GPUs and a trace: blocks, concurrent requests, hit rate, what more memory brings",
        _PLAN_DESCRIPTION,
        _PLAN_EPILOG,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a model's folder, its config.json, or a name of --list-models"
    )
    parser.add_argument("--list-models", action="store_true", help="print the names of known models")
    _add_plan_model(parser.add_argument_group("model"))
    _add_plan_memory(parser.add_argument_group("memory"))
    _add_plan_work(parser.add_argument_group("work"))
    add_running_options(parser)
    _add_files(parser, "FILE.html", "the plan as a page")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def _add_plan_model(group: Any) -> None:
    group.add_argument(
        "--dtype",
        metavar="NAME",
        help="type of the weights, and of the cache if it has 16 bits or more; default: the model's",
    )
    group.add_argument(
        "--cache-dtype", metavar="NAME", help="type of keys and values, like fp8; default: --dtype, or the model's"
    )
    group.add_argument(
        "--weights",
        metavar="SIZE",
        help="size of all weights, like 15GiB; default: that of the folder's *.safetensors, or counted from the config "
        "and its quantization_config",
    )
    group.add_argument(
        "--text-only", action="store_true", help="leave out the image encoder (vLLM's --language-model-only)"
    )
    group.add_argument(
        "--mtp", action="store_true", help="include the model's own layers for multi-token prediction, as drafts"
    )
    add_cache_field(group, "block_size", default=16)


def _add_plan_memory(group: Any) -> None:
    group.add_argument("--gpus", type=int, metavar="N", help="number of GPUs; default: those of one replica")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--gpu", metavar="NAME", help="h100, a100-80gb, l4, rtx-4090, ...; default: h100")
    size.add_argument("--gpu-memory", metavar="SIZE", help="memory of each GPU, like 24GiB; default: that of --gpu")
    group.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share a model; default: 1"
    )
    group.add_argument(
        "--utilization", type=float, default=0.92, metavar="X", help="usable fraction of a GPU's memory; default: 0.92"
    )
    group.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="reserve no memory for CUDA graphs, like vLLM before 0.20 or with --enforce-eager",
    )
    group.add_argument(
        "--activations",
        metavar="SIZE",
        help="memory of a step on each GPU besides weights and blocks; default: computed from the model and the step",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens of a step; default: vLLM's, 8192 on a GPU of 70 GiB or more (an A100 excepted), else 2048",
    )
    group.add_argument(
        "--sampler",
        choices=("fused", "sorting"),
        default="fused",
        help="the engine's sampler; sorting takes more memory (vLLM before 0.17); default: fused",
    )
    group.add_argument(
        "--cpu-memory", default="0GiB", metavar="SIZE", help="size of a CPU tier for all GPUs together; default: none"
    )


def _add_plan_work(group: Any) -> None:
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
        help="most requests that run at once on a replica, and sequences that a step samples for; default: no limit "
        "on requests, and vLLM's number for a step: 1024 on a GPU of 70 GiB or more, else 256",
    )
    group.add_argument(
        "--trace", metavar="TRACE", help="a trace file, or a generator such as chat:requests=1000,seed=1"
    )
    add_format_options(group)
    group.add_argument(
        "--running", type=int, metavar="N", help="running requests on a replica; default: from the trace's arrivals"
    )
    group.add_argument(
        "--seconds-per-token",
        type=float,
        default=0.03,
        metavar="S",
        help="time from one output token to the next, for the default of --running; default: 0.03",
    )
    group.add_argument(
        "--policy", default="lru", metavar="NAME", help=f"which block is evicted: {POLICY_HELP}; default: lru"
    )
    _add_tiers(group, "; needs --trace")
    _add_seconds_per_prompt_token(group)


_FLEET_DESCRIPTION = """\
Send a load through each router to simulated replicas. Report how many prompt tokens were computed, how evenly, and the
time to the first token, next to a bound that no router can beat.

A load is one of A to F, generated from seeds (A: many system prompts, B: one system prompt for each replica, C: texts
larger than the pools, D: agents, E: cold bursts, F: chats among one-off prompts), or a trace. Runs are then parts of
the trace, with its own blocks.
"""

_FLEET_EPILOG = """\
examples:
  blockyard fleet A                                             every router, five seeds
  blockyard fleet trace.jsonl --replicas 8 --speedup 3          a trace, in five parts
  blockyard fleet A --routing robust,dynamo,round-robin --search 2000
  blockyard fleet E --add 10:2 --kill 20:1                      two more replicas after 10 s, one killed after 20
"""


def add_fleet_options(commands: Any) -> None:
    """Add the parser of `fleet` to argparse's `commands`."""
    parser = add_command(
        commands,
        "fleet",
        "compare routers over many replicas: computed tokens, balance, time to first token",
        _FLEET_DESCRIPTION,
        _FLEET_EPILOG,
    )
    parser.add_argument("trace", nargs="?", default="A", metavar="LOAD", help="A to F, or a trace; default: A")
    reading = parser.add_argument_group("reading")
    _add_reading(reading)
    reading.add_argument(
        "--speedup", type=float, default=1.0, metavar="X", help="play a trace X times faster; default: 1"
    )
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--routing", default="all", metavar="LIST", help="all, or comma-separated names; default: all")
    fleet.add_argument("--runs", type=int, default=5, metavar="N", help="seeds, or parts of a trace; default: 5")
    fleet.add_argument("--replicas", type=int, metavar="N", help="default: those of the load, 8 for a trace")
    fleet.add_argument(
        "--blocks",
        type=int,
        metavar="N",
        help="blocks of each replica, in the load's block size; default: those of the load; for a trace, all replicas "
        "together hold a fifth of its distinct blocks",
    )
    for name, what in (("add", "join"), ("drain", "finish their requests and leave"), ("kill", "are killed")):
        fleet.add_argument(
            f"--{name}", action="append", default=[], metavar="S:N", help=f"after S seconds N replicas {what}"
        )
    fleet.add_argument(
        "--search",
        type=int,
        default=0,
        metavar="N",
        help="also search for the best assignment of the first run's conversations, with N moves; default: 0",
    )
    add_running_options(parser)
    add_output_options(parser, "router")
