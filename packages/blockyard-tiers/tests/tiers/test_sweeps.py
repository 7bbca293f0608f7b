"""Interrupts, failed allocations and hostile arguments in public calls: a random share, and each law that was broken.

`python -m tests.tiers.interrupts`, `tests.tiers.nomemory` and `tests.tiers.hostile_arguments` try all.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import blockyard
from blockyard import KVCacheManager, LayerGroup
from blockyard.config import cache_config
from blockyard_testing import seeds
from blockyard_testing.interrupter import Injection
from blockyard_testing.patience import wait_until
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.tiers_offload_world import SmallBlocks
from blockyard_tiers import FileTier, NameChain, Offload, TierAdapter
from blockyard_tiers.header import PAGE_BYTES, require_whole

from .hostile_arguments import TARGETS, Sweep
from .interrupts import OUTSIDE, interrupt_all
from .nomemory import sweep
from .offload_site import KINDS
from .test_offload import PROMPT, SmallEngine, served


def test_interrupt_anywhere_leaves_an_offload_and_its_tiers_sound() -> None:
    found = interrupt_all(0.0, run_seed(), most=draws(24, 4))
    seeds.lines.append(f"interrupts of offloads: {found.num_points} points, {dict(found.outcomes)}")
    assert found.broken == []
    assert found.outcomes["interrupted"] > found.num_points / 2


def test_hostile_argument_leaves_an_offload_and_its_tiers_sound() -> None:
    sample = Sweep()
    draw = random.Random(run_seed())
    sample.some_of(draw.choice(list(KINDS)), draw.sample(TARGETS, draws(24, 3)), 0.0, draw)
    seeds.lines.append(f"hostile arguments of offloads: {sample.num_tried}, {dict(sample.outcomes)}")
    assert sample.wrong == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="each allocation fails in a fork of the process")
@pytest.mark.skipif(not blockyard.compiled(), reason="of an interpreted core each line may fail in the middle")
def test_failed_allocation_leaves_an_offload_and_its_tiers_sound() -> None:
    pytest.importorskip("_testcapi")
    draw = random.Random(run_seed())
    found = list(sweep([], [draw.choice(list(KINDS))], share=0.02, seed=run_seed(), num_points=8))
    assert [point for point in found if point.outcome == "broken"] == []


def test_interrupted_chain_names_no_block_wrongly() -> None:
    """Names were added, and the digest that the next one follows was not."""
    tokens = list(range(40))
    right = NameChain(bytes(16), 4)
    right.extend(tokens)

    def chain_after(point: int) -> Injection:
        chain, injection = NameChain(bytes(16), 4), Injection(point, OUTSIDE)
        chain.extend(tokens[:12])
        injection.run(lambda: chain.extend(tokens[:30]))
        chain.extend(tokens)
        assert (chain.names, chain.digests) == (right.names, right.digests), injection.where
        assert chain.matches(tokens, 0, 10)
        return injection

    num_points = chain_after(-1).num_events
    assert num_points > 20
    for point in range(num_points):
        assert chain_after(point).where


class Evicting:
    """An engine that writes back, whose pool has cached prompts and few free blocks."""

    def __init__(self, folder: Path) -> None:
        self.engine = SmallEngine(folder, write="back")
        self.serve(range(5))

    def serve(self, numbers: range) -> None:
        for number in numbers:
            self.engine.serve(list(range(1000 * number, 1000 * number + 40)))
        self.engine.offload.poll()

    def evict(self) -> None:
        self.engine.cache.allocate(list(range(80_000, 80_060)))

    def require(self) -> None:
        """Compute a prompt that the offload does not see, evict it, and require that no object has its bytes."""
        engine = self.engine
        with suppress(KeyboardInterrupt):
            engine.cache.running()  # raises the interruption of a callback
        engine.cache.free(list(engine.cache.running()))
        seq = engine.cache.allocate(list(range(90_000, 90_060)))
        plan = engine.cache.reserve([seq], 60)
        engine.blocks.data[0, engine.cache.block_ids(seq)] = -7
        engine.cache.commit([seq], plan.num_scheduled)
        engine.cache.free(seq)
        self.serve(range(6, 12))
        assert engine.offload.settle(60.0)
        engine.offload.check()
        assert engine.offload.read().used_bytes == 0
        for name in list(engine.tier.names()):
            data = engine.tier.get(name)
            require_whole(memoryview(data), name)
            numbers = memoryview(data[PAGE_BYTES:]).cast("q").tolist()
            assert -7 not in numbers, "a block was stored under the name of an earlier one"
        engine.close()


def test_interrupted_write_back_stores_no_block_under_an_old_name(tmp_path: Path) -> None:
    """A block that was not forgotten when the pool reported its eviction was stored with its next content."""
    whole, evicting = Injection(-1, OUTSIDE), Evicting(tmp_path / "whole")
    whole.run(evicting.evict)
    evicting.require()
    draw = random.Random(run_seed())
    for point in [0, *draw.sample(range(1, whole.num_events), draws(12, 4))]:
        evicting = Evicting(tmp_path / str(point))
        Injection(point, OUTSIDE).run(evicting.evict)
        evicting.require()


def interrupted_after(call: Callable[[], Any]) -> None:
    """Make a call whose result Ctrl-C takes away."""
    call()
    raise KeyboardInterrupt


def test_lost_results_free_their_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(SmallEngine(tmp_path), PROMPT)
    engine = SmallEngine(tmp_path)
    wait_until(
        lambda: engine.offload.poll() or engine.offload._loader.transfers or not engine.offload.prepare("a", PROMPT)
    )
    wait_until(lambda: engine.tier.stats().num_waiting == 0)
    with monkeypatch.context() as patched:
        patched.setattr(
            engine.tier, "take_results", lambda: interrupted_after(type(engine.tier).take_results.__get__(engine.tier))
        )
        with pytest.raises(KeyboardInterrupt):
            engine.offload.poll()
    engine.offload.check()
    engine.offload.poll()
    assert not engine.offload._loader.transfers
    assert engine.serve(PROMPT) in (0, 16)
    engine.offload.forget("a")
    assert engine.offload.read().used_bytes == 0
    engine.close()


def test_interrupted_load_that_was_queued_keeps_its_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows were free again while the tier wrote to them."""
    served(SmallEngine(tmp_path), PROMPT)
    engine = SmallEngine(tmp_path)
    load = engine.tier.load
    with monkeypatch.context() as patched:
        patched.setattr(engine.tier, "load", lambda transfer: interrupted_after(lambda: load(transfer)))
        with pytest.raises(KeyboardInterrupt):
            wait_until(lambda: engine.offload.poll() or not engine.offload.prepare("a", PROMPT))
    engine.offload.check()
    assert engine.offload._loader.transfers
    assert engine.offload.settle(60.0)
    assert engine.offload.read().used_bytes == 0
    assert engine.serve(PROMPT) == 16
    engine.close()


def test_plan_whose_moves_failed_leaves_nothing_to_hit(tmp_path: Path) -> None:
    """Blocks that were evicted to the CPU pool were hit there, and never copied."""
    groups = (LayerGroup(4, token_bytes=8), LayerGroup(4, 5, token_bytes=8))
    cache = KVCacheManager(cache_config(40, groups=groups, num_cpu_blocks=30, keep_evicted=True, max_model_len=60))
    blocks, tier, fails = SmallBlocks(48, 4, 2, 40), FileTier(tmp_path, 2**30), [False]

    def carry_out(plan: Any) -> None:
        if fails[0]:
            raise OSError("the device is gone")

    offload = Offload(cache, blocks, [tier], {}, on_plan=carry_out)

    def serve(key: object, tokens: list[int]) -> int:
        wait_until(lambda: offload.poll() or not offload.prepare(key, tokens))
        seq = cache.allocate(tokens)
        try:
            offload.fill(key, seq)
            left = len(tokens) - int(cache.num_computed_tokens(seq))
            cache.reserve([seq], [left])
            offload.save(key, seq, tokens, len(tokens))
            cache.commit([seq], [left])
        finally:
            cache.free(seq)
            offload.forget(key)
        return left

    serve("a", PROMPT)
    assert offload.settle(60.0)
    cache.reset_prefix_cache()
    for number in range(3):
        serve(number, list(range(1000 * number, 1000 * number + 40)))
    assert cache.num_cached_tokens(list(range(40))) > 0
    fails[0] = True
    with pytest.raises(OSError, match="the device is gone"):
        serve("a", PROMPT)
    fails[0] = False
    assert cache.num_cached_blocks == 0
    assert cache.num_cached_tokens(list(range(40))) == 0
    offload.check()
    assert offload.close(60.0)


def test_interrupted_adapter_ends_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = TierAdapter(f"file:{tmp_path}", model="a")
    store = adapter.tier.store
    with monkeypatch.context() as patched:
        patched.setattr(adapter.tier, "store", lambda transfer: interrupted_after(lambda: store(transfer)))
        with pytest.raises(KeyboardInterrupt):
            adapter.submit(False, [b"a"], [b"page"])
    wait_until(lambda: adapter.num_running() == 0)
    taken = adapter.tier.take_results
    ticket = adapter.submit(True, [b"a"], [bytearray(4)])
    wait_until(lambda: adapter.tier.stats().num_waiting == 0)
    with monkeypatch.context() as patched:
        patched.setattr(adapter.tier, "take_results", lambda: interrupted_after(taken))
        with pytest.raises(KeyboardInterrupt):
            adapter.take_results()
    result = adapter.wait(ticket, 60.0)
    assert result is not None
    assert result.good == [False]  # its result is lost, so its bytes are not trusted
    assert adapter.num_running() == 0
    adapter.close()
