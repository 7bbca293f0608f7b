"""Blocks: their holders, the queue of free blocks, and the order of eviction."""
