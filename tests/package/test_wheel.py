"""A wheel is built without a trace in the checkout, and an sdist holds what its tests read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ..support.places import ROOT

LEFT_OVERS = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache", ".hypothesis", "shared"
)
LYING_RECORD = 'SOURCE_DIGEST = "of another build"\n'


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this one, never built, but for a record that some older build left."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("wheel") / "blockyard"
    shutil.copytree(ROOT, copy, ignore=LEFT_OVERS)
    (copy / "src" / "blockyard" / "_build_record.py").write_text(LYING_RECORD)
    return copy


def build(command: str, checkout: Path, output: Path) -> Path:
    """What the hook that pip calls makes, interpreted: without a compiler it takes seconds."""
    hook = f"from setuptools import build_meta; build_meta.{command}({str(output)!r})"
    environment = {**os.environ, "BLOCKYARD_COMPILE": "0"}
    output.mkdir()
    done = subprocess.run([sys.executable, "-c", hook], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = output.iterdir()
    return made


def test_a_wheel_leaves_the_checkout_as_it_was(checkout: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    wheel = build("build_wheel", checkout, tmp_path / "wheel")
    assert {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()} == before
    assert {path.name for path in checkout.rglob("*") if path.is_dir()}.isdisjoint({"build", ".mypy_cache"})
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert b'SOURCE_DIGEST = ""' in archive.read("blockyard/_build_record.py")
    sources = {path.relative_to(checkout / "src").as_posix() for path in (checkout / "src").rglob("*.py*")}
    assert sources <= names
    assert {"blockyard/metrics/data/alerts.yml", "blockyard/metrics/data/dashboard.json"} <= names


def test_an_sdist_holds_the_repository(checkout: Path, tmp_path: Path) -> None:
    before = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file()}
    with tarfile.open(build("build_sdist", checkout, tmp_path / "sdist")) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert before - inside == {"src/blockyard/_build_record.py"}
