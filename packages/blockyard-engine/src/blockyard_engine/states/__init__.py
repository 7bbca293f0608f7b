"""Layers with a state per sequence: linear attention, state-space models, short convolutions.

    learning    finds the modules with states, and the states' sizes, by running a few tokens
    mixing      runs a step's tokens through such a module, each sequence with its own state

Both use transformers' one interface for such layers (`LinearAttentionCacheLayerMixin`) and know no architecture by
name.
"""
