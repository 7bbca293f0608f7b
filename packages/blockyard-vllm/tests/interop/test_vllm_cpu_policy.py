"""Our policies in vLLM's own CPU tier: `make interop-vllm`, or VLLM_PYTHON=python [VLLM_SOURCE=checkout] pytest."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from blockyard_testing import seeds
from blockyard_testing.places import SOURCE_PATH
from blockyard_testing.seeds import run_seed

VLLM = os.environ.get("VLLM_PYTHON", "")


@pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON names no Python with vLLM: run `make interop-vllm`")
def test_in_vllms_manager_our_lru_evicts_the_same_chunks() -> None:
    """VLLM_SOURCE is the folder above `vllm`, of a version that is not installed."""
    path = os.pathsep.join(filter(None, [os.environ.get("VLLM_SOURCE"), SOURCE_PATH, os.environ.get("PYTHONPATH")]))
    judge = Path(__file__).with_name("vllm_cpu_judge.py")
    command = [os.path.abspath(VLLM), "-P", str(judge), str(run_seed())]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    seeds.lines.append(f"vLLM's CPU tier ({found['vllm']}): evicted {found['evicted']}")
    assert found["differing"] == []
    assert found["unequal"] == []
    assert all(number > 500 for number in found["evicted"].values())
