"""Attention over the KV tensors: the interface, the backends, and their registration in transformers."""
