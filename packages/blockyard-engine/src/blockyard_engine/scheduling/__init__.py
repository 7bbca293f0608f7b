"""Scheduling: which sequence computes which tokens in a step. Nothing here touches tensors."""

from .limits import CacheLimits

__all__ = [
    "CacheLimits",
]
