"""Random programs with a connector whose loads fail, and with sliding windows: level "names" beside stock vLLM."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from .connector import CONFIG
from .engine import BLOCK_SIZE, Engine
from .test_programs import Program


class FailingLoads(Program):
    """A step of four, some blocks of a request that runs are said to hold nothing."""

    num_failed = 0

    def step(self) -> None:
        """One of each, perhaps with blocks that failed."""
        planned = [engine.schedule() for engine in self.engines]
        assert all(one == planned[0] for one in planned)
        if len(self.engines[0].pending) <= self.engines[0].ahead:
            return
        failed = self.failed_blocks(self.engines[0].pending[0][0])
        self.num_failed += len(failed)
        for engine in self.engines:
            engine.finish_step(failed)

    def failed_blocks(self, output: Any) -> frozenset[int]:
        """Up to three blocks of one request of a step. All engines' blocks are the same."""
        names = sorted(set(output.num_scheduled_tokens) & set(self.engines[0].scheduler.requests))
        if not names or self.random.random() > 0.25:
            return frozenset()
        name = self.random.choice(names)
        tables = [engine.manager.get_block_ids(name)[0] for engine in self.engines]
        assert all(table == tables[0] for table in tables)
        return frozenset(self.random.sample(tables[0], min(len(tables[0]), self.random.randrange(1, 4))))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("num_blocks", [60, 400])
@pytest.mark.parametrize("seed", range(4))
def test_failed_loads_are_recomputed(seed: int, num_blocks: int, policy: str) -> None:
    """What was cached of them is forgotten, or computed again, as with stock vLLM; nothing leaks."""
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128}
    settings["connector"] = CONFIG | {"kv_load_failure_policy": policy}  # type: ignore[assignment]
    engines = [Engine(level, num_blocks, **settings) for level in ("stock", "names")]
    program = FailingLoads(seed, engines)
    program.run(250)
    assert program.num_failed > 0


def test_connector_needs_level_names() -> None:
    """Level "tokens" cannot hold blocks by id."""
    with pytest.raises(ValueError, match="does not support this model: a KV connector may hold blocks"):
        Engine("tokens", 40, connector=CONFIG)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_blocks", [60, 400])
@pytest.mark.parametrize("seed", range(3))
def test_window_models_behave_as_in_vllm(seed: int, num_blocks: int, asynchronous: bool) -> None:
    """A group of full attention and one of a sliding window: most steps go the short way, and windows still move."""
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "asynchronous": asynchronous}
    engines = [Engine(level, num_blocks, window=3 * BLOCK_SIZE, **settings) for level in ("stock", "names")]
    short = []
    has_room = engines[1].manager._has_room
    engines[1].manager._has_room = lambda *args: short.append(has_room(*args)) or short[-1]
    Program(seed, engines).run(250)
    assert 0 < sum(short) < len(short)
