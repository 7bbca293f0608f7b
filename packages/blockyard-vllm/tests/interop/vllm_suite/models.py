"""`python -m tests.interop.vllm_suite.models --python PYTHON`: a real model in vLLM, stock and on both levels.

SmolLM2-135M, with plenty of blocks and with few: tokens, hits and preemptions must be equal. Then the block managers
alone, without a model (benchmarks/vllm_managers.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from blockyard_engine.gguf import converted_folder
from blockyard_engine.model import demo_model_path
from blockyard_testing.places import ROOT, SOURCE_PATH

from .source import HERE

#: Requests, new tokens of each, blocks, which of vLLM's schedulers.
RUNS = ((64, 8, 728, "sync"), (64, 8, 120, "async"), (256, 8, 728, "sync"), (256, 8, 300, "async"))
SETTINGS = {
    "PYTHONPATH": SOURCE_PATH,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> int:
    """Play all; exit status 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter that has vLLM")
    python = os.path.abspath(parser.parse_args().python)
    model = str(converted_folder(demo_model_path()))
    environment = os.environ | SETTINGS
    failed = 0
    for run in RUNS:
        print(f"{run[0]} requests of {run[1]} new tokens, {run[2]} blocks, {run[3]}", flush=True)
        command = [python, str(HERE / "generation.py"), model, *map(str, run)]
        failed += subprocess.run(command, env=environment).returncode != 0
    subprocess.run([python, str(ROOT / "benchmarks" / "vllm_managers.py")], env=environment, check=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
