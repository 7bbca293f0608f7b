"""A pool whose blocks the caller identifies by its own names: `from blockyard.named import NamedPool`.

docs/which-level.md explains when to use it.
"""

from .answers import NameEvent
from .core.pools.named_pool import NamedPool

__all__ = ["NameEvent", "NamedPool"]
