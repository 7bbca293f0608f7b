"""Checks of a model before it is served: models that the engine cannot serve are refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from blockyard_engine import Engine, ModelError, SamplingParams
from blockyard_engine import probe as probe_module
from blockyard_engine.attention import sdpa
from blockyard_engine.checks import masks
from blockyard_engine.checks.trial import (
    SMALL_LENGTH,
    can_afford,
    require_equal_logits,
    small_config,
    small_model,
)
from blockyard_engine.patching import PatchedModel
from blockyard_engine.probe import learn_shape, probe_model
from blockyard_testing.tiny_models import (
    SHAPES,
    WINDOWED,
    mixed_prompts,
    reference_tokens,
    tiny_model,
    tokens_of,
)

from ..support.architectures import small_architecture


def tried(model: Any, length: int = SMALL_LENGTH) -> None:
    """Run only the trial."""
    patched = PatchedModel(model)
    require_equal_logits(patched, learn_shape(patched), length)


# ---------------------------------------------------------------- the trial


@pytest.mark.parametrize("shape", [*SHAPES, *WINDOWED])
def test_models_that_are_served_pass_at_any_length(shape: str) -> None:
    for length in (16, 23, 64):
        tried(tiny_model(shape), length)


@pytest.mark.parametrize("name", ["zaya", "doge"])
def test_a_state_and_a_learned_mask_fail_the_trial(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all refusals by name or structure disabled, and states unknown."""
    names = (
        "refuse_unknown_fields",
        "require_known_cache",
        "require_plain_mask",
        "require_same_window",
        "learn_states",
    )
    for check in names:
        monkeypatch.setattr(probe_module, check, lambda *_: None)
    with pytest.raises(ModelError, match=r"computes other logits in the engine's steps .* at token \d+ of a prompt"):
        tried(small_architecture(name))


@pytest.mark.parametrize("error", [-1, 1], ids=["a token less", "a token more"])
def test_a_window_that_is_wrong_by_a_token_fails_the_trial(error: int) -> None:
    wrong = learn_shape(PatchedModel(tiny_model("mistral-window", sliding_window=21 + error)))
    with pytest.raises(ModelError, match="computes other logits"):
        require_equal_logits(PatchedModel(tiny_model("mistral-window")), wrong, 64)


@pytest.mark.parametrize(("shape", "asked"), [("gemma2", "softcap"), ("gpt-oss", "s_aux")])
def test_a_missing_cap_or_sink_fails_the_trial(shape: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched = PatchedModel(tiny_model(shape))
    learned = learn_shape(patched)
    assert learned.extras == {asked}
    without = staticmethod(lambda others: sdpa.Extras())
    monkeypatch.setattr(sdpa.Extras, "of", without)
    with pytest.raises(ModelError, match="computes other logits"):
        require_equal_logits(patched, learned, 64)


def test_attention_that_cannot_tell_sequences_apart_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa.SdpaStep, "__call__", _all_as_one_sequence)
    with pytest.raises(ModelError, match="computes other logits"):
        tried(tiny_model("llama-gqa"))


def _all_as_one_sequence(step: Any, layer: int, query: Any, key: Any, value: Any, scaling: Any, others: Any) -> Any:
    """Compute causal attention over all tokens of a step, ignoring sequences, without a cache."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], is_causal=True, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def test_half_precision_is_tried_within_its_rounding() -> None:
    tried(tiny_model("llama-gqa").to(torch.bfloat16))
    model = small_architecture("llama").to(torch.bfloat16)
    assert Engine(model, num_blocks=20).shape.windows == (0, 0)


# ---------------------------------------------------------------- what is tried, and when


def test_a_model_is_tried_once_until_its_shape_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = []
    monkeypatch.setattr(probe_module, "require_equal_logits", lambda patched, shape, length: trials.append(length))
    model = tiny_model("mistral-window", rms_norm_eps=1.5e-6)  # a config of its own: copies of it are tried once too
    for _ in range(3):
        probe_model(PatchedModel(model))
    assert trials == [SMALL_LENGTH, 16]
    probe_model(PatchedModel(model), 20)
    assert trials == [SMALL_LENGTH, 16, 16]


def test_a_model_without_a_small_copy_is_tried_beyond_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = []
    monkeypatch.setattr(probe_module, "require_equal_logits", lambda patched, shape, length: trials.append(length))
    monkeypatch.setattr(probe_module, "small_config", lambda config: 1 / 0)
    probe_model(PatchedModel(tiny_model("mistral-window", rms_norm_eps=1.6e-6)))
    assert trials == [16 + 21]
    monkeypatch.setattr(probe_module, "can_afford", lambda patched, length: False)
    with pytest.raises(ModelError, match="could not be tried: no small copy of it can be made, and 37 tokens"):
        probe_model(PatchedModel(tiny_model("mistral-window", rms_norm_eps=1.7e-6)))


def test_a_trial_runs_if_it_takes_seconds_and_not_minutes() -> None:
    model = tiny_model("llama-gqa")
    assert can_afford(PatchedModel(model), 16)
    with torch.device("meta"):
        config = transformers.LlamaConfig(hidden_size=4096, num_hidden_layers=32)
        large = transformers.LlamaForCausalLM(config)
    patched = PatchedModel(model)
    patched.model = large
    assert not can_afford(patched, 16)


def test_a_trial_leaves_the_model_and_random_numbers_as_they_were() -> None:
    model = tiny_model("gemma2")
    before = model.config._attn_implementation
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    probe_model(PatchedModel(model))
    assert torch.equal(torch.rand(4), expected)
    assert model.config._attn_implementation == before


# ---------------------------------------------------------------- small copies


def test_a_small_copy_keeps_masks_windows_and_shared_heads() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=26, sliding_window=512, num_key_value_heads=1)
    copy = small_config(config)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    assert copy.layer_types == kinds
    assert (copy.num_hidden_layers, copy.sliding_window, copy.num_key_value_heads) == (6, 13, 1)
    model = small_model(transformers.Gemma3ForCausalLM, copy)
    assert model.num_parameters() < 300_000
    assert learn_shape(PatchedModel(model)).windows == (13,) * 5 + (0,)


# ---------------------------------------------------------------- masks, by their functions


@pytest.mark.parametrize("max_model_len", [15, 64, 4096, 131072])
@pytest.mark.parametrize("window", [0, 1, 13, 64])
def test_masks_are_distinguished_at_any_size(window: int, max_model_len: int) -> None:
    window = window if window < max_model_len else 0

    def mask(function: Any) -> torch.Tensor:
        return masks._described(mask_function=function)

    def own(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - (window or max_model_len))

    masks.require_plain_mask(0, mask(own), window, max_model_len)
    wrong = {
        "later tokens": lambda b, h, q, k: own(b, h, q, k) | (k == q + 1),
        "a token more": lambda b, h, q, k: (k <= q) & (k > q - window - 1),
        "a chunk": lambda b, h, q, k: own(b, h, q, k) & (q // (max_model_len - 1) == k // (max_model_len - 1)),
        "not the first": lambda b, h, q, k: own(b, h, q, k) & (k != 0),
    }
    for name, function in wrong.items():
        if (name == "a token more" and not window) or (name == "a chunk" and window):
            continue
        with pytest.raises(ModelError, match="in layer 0 token"):
            masks.require_plain_mask(0, mask(function), window, max_model_len)
    with pytest.raises(ModelError, match="layer 7 passes its own 'attention_mask'"):
        masks.require_plain_mask(7, torch.ones(1, 1, 3, 3), window, max_model_len)


# ---------------------------------------------------------------- refusals that name the reason


def test_a_chunk_as_long_as_the_context_is_served_and_a_shorter_one_refused() -> None:
    model = _llama4(attention_chunk_size=16)
    with pytest.raises(ModelError, match=r"attention_chunk_size is 16.*max_model_len=16 makes it one chunk"):
        Engine(model, num_blocks=40)
    engine = Engine(model, num_blocks=40, max_model_len=16, block_size=4)
    prompts = [[token % 128 for token in prompt] for prompt in mixed_prompts((5, 11))]
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=5))) == reference_tokens(model, prompts, 5)


@pytest.mark.parametrize("max_model_len", [8, 64, 512])
def test_queries_scaled_by_the_index_in_the_row_are_refused(max_model_len: int) -> None:
    """A trial of the model itself cannot find them: its prompts do not reach index 8,192."""
    model = _llama4(attn_temperature_tuning=True, floor_scale=8192)
    with pytest.raises(ModelError, match=r"attn_temperature_tuning = True, and no_rope_layers has a 0"):
        Engine(model, num_blocks=40, block_size=4, max_model_len=max_model_len)


def test_models_whose_layers_all_have_positions_scale_no_queries() -> None:
    model = _llama4(attn_temperature_tuning=True, floor_scale=4, no_rope_layers=[1, 1])
    _require_reference_tokens(model)


def test_a_llama_4_without_scaled_queries_is_served() -> None:
    _require_reference_tokens(_llama4(floor_scale=4))


def test_the_trial_finds_queries_scaled_by_the_index_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of a small copy's trial exceed every length at which a scale begins."""
    monkeypatch.setattr(probe_module, "refuse_unknown_fields", lambda *_: None)
    model = _llama4(attn_temperature_tuning=True, floor_scale=8192, max_position_embeddings=256)
    with pytest.raises(ModelError, match="Llama4ForCausalLM computes other logits in the engine's steps"):
        Engine(model, num_blocks=40)


def _ministral3(original_max_position_embeddings: int) -> Any:
    """Return a small Ministral 3, whose queries are scaled by the logarithm of position over original context."""
    rope = {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": original_max_position_embeddings,
        "llama_4_scaling_beta": 0.5,
    }
    config = transformers.Ministral3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=None,
        max_position_embeddings=2 * original_max_position_embeddings,
        rope_parameters=rope,
    )
    return small_model(transformers.Ministral3ForCausalLM, config)


def test_queries_scaled_by_a_position_beyond_the_first_context_are_served() -> None:
    _require_reference_tokens(_ministral3(32))


def test_the_trial_goes_beyond_the_first_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that scales by the index in the row instead of the position, from 8,192 on, would be found."""
    modeling = sys.modules[transformers.Ministral3ForCausalLM.__module__]
    scale = modeling.get_llama_4_attn_scale

    def scale_by_place(positions: torch.Tensor, *numbers: Any) -> torch.Tensor:
        return scale(torch.arange(positions.shape[-1])[None].expand_as(positions), *numbers)

    monkeypatch.setattr(modeling, "get_llama_4_attn_scale", scale_by_place)
    with pytest.raises(ModelError, match="Ministral3ForCausalLM computes other logits in the engine's steps"):
        Engine(_ministral3(8192), num_blocks=40, max_model_len=64)


def _llama4(**fields: Any) -> Any:
    """Return a small Llama 4 with all positions in one chunk, whose second layer has no positions."""
    given = {"attention_chunk_size": 512, "attn_temperature_tuning": False, "no_rope_layers": [1, 0], **fields}
    config = transformers.Llama4TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        intermediate_size_mlp=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        eos_token_id=None,
        **{"max_position_embeddings": 512, **given},
    )
    return small_model(transformers.Llama4ForCausalLM, config)


def _require_reference_tokens(model: Any) -> None:
    engine = Engine(model, num_blocks=40, max_model_len=64, block_size=4, max_num_batched_tokens=17, max_num_seqs=3)
    prompts = [[token % 128 for token in prompt] for prompt in mixed_prompts((5, 11, 33))]
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=5))) == reference_tokens(model, prompts, 5)


def test_layers_that_call_attention_twice_are_refused() -> None:
    with pytest.raises(ModelError, match="layer 0 calls attention more than once per token"):
        Engine(small_architecture("diffllama"), num_blocks=8)


def test_a_state_that_transformers_cache_does_not_keep_is_refused_by_its_field() -> None:
    with pytest.raises(
        ModelError, match=r"config has \w*(conv|rnn|lru)\w* = .*: its layers keep a state that transformers"
    ):
        Engine(small_architecture("recurrent_gemma"), num_blocks=8, max_model_len=64)


def test_transformers_own_cache_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "refuse_unknown_fields", lambda *_: None)
    with pytest.raises(ModelError, match=r"generate\(\) keeps a DeepseekV4HCACache for layer 0"):
        learn_shape(PatchedModel(small_architecture("deepseek_v4")))
    with pytest.raises(ModelError, match="not causal attention over the last 13 tokens"):
        learn_shape(PatchedModel(small_architecture("moshi")))
