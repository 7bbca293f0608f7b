"""A pytest plugin: every block manager that vLLM's tests make is Blockyard's.

vLLM's tests make managers, pools and schedulers themselves, under vLLM's names. So for these tests the names lead to
Blockyard for good; in use, `blockyard_vllm` leaves them alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest
import vllm.v1.core.block_pool as block_pool
import vllm.v1.core.kv_cache_coordinator as coordinator
import vllm.v1.core.kv_cache_manager as kv_cache_manager
import vllm.v1.core.sched.scheduler as scheduler

from blockyard_vllm import BlockPool, KVCacheManager, Options
from blockyard_vllm.manager import refusal_reason
from blockyard_vllm.scheduler import make_manager

#: "auto", "tokens" or "names".
LEVEL = os.environ.get("BLOCKYARD_LEVEL", "auto")
Stock = kv_cache_manager.KVCacheManager
ARGUMENTS = ("kv_cache_config", "max_model_len", "scheduler_block_size", "hash_block_size")
#: Per test: which managers it made.
made: Counter[str] = Counter()
#: Per test: Blockyard's pools below them.
pools: list[Any] = []
levels: dict[str, list[str]] = {}


class Factory(type):
    """Stands where vLLM's code and tests say KVCacheManager."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        manager = make_manager(Options(level="names" if LEVEL == "names" else "auto"), **given)
        is_tokens = isinstance(manager, KVCacheManager)
        made["tokens" if is_tokens else "names"] += 1
        pools.append(manager.block_pool.pool)
        assert LEVEL != "auto" or isinstance(manager, KVCacheManager) == (not refusal_reason(**given))
        return manager

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Stock)

    def __getattr__(cls, name: str) -> Any:
        return getattr(Stock, name)


class AnyManager(metaclass=Factory):
    """Is never instantiated: a call makes one of our managers."""


def pytest_configure(config: pytest.Config) -> None:
    """Before vLLM's tests are imported."""
    block_pool.BlockPool = coordinator.BlockPool = BlockPool  # type: ignore[misc, attr-defined]
    kv_cache_manager.KVCacheManager = scheduler.KVCacheManager = AnyManager  # type: ignore[misc, assignment, attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Note which managers a test makes; of pools that a test makes by itself nothing is known here."""
    made.clear()
    pools.clear()
    result = yield
    levels[item.nodeid] = sorted(made)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """Check the pools that a test made, whatever its result."""
    result = yield
    for pool in pools:
        pool.check()
    return result


def pytest_sessionfinish() -> None:
    """Write the notes to the file that was asked for."""
    if "BLOCKYARD_LEVELS_FILE" in os.environ:
        with open(os.environ["BLOCKYARD_LEVELS_FILE"], "w") as file:
            json.dump(levels, file)
