"""`python -m benchmarks.engines [--requests 32 --prompt 128 --new 64] [--vllm-python PYTHON]`: whole engines, in turn.

Ours, transformers' `generate` and `generate_batch`, and vLLM if its interpreter is named, each with two threads, on
prompts of random tokens, greedy. Prints Markdown; exit status 1 if ours and `generate` differ in float32 where
rounding does not explain it.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

THREADS = "2"
# Read when torch is loaded, so they stand before it: threads that wait must not spin, others want the cores.
for _name, _value in {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1"}.items():
    os.environ[_name] = _value

import torch  # noqa: E402

from blockyard_engine.gguf import converted_folder  # noqa: E402
from blockyard_engine.model import demo_model_path, load_model  # noqa: E402

from .agreement import agreement  # noqa: E402
from .contestant import Contestant  # noqa: E402
from .hugging import Generate, GenerateBatch  # noqa: E402
from .ours import Blockyard  # noqa: E402
from .rounds import play  # noqa: E402
from .table import table_lines  # noqa: E402
from .vllm_process import VLLM, LeftOut  # noqa: E402
from .work import Size, work_of  # noqa: E402


def contestants_for(model: Any, size: Size) -> list[Contestant]:
    """Those that run in this process, on one and the same model; ours first."""
    return [Blockyard(model, size), Generate(model), GenerateBatch(model, size)]


def vllm_or_nothing(arguments: argparse.Namespace, folder: Path, size: Size) -> list[Contestant]:
    """vLLM, or nothing and a word on stderr."""
    if not arguments.vllm_python:
        print("vLLM is left out: no --vllm-python", file=sys.stderr)
        return []
    try:
        return [VLLM(os.path.abspath(arguments.vllm_python), folder, arguments.dtype, size)]
    except LeftOut as error:
        print(f"vLLM is left out: {error}", file=sys.stderr)
        return []


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32, help="at once; default: 32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt; default: 128")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request; default: 64")
    parser.add_argument("--rounds", type=int, default=3, help="that count; default: 3")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--model", type=Path, help="a folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--vllm-python", default="", help="the interpreter that has vLLM")
    return parser.parse_args()


def main() -> int:
    """Measure all, print the table and say whether the tokens are as they must be."""
    arguments = parsed()
    size = Size(arguments.requests, arguments.prompt, arguments.new)
    folder = arguments.model or converted_folder(demo_model_path())
    model, _ = load_model(folder, getattr(torch, arguments.dtype))
    torch.set_num_threads(int(THREADS))
    works = [work_of(size, model.config.vocab_size, number) for number in range(arguments.rounds + 1)]
    load = os.getloadavg()[0]
    contestants = contestants_for(model, size) + vllm_or_nothing(arguments, folder, size)
    try:
        standings = play(contestants, works.__getitem__, arguments.rounds)
    finally:
        for contestant in contestants:
            contestant.close()
    ours, *others = standings
    agreements = {other.contestant.name: agreement(model, works[1:], ours.answers, other.answers) for other in others}
    versions = "; ".join(dict.fromkeys(standing.contestant.version for standing in standings))
    print(f"{versions}; Python {platform.python_version()}, {platform.machine()}, {THREADS} threads.")
    print(f"{size.num_requests} requests of {size.num_prompt_tokens} + {size.num_new} tokens, {arguments.dtype}.")
    print(f"Processes at work on the machine: {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end.\n")
    print(*table_lines(standings, agreements), sep="\n")
    return 0 if arguments.dtype != "float32" or agreements[Generate.name].is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
