"""`python -m tests.interop.vllm_suite.ours --python PYTHON`: our own tests of vLLM's schedulers on Blockyard.

Random programs beside stock vLLM, faults, options, events, collisions, and `vllm serve` with SmolLM2-135M on loopback.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from blockyard_engine.gguf import converted_folder
from blockyard_engine.model import demo_model_path
from blockyard_testing.places import ROOT, SOURCE_PATH
from blockyard_testing.stand_ins import STAND_INS

from .source import HERE, fetched_tests


def main() -> int:
    """Run them; pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("tests", nargs="*", help="files, default: all of tests/interop/vllm_ours")
    asked = parser.parse_args()
    python = os.path.abspath(asked.python)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE / "on_path"), STAND_INS, SOURCE_PATH]),
        "HF_HUB_CACHE": str(fetched_tests(python) / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "BLOCKYARD_VLLM_MODEL": str(converted_folder(demo_model_path())),
    }
    folder = str(HERE.parent / "vllm_ours")
    # Not the settings of our own suite: its plugins are not in vLLM's environment.
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(ROOT)]
    command += ["--timeout=900"]
    command += ["--confcutdir", folder, *(asked.tests or [folder])]
    return subprocess.run(command, cwd=None, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
