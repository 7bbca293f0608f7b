"""What type checkers make of the public API: right uses pass, wrong ones are reported, stubs say what sources do."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from blockyard_testing import places
from blockyard_testing.places import PACKAGE_DIR

from ..stubs import STUBBED, same_form, stub, stub_of

ROOT = PACKAGE_DIR.parent.parent
USES = ROOT / "tests" / "package" / "typing"
#: Of compiled classes, and constants that are nobody's business outside.
NOT_IN_STUBS = r""".*\.__mypyc_attrs__
.*\.__new__
.*\.__(deep)?copy__
blockyard\.core\.manager\.KVCacheManager
blockyard\.core\.pools\.\w+\.(Block|Lease|Named|Standalone)Pool
blockyard\.core\.waiting\.(queue\.WaitingQueue|rule\.AdmissionRule)
blockyard\.core\.pools\.named_pool\.NamedPool\.find_prefix
blockyard\.core\.[a-z_.]+\.[A-Z_]+
"""


def run_mypy(*arguments: str) -> str:
    pytest.importorskip("mypy")
    source, cache = str(PACKAGE_DIR.parent), str(places.ROOT / ".cache" / arguments[0])
    environment = os.environ | {"MYPYPATH": source, "PYTHONPATH": source, "MYPY_CACHE_DIR": cache}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=None, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("name", STUBBED)
def test_stubs_are_made_from_the_sources(name: str) -> None:
    """If not: `python -m tests.stubs`."""
    assert same_form(stub_of(name).read_text()) == same_form(stub(PACKAGE_DIR / name))


def test_every_source_with_a_stub_is_compiled() -> None:
    """The build checks the bodies of compiled sources; mypy alone reads only the stub."""
    assert sorted(PACKAGE_DIR.rglob("*.pyi")) == sorted(stub_of(name) for name in STUBBED)
    assert all(name.startswith("core/") for name in STUBBED)


def test_every_stub_is_in_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["blockyard"]
    assert {stub_of(name) for name in STUBBED} <= {path for each in patterns for path in PACKAGE_DIR.glob(each)}


@pytest.mark.skipif(shutil.which("make") is None or not (places.ROOT / "Makefile").exists(), reason="needs make")
def test_lint_checks_every_source_with_a_stub() -> None:
    command = ["make", "-s", "--eval", "stubbed: ; @echo $(STUBBED:.pyi=.py)", "stubbed"]
    found = subprocess.run(command, cwd=places.ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(found) == sorted(str((PACKAGE_DIR / name).relative_to(places.ROOT)) for name in STUBBED)


@pytest.mark.drawn
def test_stubs_have_all_that_there_is_at_run_time(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(NOT_IN_STUBS)
    modules = [f"blockyard.{name.removesuffix('.py').replace('/', '.')}" for name in STUBBED]
    options = ["--ignore-disjoint-bases", "--ignore-unused-allowlist", "--allowlist", str(allowed)]
    assert "Success" in (output := run_mypy("mypy.stubtest", *modules, *options)), output


def run_pyright(paths: list[Path], folder: Path) -> str:
    pytest.importorskip("basedpyright")
    config = folder / "pyrightconfig.json"
    told = {"include": list(map(str, paths)), "extraPaths": [str(PACKAGE_DIR.parent)], "typeCheckingMode": "standard"}
    config.write_text(json.dumps(told))
    command = [sys.executable, "-m", "basedpyright", "-p", str(config), "--pythonpath", sys.executable]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_wrong_uses_are_reported_and_right_ones_are_not(checker: str, tmp_path: Path) -> None:
    """All files in one run. `silent` reads the package as users do, by its signatures; lint checks its bodies."""
    uses = [USES / "right.py", USES / "wrong.py"]
    if importlib.util.find_spec("torch") is not None:
        uses.append(USES / "right_with_torch.py")
    if checker == "mypy":
        output = run_mypy("mypy", "--strict", "--follow-imports=silent", *map(str, uses))
        summary = rf"^Found \d+ errors in 1 file \(checked {len(uses)} source files\)"
        assert re.search(summary, output, re.MULTILINE), output
    else:
        output = run_pyright(uses, tmp_path)
        assert re.search(r"^\d+ errors?, ", output, re.MULTILINE), output
    for path in uses:
        lines = path.read_text().splitlines()
        marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
        reported = {int(number) for number in re.findall(rf"{path.name}:(\d+):(?:\d+ -)? error", output)}
        assert sorted(reported) == sorted(marked), output
        assert (len(marked) >= 40) == (path.name == "wrong.py")
