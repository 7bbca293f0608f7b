"""Data structures of policies: lists and heaps of blocks, memories of keys."""
