"""The known model families, found by model type or architecture.

A row has the fields that the family reads, with the class's defaults, the rule for the kinds of its layers, and aliases
of fields. A config field that may change the cache (`field_names`) is rejected unless it is read or listed as harmless.
"""

from __future__ import annotations

import re

from .attention_families import ATTENTION_FAMILIES
from .family import Family
from .state_families import STATE_FAMILIES


def find_family(*names: str) -> Family | None:
    """Return the family of the first known model type or architecture in `names`, or None. O(names)."""
    return next((found for name in names if (found := _BY_NAME.get(_plain(name))) is not None), None)


def known_model_types() -> list[str]:
    """Return the model types of all families, sorted."""
    return sorted(name for family in _FAMILIES for name in family.model_types)


def wrapped_model_type(model_type: str) -> str | None:
    """Return the model type of a multimodal model's text layers if their config does not name one; None if unknown."""
    return _WRAPPERS.get(_plain(model_type))


def _plain(name: str) -> str:
    """Return a model type or class name as lower-case letters and digits, without suffixes like ForCausalLM."""
    stem = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|LMHead|TextModel)$", "", name)
    return re.sub(r"[^a-z0-9]", "", stem.lower())


_FAMILIES = (*ATTENTION_FAMILIES, *STATE_FAMILIES)
_BY_NAME = {_plain(name): family for family in _FAMILIES for name in family.model_types}
#: Multimodal models, by the model type of their text layers.
_WRAPPED = {
    "aria_text": "aria",
    "chatglm": "glm4v_9b",
    "cohere2": "aya_vision cohere2_vision",
    "cosmos3_edge_text": "cosmos3_edge",
    "deepseek_ocr2_text": "deepseek_ocr2",
    "deepseek_v2": "deepseek_vl_v2 deepseek_ocr DeepseekOCR",
    "deepseek_v3": "kimi_k25 kimi_vl",
    "emu3_text_model": "emu3",
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe ernie4_5_moe_vl",
    "exaone4": "exaone4_5",
    "gemma": "paligemma",
    "gemma3_text": "gemma3 shieldgemma2",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
    "glm4v_moe_text": "glm4v_moe",
    "glm4v_text": "glm46v glm4v glmga",
    "glm_ocr_text": "glm_ocr",
    "granite": "granite_speech granite_speech_plus",
    "hunyuan_vl_text": "hunyuan_vl",
    "hyperclovax": "hyperclovax_vision_v2 hyperclovax_vlm",
    "lfm2": "lfm2_vl lfm2-vl",
    "llama": "deepseek_vl deepseek_vl_hybrid multi_modality granite4_vision idefics3 janus llava llava_next "
    "llava_next_video perception_lm smolvlm video_llava vipllava glmasr voxtral ultravox",
    "llama4_text": "llama4",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "mistral": "idefics2 mistral3 pixtral",
    "muse_glimmer_text": "muse_glimmer",
    "nemotron_h": "nemotron_h_omni NemotronH_Nano_VL_V2",
    "phi3": "phi3_v",
    "opt": "blip-2 instructblip instructblipvideo",
    "paddleocr_vl_text": "paddleocr_vl",
    "persimmon": "fuyu",
    "qwen2": "got_ocr2 fast_vlm internvl internvl_chat llava_onevision ovis ovis2 ovis2_5 pp_chart2table video_llama_3 "
    "qwen2_audio vibevoice_asr dots_ocr minicpmv minicpmo",
    "qwen2_5_omni_text": "qwen2_5_omni_thinker qwen2_5_omni",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3": "lighton_ocr qianfan_ocr fun_asr_nano qwen3_asr",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5 minicpmv4_6 minicpmv4_7",
    "qwen3_omni_moe_text": "qwen3_omni_moe_thinker qwen3_omni_moe",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "cosmos3_omni qwen3_vl",
    "step3_text": "step3_vl",
    "step3p5": "step3p7",
    "voxtral_realtime_text": "voxtral_realtime",
}
_WRAPPERS = {_plain(name): inner for inner, names in _WRAPPED.items() for name in names.split()}
