"""A model file as llama.cpp writes it, of one small layer: reading the real one's words alone takes eight seconds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
