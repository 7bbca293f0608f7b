"""A pool whose blocks are known by names that the caller has: `from blockyard.named import NamedPool`.

docs/which-level.md says who needs one.
"""

from .answers import NameEvent
from .core.pools.named_pool import NamedPool

__all__ = ["NameEvent", "NamedPool"]
