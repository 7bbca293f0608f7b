"""An adapter whose engine is another version says in one sentence what to install, whatever else has changed in it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from blockyard.engine_versions import LMCACHE, SGLANG, TRANSFORMERS, VLLM
from blockyard.errors import MissingExtra
from blockyard.signatures import Engine, listed, release_of, require_version
from blockyard_testing.places import ROOT, child_environment

#: What uses each adapter, the version of its engine, and what is said of it.
OTHERS = {
    "blockyard_vllm": ("adapter.Scheduler", "vllm", "0.31.2", VLLM),
    "blockyard_vllm.tier": ("adapter", "vllm", "0.24.0", VLLM),
    "blockyard_vllm.cpu_policy": ("adapter", "vllm", "1.0.0", VLLM),
    "blockyard_sglang": ("adapter.register()", "sglang", "0.5.22", SGLANG),
    "blockyard_sglang.contract": ("adapter.require_known_sglang()", "sglang", "0.5.24", SGLANG),
    "blockyard_sglang.storage": ("adapter", "sglang", "0.6.0.post1", SGLANG),
    "blockyard_tiers.lmcache_l2": ("adapter", "lmcache", "0.5.60", LMCACHE),
    "engines.transformers_blocks": ("adapter", "transformers", "5.20.1", TRANSFORMERS),
}


@pytest.mark.parametrize("adapter", OTHERS)
def test_another_version_is_refused_with_what_to_install(adapter: str) -> None:
    """The engine here is an empty package: nothing of it could be imported, or compared."""
    use, module, version, engine = OTHERS[adapter]
    program = (
        "import importlib, sys, types\n"
        f"engine = sys.modules[{module!r}] = types.ModuleType({module!r})\n"
        f"engine.__version__ = {version!r}\n"
        "from blockyard import MissingExtra\n"
        "try:\n"
        f"    adapter = importlib.import_module('{adapter}')\n"
        f"    {use}\n"
        "except MissingExtra as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(),
        cwd=ROOT / "examples",
        check=True,
        capture_output=True,
        text=True,
    )
    needed = f"{adapter.removesuffix('.contract')} needs {engine} in the same environment: "
    assert done.stdout == f"{needed}pip install {engine.requirement} ({engine.name} {version} is installed)\n"


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32", "0.32"),
        ("0.32.0", "0.32"),
        ("0.32.1+cpu", "0.32"),
        ("0.32rc1", "0.32"),
        ("0.33.0.post2", "0.33"),
        ("0.31.9", None),
        ("0.3", None),
        ("0.320.1", None),
        ("1.32.0", None),
        ("10.32", None),
    ],
)
def test_release_of_a_version(version: str, release: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert release_of(VLLM, version) == release
    use_version(monkeypatch, version)
    if release:
        require_version(VLLM, "an adapter")
    else:
        with pytest.raises(MissingExtra, match=rf"needs vLLM 0.32 or 0.33 .*\(vLLM {version} is installed\)"):
            require_version(VLLM, "an adapter")


def use_version(monkeypatch: pytest.MonkeyPatch, version: object) -> None:
    """Put a package with this version in the place of vLLM."""
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("version", ["dev", "", "0.31.1.dev5+g1234567", "0.1.dev1+g1234567", None, 5])
def test_version_that_says_nothing_is_left_to_the_signatures(version: object, monkeypatch: pytest.MonkeyPatch) -> None:
    use_version(monkeypatch, version)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.33.0")
    require_version(VLLM, "an adapter")


def test_version_of_a_package_that_has_it_in_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest_like", ModuleType("pytest_like"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"pytest_like": "3.1"}[name])
    with pytest.raises(MissingExtra, match=r"needs Other 2 .*\(Other 3.1 is installed\)"):
        require_version(Engine("Other", "pytest_like", ("2",), "other==2"), "an adapter")


def test_few_of_many_methods_are_named() -> None:
    assert listed(["a is gone"]) == "a is gone"
    assert listed([f"{name} is gone" for name in "abcde"]) == "a is gone; b is gone; c is gone; and 2 more"
