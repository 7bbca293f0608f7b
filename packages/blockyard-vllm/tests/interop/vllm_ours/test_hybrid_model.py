"""A hybrid model, LFM2 with random weights in float32, in the whole engine: stock and ours, with states and without."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, Lfm2Config
from vllm import LLM, SamplingParams

SIZE, VOCABULARY = 128, 512
#: What vLLM reads of a configuration that transformers has under other names.
MORE = {"conv_dim": SIZE, "conv_dim_out": SIZE, "block_dim": SIZE, "block_norm_eps": 1e-5, "block_use_swiglu": True}
SHARED = [(number * 7 + number // 13) % 500 + 5 for number in range(800)]
PROMPTS = [SHARED + [(number * 11 + other * 31) % 500 + 5 for number in range(300)] for other in range(5)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the model: short convolutions, whose states are small, and attention in turns."""
    torch.manual_seed(3)
    config = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        full_attn_idxs=[1, 3],
        tie_word_embeddings=False,
    )
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weights in made.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, 1.0 if "embed" in name else 0.3)
    made.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | MORE | {"tie_embedding": False}))
    return str(tmp_path)


def answers(model: str, options: dict[str, Any] | None, **settings: Any) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt, one after another, and how many of it were cached. options: None for stock."""
    if options is not None:
        settings |= {"scheduler_cls": "blockyard_vllm.Scheduler"}
        settings |= {"additional_config": {"blockyard": options}}
    engine = LLM(
        model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        async_scheduling=False,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    found = [engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0] for prompt in PROMPTS]
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    if options is not None:
        scheduler.kv_cache_manager.block_pool.pool.check()
    assert scheduler.reset_prefix_cache()
    del engine
    gc.collect()
    return [list(one.outputs[0].token_ids) for one in found], [one.num_cached_tokens or 0 for one in found]


def test_tokens_equal_those_without_a_cache(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 tokens, hashes of 16: of 800 shared tokens vLLM hits 768, with our places all."""
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(name, value)
    cold, _ = answers(model, None, enable_prefix_caching=False)
    assert len({tuple(tokens) for tokens in cold}) == len(PROMPTS)
    cached: dict[str, Any] = {"enable_prefix_caching": True, "prefix_match_unit": 16}
    assert answers(model, None, **cached) == (cold, [0, 0, 768, 768, 768])
    assert answers(model, {"level": "names"}, **cached) == (cold, [0, 0, 768, 768, 768])
    places = ["branch", "ends", "pow2"]
    assert answers(model, {"state_checkpoints": places}, **cached) == (cold, [0, 512, 800, 800, 800])
