"""Custom schedulers on Blockyard: the example of docs/vllm.md, and classes that are refused."""

from __future__ import annotations

import re
import sys
import textwrap
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from blockyard_testing.places import ROOT
from blockyard_vllm import BlockPool, KVCacheManager, OnBlockyard

from .engine import LEVELS, Engine, request_of

PAGE = (ROOT / "docs" / "vllm.md").read_text()
#: What the page calls YourScheduler.
YOURS = """
from vllm.v1.core.sched.scheduler import Scheduler

class YourScheduler(Scheduler):
    num_steps = 0

    def schedule(self, *args, **kwargs):
        self.num_steps += 1
        return super().schedule(*args, **kwargs)

"""
#: The module of a fork, with another line at its end.
FORK = """
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

class Fork(Scheduler):
    def __init__(self, vllm_config, kv_cache_config, **given):
        super().__init__(vllm_config, kv_cache_config=kv_cache_config, **given)
        self.kv_cache_manager = MANAGER(
            kv_cache_config=kv_cache_config,
            max_model_len=self.max_model_len,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            log_stats=True,
        )
"""


def module_of(source: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of this source, which can be found by its name."""
    module = ModuleType("a_fork")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, module.__dict__)
    return module


def tokens_of(level: str, **others: Any) -> tuple[Engine, dict[str, list[int]]]:
    """What some requests that share a prompt get, and the engine when they have ended."""
    engine = Engine(level, 60, max_model_len=512, max_num_batched_tokens=128, **others)
    for number in range(12):
        engine.add(request_of(f"r{number}", list(range(number % 3, 100)), 40))
        engine.step()
    engine.drain()
    return engine, engine.tokens


@pytest.mark.parametrize("level", LEVELS)
def test_example_of_the_page_serves_as_stock_does(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"^    from .* import OnBlockyard\n(?:    .*\n|\n)+", PAGE, flags=re.MULTILINE)
    ours = module_of(YOURS + textwrap.dedent(source), monkeypatch).BlockyardScheduler
    engine, tokens = tokens_of(level, scheduler_class=ours)
    stock, expected = tokens_of("stock")
    assert (tokens, engine.hits) == (expected, stock.hits)
    assert engine.scheduler.num_steps > 40
    assert (
        type(engine.manager) is KVCacheManager
        if level == "tokens"
        else isinstance(engine.manager.block_pool, BlockPool)
    )
    engine.require_empty()


@pytest.mark.parametrize("base", [AsyncScheduler, DiffusionAsyncScheduler])
def test_other_schedulers_of_vllm_can_be_the_base(base: type) -> None:
    ours = type("Ours", (OnBlockyard, base), {})
    engine, tokens = tokens_of("tokens", asynchronous=True, scheduler_class=ours)
    assert tokens == tokens_of("stock", asynchronous=True)[1]
    assert isinstance(engine.manager, KVCacheManager)
    engine.require_empty()


def test_manager_made_in_the_forks_module_is_blockyards(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(FORK.replace("MANAGER", "KVCacheManager"), monkeypatch)
    stock = module.KVCacheManager
    engine, tokens = tokens_of("tokens", scheduler_class=type("Ours", (OnBlockyard, module.Fork), {}))
    assert isinstance(engine.manager, KVCacheManager)
    assert tokens == tokens_of("stock")[1]
    assert module.KVCacheManager is stock
    engine.require_empty()


def test_fork_with_its_own_block_manager_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would silently serve without Blockyard."""
    source = FORK.replace("MANAGER", "ForkManager") + "\nclass ForkManager(KVCacheManager): pass\n"
    ours = type("Ours", (OnBlockyard, module_of(source, monkeypatch).Fork), {})
    with pytest.raises(ValueError, match=r"Ours uses a_fork\.ForkManager; only schedulers that create vLLM's"):
        tokens_of("tokens", scheduler_class=ours)


def test_scheduler_before_the_mixin_is_refused() -> None:
    """Its `__init__` would never call the mixin's."""
    with pytest.raises(TypeError, match="Ours names Scheduler before OnBlockyard; name OnBlockyard first"):
        type("Ours", (Scheduler, OnBlockyard), {})
