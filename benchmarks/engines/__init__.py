"""Whole engines on one model and one load: ours, transformers' two ways, and vLLM (docs/benchmarks.md)."""
