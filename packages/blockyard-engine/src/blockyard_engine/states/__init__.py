"""Layers that keep a state a sequence: linear attention, state-space models, short convolutions.

    learning    which of a model's modules keep states, and of what size, seen while it runs a few tokens
    mixing      a step's tokens through such a module, each sequence with its own state

Both know transformers' one interface for such layers (`LinearAttentionCacheLayerMixin`) and no architecture by name.
"""
