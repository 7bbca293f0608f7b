"""Waiting requests, tiers that do not answer, states far from the end: all that can be loaded is loaded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blockyard import Admission, CacheConfig, KVCacheManager
from blockyard_testing.patience import wait_until
from blockyard_testing.tiers_offload_world import FaultyTier, SmallBlocks, SmallStates
from blockyard_tiers import Cause, FirstMatch, NameChain, Offload, Prefix, TierStats, TierUse, Transfer
from blockyard_tiers.finder import Finder
from blockyard_tiers.state_names import state_name
from blockyard_tiers.transfers import RequestRecord

from .test_offload import PROMPT, SmallEngine, served

#: 20 blocks, as many as there are buffers for loads, and a token.
LONG = list(range(200, 281))
LAYOUT = bytes(16)


def stored(folder: Path, *prompts: list[int]) -> SmallEngine:
    """Store prompts, and return another process that only reads."""
    for prompt in prompts:
        served(SmallEngine(folder), prompt)
    return SmallEngine(folder, write="never")


def prepared(engine: SmallEngine, key: str, tokens: list[int], **options: bool) -> None:
    wait_until(lambda: engine.offload.poll() or not engine.offload.prepare(key, tokens, **options))


def started(engine: SmallEngine, key: str, tokens: list[int]) -> int:
    seq = engine.cache.allocate(tokens)
    filled = engine.offload.fill(key, seq)
    engine.cache.free(seq)
    engine.offload.forget(key)
    engine.offload.check()
    return filled


def test_a_request_that_cannot_start_gives_its_buffers_to_one_that_can(tmp_path: Path) -> None:
    engine = stored(tmp_path, LONG, PROMPT)
    others = [engine.cache.allocate(list(range(first, first + 100))) for first in (1000, 2000)]
    prepared(engine, "long", LONG)
    assert engine.cache.try_allocate(LONG) is Admission.LATER
    assert engine.offload._loader.free == []
    assert engine.serve(PROMPT) == 16
    engine.cache.free(others)
    prepared(engine, "long", LONG)
    assert started(engine, "long", LONG) == 80
    assert sum(engine.offload.read().missed_tokens.values()) == 0
    engine.close()


def test_a_request_that_starts_by_a_guarantee_gets_buffers(tmp_path: Path) -> None:
    """All sequence slots are taken, so `can_allocate` says no; the caller makes room for it all the same."""
    engine = stored(tmp_path, LONG, PROMPT)
    others = [engine.cache.allocate([first] * 8) for first in range(4)]
    prepared(engine, "long", LONG)
    prepared(engine, "sure", PROMPT)
    assert engine.offload._records["sure"].load is None
    prepared(engine, "sure", PROMPT, will_start=True)
    engine.cache.free(others)
    assert started(engine, "sure", PROMPT) == 16
    engine.close()


def test_a_request_ahead_that_can_start_keeps_its_buffers(tmp_path: Path) -> None:
    other = list(range(400, 481))
    engine = stored(tmp_path, LONG, other)
    prepared(engine, "long", LONG)
    for _ in range(20):
        engine.offload.poll()
        assert not engine.offload.prepare("long", LONG)
        engine.offload.prepare("other", other)
    assert engine.offload._records["long"].load is not None
    assert started(engine, "long", LONG) == 80
    prepared(engine, "other", other)
    assert started(engine, "other", other) == 80
    engine.close()


def test_blocks_evicted_while_a_request_waits_are_loaded(tmp_path: Path) -> None:
    engine = stored(tmp_path, PROMPT)
    for begun in (PROMPT, PROMPT[:9]):  # all of it is in the pool, or its first two blocks
        assert engine.serve(begun) == (len(begun) - 1) // 4 * 4
        prepared(engine, "waits", PROMPT)
        for first in range(1000, 1400, 80):
            engine.serve(list(range(first, first + 80)))
        assert engine.cache.num_cached_tokens(PROMPT) == 0
        prepared(engine, "waits", PROMPT)
        assert started(engine, "waits", PROMPT) == 16
        engine.cache.reset_prefix_cache()
    engine.close()


# ---------------------------------------------------------------- tiers that do not answer


class SilentTier(FaultyTier):
    """A tier that never answers a lookup."""

    def longest_prefix(self, names: Sequence[bytes]) -> Prefix:
        return Prefix(0, False)

    def first_present(self, names: Sequence[bytes]) -> FirstMatch:
        return FirstMatch(0, False)


class Site:
    """An offload with a clock of its own over tiers in memory."""

    def __init__(self, *tiers: Any, write: str = "never") -> None:
        self.now, self.tiers = 0.0, tiers
        self.cache = KVCacheManager(CacheConfig(60, block_size=4, max_num_seqs=4, max_model_len=100))
        uses = [TierUse(tier, write) for tier in tiers]
        self.offload = Offload(self.cache, SmallBlocks(60, 4, 1, 40), uses, {}, clock=lambda: self.now)

    def serve(self, key: str, tokens: list[int], save: bool = False) -> int:
        while self.offload.prepare(key, tokens):
            self.now += 0.01
            for tier in self.tiers:
                tier.work()
            self.offload.poll()
        seq = self.cache.allocate(tokens)
        filled = self.offload.fill(key, seq)
        plan = self.cache.reserve([seq])
        if save:
            self.offload.save(key, seq, tokens, len(tokens))
        self.cache.commit([seq], plan.num_scheduled)
        self.cache.free(seq)
        self.offload.forget(key)
        self.offload.check()
        return filled


def objects_of(prompt: list[int]) -> dict[bytes, tuple[bytes, bytes, bytes]]:
    tier = FaultyTier(random.Random(1), faults=0.0)
    site = Site(tier, write="through")
    site.serve("first", prompt, save=True)
    while tier.transfers:
        tier.work()
    return tier.objects


@pytest.mark.parametrize("order", ["silent first", "silent last"])
def test_a_silent_tier_does_not_delay_others(order: str) -> None:
    other = FaultyTier(random.Random(1), faults=0.0, objects=objects_of(LONG))
    silent = SilentTier(random.Random(2), "silent")
    site = Site(*((silent, other) if order == "silent first" else (other, silent)))
    assert site.serve("a", LONG) == 80
    assert site.now < 0.5
    assert sum(site.offload.read().missed_tokens.values()) == 0
    site.cache.reset_prefix_cache()
    before = site.now
    assert site.serve("b", LONG) == 80
    assert site.now - before < 0.1, "a tier that was silent is waited for once"


def test_blocks_a_silent_tier_may_have_count_as_late() -> None:
    site = Site(SilentTier(random.Random(1)))
    assert site.serve("a", LONG) == 0
    assert {cause: number for cause, number in site.offload.read().missed_tokens.items() if number} == {"late": 80}


def test_blocks_a_failing_tier_may_have_count_as_failed() -> None:
    class OpenTier(FaultyTier):
        def stats(self) -> TierStats:
            return TierStats(is_load_failing=True)

    site = Site(OpenTier(random.Random(1), faults=0.0))
    assert site.serve("a", LONG) == 0
    assert {cause: number for cause, number in site.offload.read().missed_tokens.items() if number} == {"failed": 80}


# ---------------------------------------------------------------- states far from the end


class CountingTier(FaultyTier):
    num_questions = 0

    def first_present(self, names: Sequence[bytes]) -> FirstMatch:
        self.num_questions += 1
        return super().first_present(names)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("is_silent", [False, True])
def test_the_last_state_is_found_at_any_position(step: int, is_silent: bool) -> None:
    chain = NameChain(LAYOUT, 4)
    chain.extend(list(range(12_000)))
    choose, most = random.Random(5), 3000 // step
    for last in [1, 2, 17, 85, 256, 700, 701, most - 1, most, *(choose.randrange(1, most) for _ in range(20))]:
        last = min(last, most)
        places = [step * each for each in {last, *choose.sample(range(1, last + 1), min(3, last))}]
        objects = {state_name(LAYOUT, chain.names[place - 1]): (b"", b"", b"") for place in places}
        tier = CountingTier(random.Random(1), faults=0.0, objects=objects)
        uses = [TierUse(SilentTier(random.Random(2), "silent"))] if is_silent else []
        finder = Finder([*uses, TierUse(tier)], 4, 8, 512, SmallStates(SmallBlocks(4, 4, 1, 4), 1, 8), step)
        prompt = RequestRecord(chain, 0, 0.0)
        for now in range(10):
            kept, pending, is_over = finder.find_state(LAYOUT, prompt, 0, 3000)
            if is_over:
                break
            assert not pending or finder.should_wait(prompt, pending, finder.uses[-1], 3000, now / 8) or now
        assert kept is not None
        assert kept.stop == max(places)
        assert tier.num_questions <= most // 256 + 4


# ---------------------------------------------------------------- tiers that raise


class RaisingTier(FaultyTier):
    """A tier whose third transfer raises, either before it is queued or (an interrupt) afterwards."""

    num_before = 2
    error: BaseException = RuntimeError("the tier is broken")
    queues_first = False

    def _take(self, transfer: Transfer, is_load: bool) -> Cause | None:
        self.num_before -= 1
        if self.num_before != -1:
            return super()._take(transfer, is_load)
        if self.queues_first:
            super()._take(transfer, is_load)
        raise self.error


def finish_transfers(site: Site) -> None:
    for tier in site.tiers:
        while tier.transfers:
            tier.work()
    site.offload.poll()


@pytest.mark.parametrize("error", [RuntimeError("the tier is broken"), KeyboardInterrupt()])
def test_load_that_raises_loses_no_buffer(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockyard_tiers.loader.TRANSFER_BYTES", 1)  # a transfer per block
    tier = RaisingTier(random.Random(1), faults=0.0, objects=objects_of(LONG))
    tier.error, tier.queues_first = error, isinstance(error, KeyboardInterrupt)
    site = Site(tier)
    rows = sorted(site.offload._loader.free)
    with pytest.raises(type(error)):
        site.serve("a", LONG)
    site.offload.forget("a")
    finish_transfers(site)
    assert sorted(site.offload._loader.free) == rows
    site.offload.check()
    assert site.serve("b", LONG) == 80


@pytest.mark.parametrize("error", [RuntimeError("the tier is broken"), KeyboardInterrupt()])
def test_store_that_raises_loses_no_buffer(error: BaseException) -> None:
    tier = RaisingTier(random.Random(1), faults=0.0)
    tier.error, tier.queues_first, tier.num_before = error, isinstance(error, KeyboardInterrupt), 0
    site = Site(tier, write="through")
    rows = sorted(site.offload._saver.buffers.free)
    with pytest.raises(type(error)):
        site.serve("a", LONG, save=True)
    site.offload.forget("a")
    finish_transfers(site)
    assert sorted(site.offload._saver.buffers.free) == rows
    site.offload.check()
