"""Our tiers below vLLM's CPU memory: `make interop-vllm`, or VLLM_PYTHON=python pytest."""

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
def test_vllms_own_manager_finds_what_it_stored_or_nothing(tmp_path: Path) -> None:
    """The judge compares every hit's bytes: cold, after a restart, after new weights, and where files are damaged."""
    judge = Path(__file__).with_name("vllm_tier_judge.py")
    path = os.pathsep.join(filter(None, [SOURCE_PATH, os.environ.get("PYTHONPATH")]))
    command = [os.path.abspath(VLLM), "-P", str(judge), str(run_seed()), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    seeds.lines.append(f"vLLM's secondary tier ({found['vllm']}): {found}")
    assert found["first"]["DISK"] > 0
    assert found["warm"]["DISK"] > 0
    assert found["after"]["DISK"] > 0
    assert set(found["other model"]) == {"missed"}
