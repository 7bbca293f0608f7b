"""Blockyard in vLLM: `vllm serve MODEL --scheduler-cls blockyard_vllm.AsyncScheduler`.

Importing this package does not import vLLM; the first use of a name does. See docs/vllm.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from blockyard.engine_versions import VLLM
from blockyard.signatures import engine_imports, moved_methods

if TYPE_CHECKING:
    from .adapter_options import Options
    from .manager import KVCacheManager
    from .pool import BlockPool
    from .scheduler import AsyncScheduler, OnBlockyard, Scheduler

__all__ = ["AsyncScheduler", "BlockPool", "KVCacheManager", "OnBlockyard", "Options", "Scheduler", "moved_methods"]

#: Which module each name comes from.
_MODULES = {
    "AsyncScheduler": "scheduler",
    "BlockPool": "pool",
    "KVCacheManager": "manager",
    "OnBlockyard": "scheduler",
    "Options": "adapter_options",
    "Scheduler": "scheduler",
}


def __getattr__(name: str) -> object:
    """Import a name on first use.

    Raises:
        MissingExtra: if vLLM is not installed or its version is unknown.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with engine_imports(VLLM, __name__):
        found: object = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = found
    return found
