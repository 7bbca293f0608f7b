"""Blocks alone: the pool, its queue and its index, without sequences."""
