"""Whole engines on the same model and the same requests: ours, transformers' two ways, and vLLM (docs/benchmarks.md)."""
