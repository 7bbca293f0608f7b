"""Checks whether a model can be served: its masks and cache, and a trial against its own forward.

    masks     the masks of its layers and transformers' cache for it, compared with the layers' windows
    trial     the engine's logits compared with the model's own: chunks, a batch, a prefix hit

`probe` runs them when an engine is made, after it has checked the config.
"""
