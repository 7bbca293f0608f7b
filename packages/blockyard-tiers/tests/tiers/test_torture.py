"""A small part of `python -m tests.tiers.torture`: random transfers on damaged backends, and killed processes."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.places import child_environment
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.tiers_servers import (
    missing_for_buckets,
    missing_for_mooncake,
    missing_for_redis,
)

from .torture import place_of, run_transfers

redis = pytest.mark.skipif(bool(missing_for_redis()), reason=missing_for_redis())
bucket = pytest.mark.skipif(bool(missing_for_buckets()), reason=missing_for_buckets())
mooncake = pytest.mark.skipif(bool(missing_for_mooncake()), reason=missing_for_mooncake())


@pytest.mark.parametrize(
    ("kind", "num_jobs"),
    [
        ("files", 3000),
        pytest.param("redis", 1500, marks=redis),
        pytest.param("bucket", 150, marks=bucket),
        pytest.param("mooncake", 300, marks=mooncake),
        ("peer", 1500),
    ],
)
def test_random_transfers_on_damaged_backends_load_only_right_bytes(tmp_path: Path, kind: str, num_jobs: int) -> None:
    with place_of(kind, tmp_path) as place:
        seen = run_transfers(place, draws(num_jobs, num_jobs // 10), random.Random(run_seed()).randrange(2**32))
    assert seen["load done"] + seen["store done"] > 0


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("files", 20),
        pytest.param("redis", 5, marks=redis),
        pytest.param("mooncake", 2, marks=mooncake),
        ("peer", 5),
    ],
)
def test_objects_of_killed_processes_are_whole(kind: str, kills: int) -> None:
    """In a process of its own: it forks, and must have no threads."""
    command = [sys.executable, "-m", "tests.tiers.torture", kind, "--transfers", "0", "--kills", str(kills)]
    run = subprocess.run(
        [*command, "--seed", str(run_seed())],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        cwd=None,
        env=child_environment(),
    )
    assert run.returncode == 0, run.stderr
    assert re.search(rf"'processes killed': {kills}\b", run.stdout), run.stdout
    assert "a child failed" not in run.stdout
