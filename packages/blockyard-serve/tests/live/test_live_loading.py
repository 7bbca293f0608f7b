"""Blocks that a step fills from the CPU pool are shown as being loaded: those of its swap_ins, while they are held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from blockyard import CacheConfig, KVCacheManager
from blockyard_engine import SamplingParams
from blockyard_serve.live.call_queue import EngineStatus
from blockyard_serve.live.cells import LOADING, block_states
from blockyard_serve.live.frames import Frame
from blockyard_serve.live.snapshot import take_snapshot
from blockyard_testing.servers import tiny_engine


def test_engine_reports_the_blocks_its_latest_step_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the moves that the data plane was given."""
    engine = tiny_engine(num_blocks=16, max_num_seqs=4, num_cpu_blocks=60, preemption="swap")
    carried: list[Any] = []
    start_moves = engine.kv_cache.start_moves
    monkeypatch.setattr(engine.kv_cache, "start_moves", lambda moves: (carried.append(moves), start_moves(moves)))
    for number in range(10):
        engine.add_request(f"{'beginning ' * 4}{number % 4} end", SamplingParams(max_tokens=40, ignore_eos=True))
    num_loading = 0
    for _ in range(2000):
        if not engine.has_unfinished:
            break
        carried.clear()
        engine.step()
        wanted = [block for moves in carried for block in np.asarray(moves.swap_ins).reshape(-1, 2)[:, 1].tolist()]
        assert engine.loading_blocks.tolist() == wanted
        states = block_states(take_snapshot(engine.cache, EngineStatus(loading=engine.loading_blocks)))
        held = engine.cache.pool.ref_counts()
        assert {place + 1 for place in np.flatnonzero(states == LOADING)} == {b for b in wanted if held[b]}
        num_loading += len(wanted)
    assert not engine.has_unfinished
    assert num_loading > 1
    engine.cache.check()


def test_only_held_blocks_are_shown_as_loading() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=10, block_size=4, max_num_seqs=2, max_model_len=32))
    seq = cache.allocate(list(range(8)))
    held, *_ = cache.block_ids(seq).tolist()
    around = EngineStatus(loading=np.array([0, held, 9, 10, 99], np.int32))
    frame = Frame.of(take_snapshot(cache, around), 1)
    assert [place + 1 for place, cell in enumerate(frame.cells.content) if cell & 7 == LOADING] == [held]
    assert frame.totals["loading"] == 1
