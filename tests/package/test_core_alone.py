"""Tests of `blockyard` are collected in an environment that has its three needs and the test tools, and no more."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

from blockyard_testing.places import PACKAGES, child_environment

CORE = PACKAGES / "blockyard"
NEEDS = {"numpy", "librt", "mypy-extensions"}
#: What other packages bring, or an extra of `blockyard`.
ABSENT = ["cbor2", "msgspec", "prometheus_client", "ray", "rich", "torch", "transformers", "xxhash", "zmq"]
ABSENT += [f"blockyard_{name}" for name in ("engine", "lab", "serve", "sglang", "tiers", "vllm")]


def test_core_needs_three_packages() -> None:
    project = tomllib.loads((CORE / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[<>=]", need)[0] for need in project["dependencies"]} == NEEDS


def test_core_tests_are_collected_without_extras_and_companions() -> None:
    """A test that needs one of them asks by `pytest.importorskip`."""
    code = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\nimport pytest\n"
    code += "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider']))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=CORE, env=child_environment(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "tests/core/test_world.py" in run.stdout
    assert "tests/events/test_wire.py" not in run.stdout
