"""Configs of published models, as the package has them; the tests work out their bytes by hand."""

from __future__ import annotations

from blockyard.sizing import known_model

LLAMA_2_7B = known_model("llama-2-7b").config
LLAMA_3_8B = known_model("llama-3-8b").config
SMOLLM2_135M = known_model("smollm2-135m").config
QWEN_2_5_7B = known_model("qwen2.5-7b").config
MISTRAL_7B_V0_1 = known_model("mistral-7b-v0.1").config
GEMMA_2_2B = known_model("gemma-2-2b").config
GEMMA_3_1B = known_model("gemma-3-1b").config
GEMMA_3_4B = known_model("gemma-3-4b").config
GPT_OSS_20B = known_model("gpt-oss-20b").config
DEEPSEEK_V2 = known_model("deepseek-v2").config
DEEPSEEK_V3 = known_model("deepseek-v3").config
FALCON_7B = known_model("falcon-7b").config
FALCON_40B = known_model("falcon-40b").config
QWEN_3_NEXT_80B = known_model("qwen3-next-80b").config
JAMBA_V0_1 = known_model("jamba-v0.1").config
BAMBA_9B = known_model("bamba-9b").config
