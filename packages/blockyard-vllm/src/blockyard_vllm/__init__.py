"""Blockyard in vLLM: `vllm serve MODEL --scheduler-cls blockyard_vllm.AsyncScheduler`.

Each name asks for vLLM when it is first used: importing this package does not need it. See docs/vllm.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from blockyard.engine_versions import VLLM
from blockyard.signatures import engine_imports, moved_methods

if TYPE_CHECKING:
    from .manager import KVCacheManager
    from .options import Options
    from .pool import BlockPool
    from .scheduler import AsyncScheduler, OnBlockyard, Scheduler

__all__ = ["AsyncScheduler", "BlockPool", "KVCacheManager", "OnBlockyard", "Options", "Scheduler", "moved_methods"]

#: Which module each name comes from.
_MODULES = {
    "AsyncScheduler": "scheduler",
    "BlockPool": "pool",
    "KVCacheManager": "manager",
    "OnBlockyard": "scheduler",
    "Options": "options",
    "Scheduler": "scheduler",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used. Raise `MissingExtra` without vLLM, or with a version that is not known."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with engine_imports(VLLM, __name__):
        found: object = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = found
    return found
