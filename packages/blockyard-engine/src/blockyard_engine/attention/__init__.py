"""Attention over the KV tensors: what a step asks of it, who computes it, and how transformers calls it."""
