"""Blockyard in vLLM: `vllm serve MODEL --scheduler-cls blockyard.integrations.vllm.AsyncScheduler`.

Needs vLLM, which `blockyard` itself does not import. See docs/vllm.md.
"""

from ... import MissingExtra
from ..signatures import moved_methods

try:
    import vllm as _vllm  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        "blockyard.integrations.vllm needs vLLM 0.32 or 0.33 in the same environment: pip install 'vllm>=0.32,<0.34' "
        f"({error})"
    ) from error

from .manager import KVCacheManager
from .options import Options
from .pool import BlockPool
from .scheduler import AsyncScheduler, Scheduler

__all__ = ["AsyncScheduler", "BlockPool", "KVCacheManager", "Options", "Scheduler", "moved_methods"]
