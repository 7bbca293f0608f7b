"""The engine versions that the adapters support, and how pip installs them. Imports none of them."""

from __future__ import annotations

from .signatures import Engine

VLLM = Engine("vLLM", "vllm", ("0.32", "0.33"), "'vllm>=0.32,<0.34'")
SGLANG = Engine("SGLang", "sglang", ("0.5.23",), "sglang==0.5.23")
LMCACHE = Engine("LMCache", "lmcache", ("0.5.6",), "lmcache==0.5.6")
TRANSFORMERS = Engine("transformers", "transformers", ("5.19",), "'blockyard[engine]'", "torch")
