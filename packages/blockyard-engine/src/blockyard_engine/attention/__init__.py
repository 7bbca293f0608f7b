"""Attention over the KV tensors: the interface, the backends, and what transformers needs to call them."""
