"""A wheel is built without a trace in the checkout and without the extras; an sdist holds what its tests read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from blockyard_testing.places import PACKAGE_DIR, PACKAGES

sys.path.insert(0, str(PACKAGE_DIR))
from _sources import MYPY_OPTIONS, compiled_sources

sys.path.pop(0)

CORE = PACKAGES / "blockyard"
LEFT_OVERS = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "build",
    "dist",
    "*.egg-info",
    "*.so",
    "__pycache__",
    ".*_cache",
    ".cache",
    ".hypothesis",
    "shared",
)
BUILD_NEEDS = ("numpy", "librt", "mypy_extensions.py")
LYING_RECORD = 'SOURCE_DIGEST = "of another build"\n'


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this one, never built, but for a record that some older build left."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("wheel") / "blockyard"
    shutil.copytree(CORE, copy, ignore=LEFT_OVERS)
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


def test_an_sdist_holds_the_package_and_its_tests(checkout: Path, tmp_path: Path) -> None:
    before = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file()}
    with tarfile.open(build("build_sdist", checkout, tmp_path / "sdist")) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert before - inside == {"src/blockyard/_build_record.py"}


def test_what_is_compiled_passes_mypy_without_the_extras(tmp_path: Path) -> None:
    """As in the environment that pip makes for a build: the needs of `[build-system]` and nothing else."""
    pytest.importorskip("mypy")
    venv.create(tmp_path / "bare", symlinks=True)
    (site_packages,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    for name in BUILD_NEEDS:
        (site_packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    options = [*MYPY_OPTIONS, f"--python-executable={tmp_path / 'bare' / 'bin' / 'python'}"]
    options += [f"--cache-dir={tmp_path / 'cache'}"]
    sources = map(str, compiled_sources(PACKAGE_DIR))
    command = [sys.executable, "-m", "mypy", *options, *sources]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=CORE, env=environment, capture_output=True, text=True, check=False)
    assert "Success" in done.stdout, done.stdout
