"""Which build runs, and whether it is the build of these sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import blockyard
from blockyard import _build, _sources
from blockyard._build import StaleBuildWarning
from blockyard_testing.places import PACKAGE_DIR

IS_INTERPRETED = os.environ.get("BLOCKYARD_INTERPRETED") == "1"
WHAT_RUNS = (
    "import blockyard, blockyard.core.manager as m;"
    "print(blockyard.compiled(), blockyard._build.build_name(), m.__file__.endswith('.py'), sep='|')"
)

needs_compiled = pytest.mark.skipif(not blockyard.compiled(), reason="the build tested is interpreted")
#: A wheel that is tested from the unpacked sdist has its extensions elsewhere.
needs_extensions = pytest.mark.skipif(not any(PACKAGE_DIR.glob("core/*.so")), reason="no build in this checkout")


def test_the_version_is_written_once_and_twice_the_same() -> None:
    project = tomllib.loads((PACKAGE_DIR.parents[1] / "pyproject.toml").read_text())["project"]
    assert blockyard.__version__ == project["version"]


def test_compiled_says_what_runs() -> None:
    """The flag is read off the modules themselves, so it cannot disagree with what is imported."""
    from blockyard.core.index import hashing

    is_extension = not str(hashing.__file__).endswith(".py")
    assert blockyard.compiled() is is_extension
    assert is_extension is (type(hashing.hash_rows).__name__ == "builtin_function_or_method")
    if IS_INTERPRETED:
        assert not blockyard.compiled()


def test_the_build_has_a_name_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "compiled", lambda: True)
    assert _build.build_name() == "compiled by mypyc"
    monkeypatch.setattr(_build, "compiled", lambda: False)
    assert _build.build_name().startswith("interpreted (slow")


def test_version_on_the_command_line() -> None:
    """`blockyard --version` needs no extra, and says which build runs."""
    done = run([sys.executable, "-m", "blockyard.cli.main", "--version"], PACKAGE_DIR.parent)
    assert done.returncode == 0, done.stderr
    expected = "compiled by mypyc" if any(PACKAGE_DIR.glob("core/*.so")) else "interpreted (slow: for debugging"
    assert done.stdout.startswith(f"blockyard {blockyard.__version__} ({expected}")


# ---------------------------------------------------------------- a stale build, told to the user


def warnings_of_a_check() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _build.warn_if_stale()
    assert all(warning.category is StaleBuildWarning for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A source checkout, its extension built from what is there; the package in it."""
    package = tmp_path / "src" / "blockyard"
    (package / "core").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    (package / "ids.py").write_text("A = 1\n")
    (package / "windows.py").write_text("W = 1\n")
    (package / "core" / "pool.py").write_text("B = 2\n")
    monkeypatch.setattr(_build, "PACKAGE", package)
    monkeypatch.setattr(_build, "compiled", lambda: True)
    digest = _sources.source_digest(package)
    monkeypatch.setattr(_build, "_built_digest", lambda: digest)
    return package


def test_a_fresh_build_is_silent(checkout: Path) -> None:
    assert warnings_of_a_check() == []


def test_a_changed_source_warns_and_says_what_to_do(checkout: Path) -> None:
    (checkout / "core" / "pool.py").write_text("B = 3\n")
    (message,) = warnings_of_a_check()
    assert "compiled core is older than its sources" in message
    assert "python setup.py build_ext --inplace" in message


def test_a_new_source_warns(checkout: Path) -> None:
    (checkout / "core" / "new.py").touch()
    assert len(warnings_of_a_check()) == 1


def test_a_removed_source_warns(checkout: Path) -> None:
    (checkout / "core" / "pool.py").unlink()
    assert len(warnings_of_a_check()) == 1


def test_a_renamed_source_warns(checkout: Path) -> None:
    (checkout / "core" / "pool.py").rename(checkout / "core" / "loop.py")
    assert len(warnings_of_a_check()) == 1


def test_a_missing_record_warns(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension of which nobody wrote down what it was built from is not to be trusted."""
    monkeypatch.setattr(_build, "_built_digest", lambda: "")
    assert len(warnings_of_a_check()) == 1


def test_files_that_are_not_compiled_do_not_matter(checkout: Path) -> None:
    for name in ("errors.py", "core/__init__.py", "engine.py", "core/notes.txt"):
        (checkout / name).write_text("changed")
    assert warnings_of_a_check() == []


def test_the_interpreted_build_is_never_stale(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "compiled", lambda: False)
    (checkout / "core" / "pool.py").write_text("B = 3\n")
    assert warnings_of_a_check() == []


def test_an_installed_package_reads_no_sources(checkout: Path) -> None:
    """There is no pyproject above it, and its sources and extension are of one build."""
    (checkout.parent.parent / "pyproject.toml").unlink()
    (checkout / "core" / "pool.py").write_text("B = 3\n")
    assert warnings_of_a_check() == []


def test_a_build_that_was_copied_by_half_warns(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules' own files are missing, the file with their code is there: Python takes the sources, unasked."""
    monkeypatch.setattr(_build, "compiled", lambda: False)
    group = checkout.parent / "blockyard__mypyc.cpython-311-x86_64-linux-gnu.so"
    group.touch()
    (message,) = warnings_of_a_check()
    assert "runs interpreted" in message
    assert str(checkout) in message
    (checkout / "ids.cpython-311-x86_64-linux-gnu.so").touch()
    assert warnings_of_a_check() == []  # all is there; who asked for the sources knows it


# ---------------------------------------------------------------- the record


def test_the_record_can_be_read_back(tmp_path: Path) -> None:
    for digest in ("abc123", ""):
        _sources.write_build_record(tmp_path, digest)
        names: dict[str, str] = {}
        exec((tmp_path / _sources.BUILD_RECORD).read_text(), names)
        assert names["SOURCE_DIGEST"] == digest


def test_all_of_the_core_and_of_the_labs_loops_is_compiled() -> None:
    names = {path.relative_to(PACKAGE_DIR).as_posix() for path in _sources.compiled_sources(PACKAGE_DIR)}
    rooms = [PACKAGE_DIR / room for room in ("core", "events/tables")]
    inside = {path.relative_to(PACKAGE_DIR).as_posix() for room in rooms for path in room.rglob("*.py")}
    assert names == {name for name in inside if not name.endswith("__init__.py")} | {"ids.py", "windows.py"}


@needs_compiled
def test_what_runs_here_is_fresh() -> None:
    """The whole suite would prove nothing about the sources otherwise."""
    assert _build._built_digest() == _sources.source_digest(PACKAGE_DIR)


# ---------------------------------------------------------------- whole, in a checkout of its own


def run(command: list[str], source: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=source)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `src`, extensions included, under a pyproject."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PACKAGE_DIR.parent, root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (root / "pyproject.toml").touch()
    return root / "src"


@needs_compiled
@needs_extensions
def test_an_import_of_a_stale_build_warns_once_and_a_fresh_one_does_not(copied: Path) -> None:
    fresh = run([sys.executable, "-W", "error", "-c", WHAT_RUNS], copied)
    assert fresh.stdout == "True|compiled by mypyc|False\n", fresh.stderr
    source = copied / "blockyard" / "core" / "blocks" / "lease.py"
    text = source.read_text()
    source.write_text(text + "# A change that nobody compiled.\n")
    stale = run([sys.executable, "-c", WHAT_RUNS], copied)
    assert stale.stdout == fresh.stdout
    assert stale.stderr.count("StaleBuildWarning: blockyard's compiled core is older than its sources") == 1
    source.write_text(text)
    assert run([sys.executable, "-W", "error", "-c", WHAT_RUNS], copied).returncode == 0


@needs_compiled
@needs_extensions
def test_an_import_of_a_half_build_warns_once(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied, tmp_path / "src", ignore=shutil.ignore_patterns("blockyard/*.so"))
    for path in (tmp_path / "src" / "blockyard").rglob("*.so"):
        path.unlink()
    done = run([sys.executable, "-c", WHAT_RUNS], tmp_path / "src")
    assert done.stdout == "False|interpreted (slow: for debugging and coverage)|True\n", done.stderr
    assert done.stderr.count("StaleBuildWarning: blockyard runs interpreted") == 1


def test_sources_without_extensions_run_interpreted(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied, tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    shutil.copy(copied.parent / "pyproject.toml", tmp_path)
    done = run([sys.executable, "-W", "error", "-c", WHAT_RUNS], tmp_path / "src")
    assert done.stdout == "False|interpreted (slow: for debugging and coverage)|True\n", done.stderr
