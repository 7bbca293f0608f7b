"""Sparse attention with an index (DeepSeek V3.2, GLM 5): tokens of `generate`, beyond the selected number."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blockyard import InvalidArgument
from blockyard.sizing import KVCacheSpec
from blockyard.storage import KVCache
from blockyard_engine import Engine, ModelError, PromptLookup, SamplingParams
from blockyard_engine.checks import trial
from blockyard_engine.handoff import peer_info
from blockyard_engine.model import quiet_transformers
from blockyard_testing.thread_ranks import ThreadPeers
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tokens_of

from ..support.small_answers import GREEDY, NUM_TOKENS, answer, few_prompts, require_preempted_alike

#: Less than any prompt here has.
TOPK = 11
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "index_topk": TOPK,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "glm_moe_dsa, shared": {"indexer_types": ["full", "shared", "full", "shared"]},
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with quiet_transformers():
        yield


def indexed_model(name: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(name.partition(",")[0], **{**SIZES, **MODELS[name], **changes})
    return trial.small_model(lambda given: AutoModelForCausalLM.from_config(given, attn_implementation="eager"), config)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return indexed_model(request.param)


def load_engine(model: Any, **options: Any) -> Engine:
    given = {"num_blocks": 800, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 24, **options}
    engine = Engine(model, **given)
    with torch.inference_mode():
        engine.kv_cache.data[:, 1:] = torch.nan  # shows in every logit which comes to see it
    return engine


@pytest.mark.parametrize("name", MODELS)
def test_the_index_changes_the_answers(name: str) -> None:
    """With the same weights and all tokens selected the answers differ, so the other tests can fail."""
    models = indexed_model(name), indexed_model(name, index_topk=1000)
    selected, all_of_them = (reference_tokens(model, few_prompts(), NUM_TOKENS) for model in models)
    assert all(one != other for one, other in zip(selected, all_of_them, strict=True))


@pytest.mark.parametrize(
    "sizes", [{}, {"max_num_batched_tokens": 512}, {"max_num_seqs": 1, "max_num_batched_tokens": 1}]
)
def test_tokens_equal_generate_in_chunks_and_after_hits(model: Any, sizes: dict[str, int]) -> None:
    prompts = few_prompts()
    expected = reference_tokens(model, prompts, NUM_TOKENS)
    engine = load_engine(model, **sizes)
    assert answer(engine, prompts) == expected
    results = engine.generate(prompts, GREEDY)
    assert tokens_of(results) == expected
    assert [result.num_cached_tokens for result in results] == [72, 60, 64, 36]


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_preempted_sequences_get_the_same_tokens(model: Any, way: str) -> None:
    options = {"num_cpu_blocks": 60} if way == "swap" else {}
    require_preempted_alike(model, load_engine(model, num_blocks=38, preemption=way, **options))


def test_forks_beams_and_drafts_equal_generate(model: Any) -> None:
    engine = load_engine(model, max_num_seqs=9, speculation=PromptLookup())
    prompts = mixed_prompts((21, 34), shared=9)
    greedy = SamplingParams(max_tokens=12, n=2, ignore_eos=True)
    results = engine.generate(prompts, greedy)
    for expected, result in zip(reference_tokens(model, prompts, 12), results, strict=True):
        assert [each.token_ids for each in result.completions] == [expected] * 2
    for prompt, found in zip(prompts, engine.beam_search_batch(prompts, num_beams=3, max_tokens=9), strict=True):
        ids = torch.tensor([prompt])
        asked = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 9, "do_sample": False}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **asked)
        assert [beam.token_ids for beam in found] == [row[len(prompt) :].tolist() for row in output]
    engine.cache.check()


def test_after_the_engine_the_model_computes_as_before(model: Any) -> None:
    prompts = few_prompts()[:1]
    expected = reference_tokens(model, prompts, NUM_TOKENS)
    assert answer(load_engine(model), prompts) == expected
    ids = torch.tensor(prompts)
    output = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
    assert output[0, len(prompts[0]) :].tolist() == expected[0]


# ---------------------------------------------------------------- bytes


def test_sizing_counts_index_keys_as_the_engine_keeps_them() -> None:
    """4 layers of 24 + 8 elements per token, and 16 of an index key, 4 bytes each."""
    model = indexed_model("deepseek_v32")
    spec = KVCacheSpec.from_config(model.config, block_size=4, dtype="float32")
    assert spec.bytes_per_token == 4 * (24 + 8 + 16) * 4
    assert spec.num_layers_by_kind == {"latent indexed": 4}
    engine = load_engine(model, num_blocks=None, kv_cache_memory_bytes=2**20)
    assert engine.kv_cache.bytes_per_block == spec.bytes_per_block == engine.cache.config.block_bytes
    assert engine.cache.config.num_blocks == 2**20 // spec.bytes_per_block


def test_config_of_layers_that_reuse_a_selection_counts_no_index_key() -> None:
    shared = indexed_model("glm_moe_dsa, shared")
    spec = KVCacheSpec.from_config(shared.config, block_size=4, dtype="float32")
    assert spec.bytes_per_token == (4 * (24 + 8) + 2 * 16) * 4
    assert load_engine(shared).kv_cache.bytes_per_token == 4 * (24 + 8 + 16) * 4, "the engine has room in all layers"


def test_bytes_per_token_equal_published_ones() -> None:
    """DeepSeek V3.2 in bfloat16: 61 layers of 512 + 64 + 128 elements."""
    config = AutoConfig.for_model("deepseek_v32")
    assert KVCacheSpec.from_config(config, dtype="bfloat16").bytes_per_token == 61 * (512 + 64 + 128) * 2
    assert KVCacheSpec.from_config(config, dtype="bfloat16", tensor_parallel_size=8).bytes_per_token == 85_888


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "minimax_m3_vl_text", "index_topk": None, "index_topk_blocks": 16},
            "kv_lora_rank is .*; it may change the cache",
        ),
        ({"model_type": "deepseek_v4", "index_topk": 512}, "model_type is 'deepseek_v4'; the layers of such a"),
        ({"index_topk_freq": 4}, "index_topk_freq is 4; it may change the cache"),
        ({"index_head_dim": None}, "index_head_dim is missing"),
        ({"index_head_dim": 0}, "index_head_dim is 0; it must be from 1"),
    ],
)
def test_invalid_index_sizes_are_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KVCacheSpec.from_config({"model_type": "deepseek_v32", **SIZES, **fields}, dtype="float32")


# ---------------------------------------------------------------- what is refused


def test_ranks_and_hand_over_are_refused() -> None:
    model = indexed_model("deepseek_v32")
    with pytest.raises(InvalidArgument, match="tensor_parallel is 2 for a model with index keys"):
        load_engine(model, tensor_parallel=ThreadPeers(2))
    with pytest.raises(InvalidArgument, match="has index keys, which cannot be handed over"):
        peer_info(load_engine(model), "a", 1)
    with pytest.raises(InvalidArgument, match="does not support indices, latent"):
        load_engine(model, attention_backend="flash_attention_3")


def test_an_index_that_selects_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial detects an engine that attends to the first tokens instead of the best."""
    from blockyard_engine.attention import indexed

    own = indexed.IndexStep.select

    def select(*arguments: Any) -> torch.Tensor:
        found = own(*arguments)
        return torch.where(found < 0, found, torch.arange(found.shape[-1], dtype=torch.int32))

    monkeypatch.setattr(indexed.IndexStep, "select", select)
    with pytest.raises(ModelError, match="computes other logits in the engine's steps"):
        load_engine(indexed_model("deepseek_v32", index_topk=12, index_n_heads=31))


def test_index_keys_lie_in_blocks_after_keys_and_values() -> None:
    cache = KVCache(6, 4, 2, 1, 24, value_size=8, index_size=16, num_cpu_blocks=3)
    keys = torch.randn(5, 16)
    slots = cache.slots([8, 9, 10, 11, 17])
    cache.write(1, torch.ones(5, 1, 24), torch.ones(5, 1, 8), slots)
    cache.write_index(1, keys, slots)
    tables = cache.tables([[2, 4]], [5])
    expected = torch.cat((keys[:4], torch.zeros(1, 16), keys[4:], torch.zeros(2, 16)))[None]
    assert torch.equal(cache.gather_index(1, tables), expected)
    cache.swap_out([[2, 1], [4, 2]])
    cache.data.zero_()
    cache.swap_in([[1, 2], [2, 4]])
    assert torch.equal(cache.gather_index(1, tables), expected)
    assert not cache.gather_index(0, tables).any()
    with pytest.raises(InvalidArgument, match=r"index key has shape \(5, 15\)"):
        cache.write_index(1, keys[:, :15], slots)
    with pytest.raises(InvalidArgument, match=r"index_size 16; .* needs"):
        cache.combined(0)
    assert cache.bytes_per_block == 2 * 4 * (24 + 8 + 16) * 4
