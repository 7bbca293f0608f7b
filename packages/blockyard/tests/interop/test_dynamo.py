"""Dynamo's unmodified indexer is right about our caches after every kind of loss."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from blockyard_testing import seeds
from blockyard_testing.places import child_environment
from blockyard_testing.seeds import run_seed

DYNAMO = os.environ.get("DYNAMO_PYTHON", "")

pytestmark = [
    pytest.mark.skipif(not DYNAMO, reason="DYNAMO_PYTHON names no Python with ai-dynamo-runtime: run `make interop`"),
    pytest.mark.skipif(not shutil.which("unshare") or not shutil.which("ip"), reason="no network namespaces here"),
]


def judged(*options: str) -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.interop.dynamo_judge", os.path.abspath(DYNAMO), *options]
    done = subprocess.run(
        ["unshare", "--net", *program], cwd=None, env=child_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    seeds.lines.append(f"Dynamo's indexer: {found['counts']}, right again after {found['longest']} s at most")
    return found


@pytest.mark.parametrize("number", range(3))
def test_after_a_heartbeat_dynamos_indexer_says_what_the_cache_has(number: int) -> None:
    found = judged("--seed", str(run_seed() + number), "--rounds", "15")
    assert found["wrong"] == []
    assert found["counts"]["compared"] > 300


def test_conversations_over_three_workers_are_known_of_each() -> None:
    found = judged("--seed", str(run_seed()), "--conversations", "60")
    assert found["wrong"] == []


def test_the_end_of_a_burst_is_known_without_another_step() -> None:
    found = judged("--seed", str(run_seed()), "--bursts", "8")
    assert found["wrong"] == []
    assert found["counts"]["bursts"] == 8
