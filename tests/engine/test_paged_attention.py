"""The backends for kernels that read block tables: what they hand over, checked against SDPA and transformers.

Here the kernels are their packages' promises written out (`paged_kernels`), on the CPU; `test_cuda` runs the real ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard.engine import Engine, SamplingParams, assembly
from blockyard.engine.attention import backends
from blockyard.engine.attention.flash_attention import FlashAttention2, FlashAttention3, TorchVarlen
from blockyard.engine.attention.flashinfer import FlashInfer
from blockyard.engine.attention.sdpa import SdpaBackend
from blockyard.storage import KVCache

from ..support import paged_kernels
from ..support.attention_steps import own_block_size, random_step, run_step
from ..support.memory_meter import CpuMeter
from ..support.seeds import run_seed
from ..support.tiny_models import mixed_prompts, reference_tokens, tiny_model, tokens_of

PAGED = [FlashAttention3, FlashInfer, FlashAttention2, TorchVarlen]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels by definition, where the backends look for the real ones."""
    for name, module in paged_kernels.MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", paged_kernels.flash_attention_forward)
    yield
    library._destroy()


# ---------------------------------------------------------------- one step


@pytest.mark.parametrize("backend", PAGED, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_a_step_equals_sdpa(backend: Any, num_heads: int, num_kv_heads: int) -> None:
    """Decodes, whole prompts, chunks behind a cached prefix, drafts; a group of all tokens and one with a window."""
    rng = np.random.default_rng(run_seed())
    for _ in range(5):
        step = random_step(rng, num_heads, num_kv_heads, block_size=own_block_size(backend, 8))
        expected = run_step(step, SdpaBackend)
        torch.testing.assert_close(run_step(step, backend), expected, rtol=1e-4, atol=1e-5)


def test_flashinfer_reads_either_layout() -> None:
    rng = np.random.default_rng(run_seed())
    step = random_step(rng, 6, 2, block_size=8)
    expected = run_step(step, SdpaBackend)
    torch.testing.assert_close(run_step(step, FlashInfer, layout="HND"), expected, rtol=1e-4, atol=1e-5)


def test_flashinfer_plans_a_group_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    wrapper = paged_kernels.MODULES["flashinfer"].BatchPrefillWithPagedKVCacheWrapper

    def counted(*arguments: Any) -> Any:
        made.append(wrapper(*arguments))
        return made[-1]

    monkeypatch.setattr(paged_kernels.MODULES["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper", counted)
    step = random_step(np.random.default_rng(run_seed()), 4, 4, block_size=8)
    run_step(step, FlashInfer)
    assert [one.num_plans for one in made] == [1, 1]  # four layers in two groups


# ---------------------------------------------------------------- whole engines


@pytest.mark.parametrize("backend", PAGED, ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", ["llama-gqa", "mistral-window", "gemma3"])
def test_an_engine_gives_transformers_tokens(backend: Any, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts, prefix hits, forks with copies: all tokens are generate()'s."""
    monkeypatch.setattr(backend, "refusal", classmethod(lambda cls, kv_cache: None))
    model = tiny_model(shape)
    prompts = mixed_prompts((33, 5, 40, 1, 64), shared=24)
    block_size = own_block_size(backend, 8)
    engine = Engine(
        model,
        num_blocks=80,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=23,
        attention_backend=backend.name,
    )
    assert engine.attention_backend == backend.name
    results = engine.generate(prompts, SamplingParams(max_tokens=9))
    assert tokens_of(results) == reference_tokens(model, prompts, 9)
    again = engine.generate(prompts, SamplingParams(max_tokens=9, n=2))
    assert [answer.token_ids for result in again for answer in result.completions] == [
        tokens for tokens in tokens_of(results) for _ in range(2)
    ]
    engine.cache.check()


@pytest.mark.parametrize("backend", PAGED, ids=lambda backend: backend.name)
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3"])
def test_the_largest_step_runs_through_it(backend: Any, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile of an engine that finds its memory: tables of one block, as wide as the longest sequence's."""
    monkeypatch.setattr(backend, "refusal", classmethod(lambda cls, kv_cache: None))
    meter = CpuMeter(512 * 2**20)
    monkeypatch.setattr(assembly, "meter_of", lambda _: meter)
    options = {"block_size": own_block_size(backend, 8), "max_num_seqs": 3, "attention_backend": backend.name}
    engine = Engine(tiny_model(shape), max_num_batched_tokens=40, **options)
    assert engine.attention_backend == backend.name
    assert engine.memory.step_bytes
    workspace = 128 * 2**20 if backend is FlashInfer else 0
    assert 0 <= engine.memory.step_bytes - workspace < 4 * 2**20


# ---------------------------------------------------------------- who is chosen


def test_on_a_cpu_the_choice_is_sdpa() -> None:
    assert Engine(tiny_model("llama-gqa"), num_blocks=20).attention_backend == "sdpa"


@pytest.mark.parametrize("name", [backend.name for backend in PAGED])
def test_a_backend_that_cannot_serve_says_why(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"attention_backend is '{name}'; it needs tensors on CUDA; .* on cpu"):
        Engine(tiny_model("llama-gqa"), num_blocks=20, attention_backend=name)


def test_an_unknown_backend_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidArgument, match="is 'flash'; it must be one of auto, flash_attention_3"):
        Engine(tiny_model("llama-gqa"), num_blocks=20, attention_backend="flash")


class OnCuda:
    """A cache as `refusal` sees it: what it would be on a GPU."""

    def __init__(self, **changes: Any) -> None:
        sizes = {"num_blocks": 3, "block_size": 16, "num_layers": 1, "num_kv_heads": 2, "head_size": 64}
        self._cache = KVCache(**{**sizes, "dtype": torch.bfloat16, **changes})
        self.device = torch.device("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


REFUSALS: list[tuple[Any, dict[str, Any], tuple[int, int], str]] = [
    (FlashAttention3, {"dtype": torch.float32}, (9, 0), "float16 or bfloat16; these are torch.float32"),
    (FlashAttention3, {"layout": "HND"}, (9, 0), "the layout NHD; these have HND"),
    (FlashAttention3, {}, (8, 0), "compute capability 9; this has 8.0"),
    (FlashAttention3, {"head_size": 260}, (9, 0), "head size of a multiple of 8, at most 256; this is 260"),
    (FlashAttention2, {}, (8, 0), "block size of a multiple of 256 tokens; this is 16"),
    (FlashAttention2, {"block_size": 256}, (7, 5), "compute capability 8 or above; this has 7.5"),
    (FlashInfer, {"head_size": 96}, (8, 0), "head size of 64, 128, 256; this is 96"),
    (FlashInfer, {"dtype": torch.float16}, (7, 0), "7.5 or above for torch.float16; this has 7.0"),
    (FlashInfer, {}, (7, 5), "8.0 or above for torch.bfloat16; this has 7.5"),
    (TorchVarlen, {}, (9, 0), "activate_flash_attention_impl.*'FA3'.* active is none of them on 9.0"),
]


@pytest.mark.parametrize(("backend", "changes", "capability", "reason"), REFUSALS)
def test_each_refusal_says_what_is_needed_and_what_there_is(
    backend: Any, changes: dict[str, Any], capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockyard.engine.attention.paged.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cache: Any = OnCuda(**changes)
    refusal = backend.refusal(cache)
    assert refusal is not None
    assert refusal.startswith("it needs ")
    assert re.search(reason, refusal)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard.engine.attention.paged.find_spec", lambda name: None)
    cache: Any = OnCuda()
    assert FlashInfer.refusal(cache) == "it needs flashinfer-python, which is not installed"


def test_torchs_varlen_is_refused_what_it_would_break_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large heads with FlashAttention 4; block tables, by the first versions of torch that had it."""

    def varlen_attn(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None:
        raise AssertionError("it must not be called")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    cache: Any = OnCuda(head_size=128)
    assert TorchVarlen.refusal(cache) is None
    larger: Any = OnCuda(head_size=192)
    assert (TorchVarlen.refusal(larger) or "").endswith("at most 128; this is 192")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    assert re.search("needs a later torch .* the torch here is", TorchVarlen.refusal(cache) or "")


def test_a_package_that_cannot_be_imported_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiled part was built for another torch, say."""
    (tmp_path / "flash_attn_interface.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("blockyard.engine.attention.paged.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cache: Any = OnCuda()
    refusal = FlashAttention3.refusal(cache)
    assert refusal is not None
    assert refusal.endswith("which cannot be imported: ImportError: undefined symbol: _ZN3c10")
    assert next(backend for backend in backends.BACKENDS if backend.refusal(cache) is None) is FlashInfer


GPUS = [
    ((9, 0), 16, "flash_attention_3"),
    ((8, 0), 16, "flashinfer"),
    ((8, 0), 256, "flashinfer"),
    ((7, 0), 16, "sdpa"),
]


@pytest.mark.parametrize(("capability", "block_size", "chosen"), GPUS)
def test_the_first_that_can_serve_is_taken(
    capability: tuple[int, int], block_size: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockyard.engine.attention.paged.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cache: Any = OnCuda(block_size=block_size)
    first = next(backend for backend in backends.BACKENDS if backend.refusal(cache) is None)
    assert first.name == chosen


def test_names_are_unique_and_sdpa_is_the_last() -> None:
    names = [backend.name for backend in backends.BACKENDS]
    assert len(set(names)) == len(names)
    assert names[-1] == "sdpa"
