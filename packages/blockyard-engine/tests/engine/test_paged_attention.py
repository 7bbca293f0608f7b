"""The backend for a kernel that reads block tables, compared with SDPA and transformers.

The kernel is its package's documentation written out (`paged_kernels`), on the CPU; `test_cuda` runs the real one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard.storage import KVCache
from blockyard_engine import Engine, SamplingParams, components
from blockyard_engine.attention import backends
from blockyard_engine.attention.flash_attention import FlashAttention3
from blockyard_engine.attention.sdpa import SdpaBackend
from blockyard_testing.seeds import run_seed
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model, tokens_of

from ..support import paged_kernels
from ..support.attention_steps import random_step, run_step
from ..support.memory_meter import CpuMeter


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the written-out kernel where the backend looks for the real one."""
    for name, module in paged_kernels.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_a_step_equals_sdpa(num_heads: int, num_kv_heads: int) -> None:
    """Decodes, whole prompts, chunks after a cached prefix, drafts; one group with all tokens, one with a window."""
    rng = np.random.default_rng(run_seed())
    for _ in range(5):
        step = random_step(rng, num_heads, num_kv_heads, block_size=8)
        expected = run_step(step, SdpaBackend)
        torch.testing.assert_close(run_step(step, FlashAttention3), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- whole engines


@pytest.mark.parametrize("shape", ["llama-gqa", "mistral-window", "gemma3"])
def test_an_engine_gives_transformers_tokens(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts, prefix hits, forks with copies: all tokens are generate()'s."""
    monkeypatch.setattr(FlashAttention3, "refusal", classmethod(lambda cls, kv_cache: None))
    model = tiny_model(shape)
    prompts = mixed_prompts((33, 5, 40, 1, 64), shared=24)
    engine = Engine(
        model,
        num_blocks=80,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=23,
        attention_backend=FlashAttention3.name,
    )
    assert engine.attention_backend == FlashAttention3.name
    results = engine.generate(prompts, SamplingParams(max_tokens=9))
    assert tokens_of(results) == reference_tokens(model, prompts, 9)
    again = engine.generate(prompts, SamplingParams(max_tokens=9, n=2))
    assert [answer.token_ids for result in again for answer in result.completions] == [
        tokens for tokens in tokens_of(results) for _ in range(2)
    ]
    engine.cache.check()


@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3"])
def test_the_largest_step_runs_through_it(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory profile of an engine: tables of one block, as wide as the longest sequence's."""
    monkeypatch.setattr(FlashAttention3, "refusal", classmethod(lambda cls, kv_cache: None))
    meter = CpuMeter(512 * 2**20)
    monkeypatch.setattr(components, "meter_of", lambda _: meter)
    options = {"block_size": 8, "max_num_seqs": 3, "attention_backend": FlashAttention3.name}
    engine = Engine(tiny_model(shape), max_num_batched_tokens=40, **options)
    assert engine.attention_backend == FlashAttention3.name
    assert engine.memory.step_bytes
    assert 0 <= engine.memory.step_bytes < 4 * 2**20


# ---------------------------------------------------------------- who is chosen


def test_on_a_cpu_the_choice_is_sdpa() -> None:
    assert Engine(tiny_model("llama-gqa"), num_blocks=20).attention_backend == "sdpa"


def test_a_backend_reports_why_it_cannot_serve() -> None:
    with pytest.raises(InvalidArgument, match=r"is 'flash_attention_3'; it needs tensors on CUDA; .* on cpu"):
        Engine(tiny_model("llama-gqa"), num_blocks=20, attention_backend="flash_attention_3")


def test_an_unknown_backend_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidArgument, match="is 'flash'; it must be one of auto, flash_attention_3"):
        Engine(tiny_model("llama-gqa"), num_blocks=20, attention_backend="flash")


class OnCuda:
    """A cache that looks to `refusal` as if it were on a GPU."""

    def __init__(self, **changes: Any) -> None:
        sizes = {"num_blocks": 3, "block_size": 16, "num_layers": 1, "num_kv_heads": 2, "head_size": 64}
        self._cache = KVCache(**{**sizes, "dtype": torch.bfloat16, **changes})
        self.device = torch.device("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


REFUSALS: list[tuple[dict[str, Any], tuple[int, int], str]] = [
    ({"dtype": torch.float32}, (9, 0), "float16 or bfloat16; these are torch.float32"),
    ({"layout": "HND"}, (9, 0), "the layout NHD; these have HND"),
    ({}, (8, 0), "compute capability 9; this has 8.0"),
    ({"head_size": 260}, (9, 0), "head size of a multiple of 8, at most 256; this is 260"),
]


@pytest.mark.parametrize(("changes", "capability", "reason"), REFUSALS)
def test_each_refusal_says_what_is_needed_and_what_there_is(
    changes: dict[str, Any], capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockyard_engine.attention.flash_attention.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cache: Any = OnCuda(**changes)
    refusal = FlashAttention3.refusal(cache)
    assert refusal is not None
    assert refusal.startswith("it needs ")
    assert re.search(reason, refusal)


def test_a_missing_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard_engine.attention.flash_attention.find_spec", lambda name: None)
    cache: Any = OnCuda()
    assert (FlashAttention3.refusal(cache) or "").endswith("flash_attn_interface), which is not installed")


def test_a_package_that_cannot_be_imported_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, because its compiled part was built for another torch."""
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("blockyard_engine.attention.flash_attention.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cache: Any = OnCuda()
    refusal = FlashAttention3.refusal(cache)
    assert refusal is not None
    assert refusal.endswith("which cannot be imported: ImportError: undefined symbol: _ZN3c10")
    assert next(backend for backend in backends.BACKENDS if backend.refusal(cache) is None) is SdpaBackend


GPUS = [
    ((9, 0), 16, "flash_attention_3"),
    ((9, 0), 256, "flash_attention_3"),
    ((8, 0), 16, "sdpa"),
]


@pytest.mark.parametrize(("capability", "block_size", "chosen"), GPUS)
def test_the_first_that_can_serve_is_taken(
    capability: tuple[int, int], block_size: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockyard_engine.attention.flash_attention.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cache: Any = OnCuda(block_size=block_size)
    first = next(backend for backend in backends.BACKENDS if backend.refusal(cache) is None)
    assert first.name == chosen


def test_names_are_unique_and_sdpa_is_the_last() -> None:
    names = [backend.name for backend in backends.BACKENDS]
    assert len(set(names)) == len(names)
    assert names[-1] == "sdpa"
