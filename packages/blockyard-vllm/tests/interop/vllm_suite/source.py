"""vLLM's tests, from the source distribution of its package, in a folder that git ignores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from blockyard_testing.places import ROOT

VERSION = "0.32.0"
CACHE = ROOT / ".cache"
HERE = Path(__file__).resolve().parent


def fetched_tests(python: str) -> Path:
    """The folder that holds `tests/` and a hub of model configurations; fetched where it is missing."""
    folder = CACHE / f"vllm-{VERSION}"
    if not (folder / "tests" / "v1" / "core").is_dir():
        _fetch(folder)
    subprocess.run([python, str(HERE / "model_configs.py"), str(folder / "hub")], check=True)
    return folder


def _fetch(folder: Path) -> None:
    """pip unpacks the sdist before it asks for its metadata, which fails without CUDA: what it unpacked is kept."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-clean", "--no-build-isolation", f"vllm=={VERSION}", "-d", scratch]
        done = subprocess.run(command, env=os.environ | {"TMPDIR": scratch}, capture_output=True, text=True)
        found = sorted(Path(scratch).glob("*/*/tests/v1/core"))
        if not found:
            raise SystemExit(f"vLLM's tests could not be fetched:\n{done.stderr[-2000:]}")
        unpacked = found[0].parents[2]
        folder.mkdir(exist_ok=True)
        shutil.rmtree(folder / "tests", ignore_errors=True)
        shutil.move(unpacked / "tests", folder / "tests")
        # It imports the whole model zoo; `vllm_fixtures` has what the tests here ask for.
        (folder / "tests" / "conftest.py").unlink()
