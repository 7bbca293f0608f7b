"""Attention beyond scaled dot products: soft caps, sinks, latent vectors for keys and values."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard.sizing import KVCacheSpec
from blockyard_engine import Engine, PromptLookup, SamplingParams
from blockyard_engine.attention import softmax
from blockyard_engine.attention.latent import latent_layers
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model, tokens_of

LENGTHS = (1, 2, 15, 33, 5, 48, 64, 31)


@pytest.mark.parametrize("shape", ["gemma2", "gpt-oss", "deepseek-v3"])
def test_speculation_and_beams_equal_generate(shape: str) -> None:
    model = tiny_model(shape)
    prompts = [prompt * 2 for prompt in mixed_prompts((7, 12), shared=3)]
    engine = Engine(model, num_blocks=200, block_size=4, max_num_batched_tokens=20, speculation=PromptLookup())
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=12))) == reference_tokens(model, prompts, 12)
    ids = torch.tensor([prompts[0]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=3, do_sample=False, max_new_tokens=8)
    assert engine.beam_search(prompts[0], 3, 8)[0].token_ids == expected[0, len(prompts[0]) :].tolist()


@pytest.mark.parametrize("options", [{}, {"num_cpu_blocks": 120, "preemption": "swap"}], ids=["recompute", "swap"])
def test_few_blocks_change_no_token_of_latent_attention(options: dict[str, Any]) -> None:
    model = tiny_model("deepseek-v3")
    prompts = mixed_prompts((9, 14, 5, 20, 30, 3, 17), shared=4)
    engine = Engine(model, num_blocks=20, block_size=4, max_num_seqs=8, max_num_batched_tokens=12, **options)
    results = engine.generate(prompts, SamplingParams(max_tokens=30), on_step=lambda _: engine.cache.check())
    assert tokens_of(results) == reference_tokens(model, prompts, 30)
    assert engine.num_preemptions >= 5
    assert engine.cache.num_used_blocks == 0


def test_latent_attention_keeps_the_bytes_that_sizing_counts() -> None:
    model = tiny_model("deepseek-v3")
    engine = Engine(model, num_blocks=20)
    spec = KVCacheSpec.from_config(model.config, dtype="float32")
    assert engine.kv_cache.bytes_per_token == spec.bytes_per_token == 3 * (20 + 8) * 4
    assert engine.kv_cache.num_bytes == engine.kv_cache.data.nbytes == 20 * spec.bytes_per_block


def test_an_expansion_that_cannot_be_read_is_left_to_the_model() -> None:
    """If it is quantized or has an adapter, keys and values of all heads are cached, in their two widths."""

    class Adapted(torch.nn.Linear):
        pass

    model = tiny_model("deepseek-v3")
    for layer in latent_layers(model):
        layer.kv_b_proj.__class__ = Adapted
    prompts = mixed_prompts(LENGTHS, shared=20)
    engine = Engine(model, num_blocks=120, block_size=8, max_num_batched_tokens=30)
    assert (engine.shape.num_kv_heads, engine.shape.head_size, engine.shape.value_size) == (6, 20, 10)
    assert not engine.shape.extras
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=8))) == reference_tokens(model, prompts, 8)


@pytest.mark.parametrize("shape", ["gemma2", "gpt-oss"])
def test_logits_that_are_computed_in_slices_are_the_same(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "_MAX_LOGITS", 500)
    model = tiny_model(shape)
    prompts = mixed_prompts(LENGTHS, shared=20)
    engine = Engine(model, num_blocks=300, block_size=4, max_num_batched_tokens=200)
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=6))) == reference_tokens(model, prompts, 6)


def test_a_model_computes_as_before_between_the_steps_of_an_engine() -> None:
    model = tiny_model("deepseek-v3")
    prompts = mixed_prompts((9, 20))
    expected = reference_tokens(model, prompts, 4)
    engine = Engine(model, num_blocks=40)
    engine.add_request(prompts[0], SamplingParams(max_tokens=4))
    engine.step()
    ids = torch.tensor([prompts[1]])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
    assert own[0, 20:].tolist() == expected[1]


@pytest.mark.parametrize(("shape", "name"), [("gemma2", "softcap"), ("gpt-oss", "s_aux"), ("deepseek-v3", "latent")])
def test_a_kernel_that_lacks_a_feature_is_refused_by_name(shape: str, name: str) -> None:
    with pytest.raises(
        InvalidArgument, match=f"'flash_attention_3'; it does not support {name}, which this model needs"
    ):
        Engine(tiny_model(shape), num_blocks=20, attention_backend="flash_attention_3")
