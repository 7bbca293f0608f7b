"""Who computes what, and when: no tensor comes near it."""

from .limits import CacheLimits

__all__ = [
    "CacheLimits",
]
