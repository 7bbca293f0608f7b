"""Blockyard in vLLM: `vllm serve MODEL --scheduler-cls blockyard.integrations.vllm.AsyncScheduler`.

Needs vLLM, which `blockyard` itself does not import. See docs/vllm.md.
"""

from ..signatures import moved_methods
from .manager import KVCacheManager
from .options import Options
from .pool import BlockPool
from .scheduler import AsyncScheduler, Scheduler

__all__ = ["AsyncScheduler", "BlockPool", "KVCacheManager", "Options", "Scheduler", "moved_methods"]
