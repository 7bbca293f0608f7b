"""Eviction policies: which idle cached block goes next. Each is one file; `base` is the contract."""
