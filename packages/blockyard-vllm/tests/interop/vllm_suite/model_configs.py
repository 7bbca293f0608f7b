"""A Hugging Face cache of configurations without weights: `python model_configs.py DIR`.

vLLM's tests name models to learn their shapes. Nothing is loaded, so a config.json and any tokenizer will do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REVISION = "0" * 40
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
#: The defaults of transformers are those of this model.
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "max_position_embeddings": 262144,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
QWEN_VL = QWEN2 | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 2048, "num_heads": 16, "patch_size": 14},
}
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
    "torch_dtype": "float16",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": OPT,
    "facebook/opt-350m": OPT
    | {"hidden_size": 1024, "word_embed_proj_dim": 512, "ffn_dim": 4096, "num_hidden_layers": 24},
    "Qwen/Qwen3-0.6B": QWEN3,
    "Qwen/Qwen1.5-7B": QWEN2,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": QWEN3_NEXT,
    "Qwen/Qwen2.5-VL-3B-Instruct": QWEN_VL,
    "llava-hf/llava-1.5-7b-hf": LLAVA,
}
#: What the processors of the two models with images ask for besides their tokenizer.
AS_IT_IS = dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), False)
IMAGES: dict[str, dict[str, Any]] = {
    "llava": AS_IT_IS | {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"},
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"},
}


def write_models(cache: Path) -> None:
    """Write every model into the hub cache `cache`."""
    for name, config in MODELS.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(REVISION)
        write_json(snapshot / "config.json", config)
        if images := IMAGES.get(config["model_type"]):
            write_json(snapshot / "preprocessor_config.json", images)
        write_tokenizer(snapshot)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # of vLLM's environment

    words = {"<unk>": 0, "</s>": 1, "<pad>": 2, "<image>": 32000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(words))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def write_json(file: Path, content: dict[str, Any]) -> None:
    """A JSON file."""
    file.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
