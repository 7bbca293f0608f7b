"""An adapter without its engine says what is missing and what to install; so does one whose torch is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from blockyard_testing.places import ROOT, child_environment

#: What asks for the engine, of adapters that can be imported without it.
USES = {"blockyard_vllm": "adapter.Scheduler", "blockyard_sglang": "adapter.register()"}
#: What is not installed, and what the error says.
MISSING = {
    "blockyard_vllm": ("vllm", "needs vLLM 0.32 or 0.33", "pip install 'vllm>=0.32,<0.34'"),
    "blockyard_vllm.cpu_policy": ("vllm", "needs vLLM 0.32 or 0.33", "pip install 'vllm>=0.32,<0.34'"),
    "blockyard_vllm.tier": ("vllm", "needs vLLM 0.32 or 0.33", "pip install 'vllm>=0.32,<0.34'"),
    "blockyard_sglang": ("sglang", "needs SGLang 0.5.23", "pip install sglang==0.5.23"),
    "blockyard_sglang.storage": ("sglang", "needs SGLang 0.5.23", "pip install sglang==0.5.23"),
    "blockyard_tiers.lmcache_l2": ("lmcache", "needs LMCache 0.5.6", "pip install lmcache==0.5.6"),
    "engines.mini_sglang": ("torch", "needs torch", "pip install torch"),
    "engines.transformers_blocks": (
        "transformers",
        "needs torch and transformers 5.19",
        "pip install 'blockyard[engine]'",
    ),
}


@pytest.mark.parametrize("adapter", MISSING)
def test_what_is_missing_and_what_to_install_is_said(adapter: str) -> None:
    absent, *says = MISSING[adapter]
    program = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "from blockyard import MissingExtra\n"
        "import blockyard_vllm.chunk_order, engines.nano_vllm\n"
        "try:\n"
        f"    import {adapter} as adapter\n"
        f"    {USES.get(adapter, 'adapter')}\n"
        "except MissingExtra as error:\n"
        f"    assert '{adapter} ' in str(error), error\n"
        f"    assert all(words in str(error) for words in {says!r}), error\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", program], env=child_environment(), cwd=ROOT / "examples", check=True)


@pytest.mark.parametrize("name", ["nano_vllm", "mini_sglang", "transformers_blocks"])
def test_an_example_for_an_engine_says_that_it_is_imported(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = ROOT / "examples" / "engines" / f"{name}.py"
    run = subprocess.run([sys.executable, path], env=child_environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith(f"{path} is imported, not run: its first lines show how. It needs ")


@pytest.mark.parametrize(
    ("engine", "program"),
    [
        ("sglang", "import blockyard_sglang as one; one.BACKEND"),
        (
            "vllm",
            "import blockyard_vllm as one; one.__all__; import blockyard_vllm.misses",
        ),
        ("vllm", "import blockyard_vllm as one; assert not hasattr(one, 'register')"),
    ],
)
def test_packages_of_adapters_are_imported_without_their_engine(engine: str, program: str) -> None:
    """SGLang imports its plug-in at every start; vLLM's has modules that need no vLLM."""
    program = f"import sys; sys.modules[{engine!r}] = None; {program}"
    subprocess.run([sys.executable, "-c", program], env=child_environment(), cwd=ROOT / "examples", check=True)
