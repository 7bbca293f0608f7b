"""The KV tensors, and moves between them."""
