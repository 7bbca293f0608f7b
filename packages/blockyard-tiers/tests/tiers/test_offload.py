"""An offload: loaded blocks equal computed ones, no block stays held or leaks, and no step waits for a tier."""

from __future__ import annotations

import contextlib
import fcntl
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import (
    BlockyardError,
    CacheConfig,
    CacheSalt,
    CPUPoolConfig,
    InvalidArgument,
    KVCacheManager,
    LayerGroup,
    Span,
    StateSpec,
)
from blockyard.wire.message import Message, pack
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.tiers_offload_world import FaultyTier, OffloadWorld, Request, SmallBlocks
from blockyard_tiers import (
    Cause,
    FileTier,
    NameChain,
    Offload,
    TierAdapter,
    TierUse,
    Transfer,
    object_names,
    open_tier,
)
from blockyard_tiers.snapshot import Contents

pytestmark = pytest.mark.filterwarnings("error:on_evict raised")


def run(world: OffloadWorld, turns: int) -> Counter[str]:
    for _ in range(turns):
        world.turn()
    return world.counts


@pytest.mark.parametrize("write", ["through", "selective", "back"])
def test_random_runs_serve_the_right_tokens(tmp_path: Path, write: str) -> None:
    choose = random.Random(run_seed())
    for _ in range(draws(60, 12)):
        seed = choose.randrange(2**32)
        tiers = [FaultyTier(random.Random(seed + place), f"faulty {place}") for place in range(choose.choice((1, 2)))]
        try:
            run(OffloadWorld(seed, tiers, write, tmp_path / f"{seed}"), 120)
        except BaseException as error:
            error.add_note(f"seed {seed}, {len(tiers)} tiers")
            raise


@pytest.mark.parametrize("write", ["through", "selective"])
def test_random_runs_with_states_serve_the_right_tokens(write: str) -> None:
    choose = random.Random(f"{run_seed()} states")
    counts: Counter[str] = Counter()
    num_worlds = 0
    while num_worlds < draws(60, 8) or not (counts["filled"] and counts["states right"] and counts["forked"]):
        seed = choose.randrange(2**32)
        tiers = [FaultyTier(random.Random(seed + place), f"faulty {place}") for place in range(choose.choice((1, 2)))]
        try:
            counts += run(OffloadWorld(seed, tiers, write, has_states=True), 120)
        except BaseException as error:
            error.add_note(f"seed {seed}, {len(tiers)} tiers")
            raise
        num_worlds += 1


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_run_meets_every_event(tmp_path: Path, seed: int, write: str) -> None:
    tiers = [FaultyTier(random.Random(seed), faults=0.03), FaultyTier(random.Random(seed + 1), "second")]
    world = OffloadWorld(seed, tiers, write, tmp_path / "warm")
    for _ in range(4000):
        world.turn()
        done = sum((tier.counts for tier in tiers), world.counts)
        if all(
            done[what]
            for what in ("filled", "waited", "preempted", "forked", "cut", "changed", "restarted", "loads failed")
        ) and (done["restored"] or not world.is_plain):
            return
    raise AssertionError(f"not all came: {done}")


class SmallEngine:
    """A manager, a folder, and prompts computed one at a time."""

    def __init__(self, folder: Path, block_size: int = 4, weights: int = 0, write: str = "through") -> None:
        self.tier = FileTier(folder, 2**30)
        self.cache = KVCacheManager(CacheConfig(60, block_size=block_size, max_num_seqs=4, max_model_len=100))
        self.blocks = SmallBlocks(60, block_size, 1, 40)
        self.offload = Offload(self.cache, self.blocks, [TierUse(self.tier, write)], {"weights": weights})
        self.weights = weights

    def serve(self, tokens: list[int], *keys: CacheSalt | Span) -> int:
        """Compute a prompt and return the tokens that the tier supplied; the last token is always computed."""
        request = Request(tokens, ())
        wait_until(lambda: self.offload.poll() or not self.offload.prepare(request, tokens, keys))
        seq = self.cache.allocate(tokens, extra_keys=keys)
        hit = self.offload.fill(request, seq)
        first = int(self.cache.num_computed_tokens(seq))
        plan = self.cache.reserve([seq], len(tokens) - first)
        ids, size = self.cache.block_ids(seq), self.cache.block_size
        numbers = [token * 7 + self.weights for token in tokens]
        for at in range(len(tokens)):
            slot = self.blocks.data[0, ids[at // size]]
            if at < first:
                assert slot[at % size] == numbers[at]
            slot[at % size] = numbers[at]
        self.offload.save(request, seq, tokens, len(tokens))
        self.cache.commit([seq], plan.num_scheduled)
        self.cache.free(seq)
        self.offload.forget(request)
        self.offload.check()
        return hit

    def close(self) -> None:
        assert self.offload.close(PATIENCE_SECONDS)
        self.offload.check()


def served(engine: SmallEngine, tokens: list[int], *keys: CacheSalt | Span) -> int:
    try:
        return engine.serve(tokens, *keys)
    finally:
        engine.close()


PROMPT = list(range(100, 118))


def test_a_prompt_is_found_after_a_restart(tmp_path: Path) -> None:
    assert served(SmallEngine(tmp_path), PROMPT) == 0
    engine = SmallEngine(tmp_path)
    assert engine.serve(PROMPT) == 16
    assert engine.serve(PROMPT) == 0  # the pool has it now
    assert engine.cache.stats().num_hit_tokens == 16
    reading = engine.offload.read()
    assert (reading.tiers[0].num_hit_tokens, reading.missed_tokens["absent"], reading.num_waiting) == (16, 0, 0)
    assert reading.tiers[0].stats.num_loaded == 4
    engine.close()


def test_a_longer_prompt_loads_the_stored_prefix(tmp_path: Path) -> None:
    served(SmallEngine(tmp_path), PROMPT)
    engine = SmallEngine(tmp_path)
    assert engine.serve([*PROMPT[:10], 1, 2, 3, 4, 5]) == 8
    assert engine.offload.read().missed_tokens["absent"] == 4
    assert engine.serve([*PROMPT, 1, 2, 3]) == 8  # two blocks in the pool, two in the folder
    engine.close()


@pytest.mark.parametrize("other", [{"weights": 1}, {"block_size": 2}])
def test_another_model_hits_nothing(tmp_path: Path, other: dict[str, int]) -> None:
    served(SmallEngine(tmp_path), PROMPT)
    assert served(SmallEngine(tmp_path, **other), PROMPT) == 0
    assert served(SmallEngine(tmp_path), PROMPT) == 16


def test_a_salt_is_part_of_the_name(tmp_path: Path) -> None:
    served(SmallEngine(tmp_path), PROMPT, CacheSalt("a"))
    assert served(SmallEngine(tmp_path), PROMPT, CacheSalt("b")) == 0
    assert served(SmallEngine(tmp_path), PROMPT) == 0
    assert served(SmallEngine(tmp_path), PROMPT, CacheSalt("a")) == 16


def test_a_span_is_part_of_the_names_from_its_block_on(tmp_path: Path) -> None:
    served(SmallEngine(tmp_path), PROMPT, Span("cat", 9, 4))
    for other, hit in (
        (Span("cat", 9, 4), 16),
        (Span("dog", 9, 4), 8),
        (Span("cat", 9, 5), 8),
        (Span("cat", 10, 4), 8),
    ):
        assert served(SmallEngine(tmp_path, write="never"), PROMPT, other) == hit
    assert served(SmallEngine(tmp_path, write="never"), PROMPT, Span("cat", 9, 4, "sound")) == 8
    assert served(SmallEngine(tmp_path), PROMPT) == 8


def test_write_selective_stores_at_the_second_use(tmp_path: Path) -> None:
    engine = SmallEngine(tmp_path, write="selective")
    engine.serve(PROMPT)
    assert engine.offload.settle(PATIENCE_SECONDS)
    assert engine.tier.stats().num_stored == 0
    engine.serve([*PROMPT[:8], 1, 2, 3, 4, 5])
    engine.close()
    assert engine.tier.stats().num_stored == 2  # the two that both begin with


def test_write_back_stores_evicted_blocks(tmp_path: Path) -> None:
    engine = SmallEngine(tmp_path, write="back")
    engine.serve(PROMPT)
    for first in range(200, 1000, 80):  # ten prompts of 20 blocks through a pool of 59
        assert engine.serve(list(range(first, first + 80))) == 0
        assert engine.offload.settle(PATIENCE_SECONDS)  # what finds no buffer is not stored
    stored = engine.tier.stats().num_stored
    assert stored >= 10 * 20 + 4 - 59
    assert engine.serve(PROMPT) == 16
    assert engine.cache.pool.on_evict is not None
    engine.close()
    assert engine.cache.pool.on_evict is None


def test_write_back_stores_nothing_from_before_a_reset(tmp_path: Path) -> None:
    engine = SmallEngine(tmp_path, write="back")
    engine.serve(PROMPT)
    engine.cache.reset_prefix_cache()
    for first in range(200, 1000, 80):
        engine.serve(list(range(first, first + 80)))
    engine.close()
    assert served(SmallEngine(tmp_path), PROMPT) == 0


def test_write_back_needs_the_eviction_hook(tmp_path: Path) -> None:
    with FileTierOf(tmp_path) as tier:
        cache = KVCacheManager(CacheConfig(9, block_size=4))
        cache.pool.on_evict = lambda blocks: blocks
        with pytest.raises(InvalidArgument, match="on_evict is <function"):
            Offload(cache, SmallBlocks(9, 4, 1, 4), [TierUse(tier, "back")], {})
        mapped = KVCacheManager(CacheConfig(9, groups=(LayerGroup(4), LayerGroup(4, sliding_window=4))))
        with pytest.raises(InvalidArgument, match='write="back" needs one layer group'):
            Offload(mapped, SmallBlocks(9, 4, 2, 4), [TierUse(tier, "back")], {})


def test_write_never_stores_nothing(tmp_path: Path) -> None:
    served(SmallEngine(tmp_path, write="never"), PROMPT)
    assert served(SmallEngine(tmp_path), PROMPT) == 0
    assert served(SmallEngine(tmp_path, write="never"), PROMPT) == 16


def test_a_damaged_object_ends_the_hit_before_it(tmp_path: Path) -> None:
    served(SmallEngine(tmp_path), PROMPT)
    for path in (tmp_path / "objects").rglob("?" * 32):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    engine = SmallEngine(tmp_path)
    assert engine.serve(PROMPT) == 0
    assert engine.offload.read().missed_tokens["failed"] == 16
    engine.close()


def test_nothing_is_loaded_if_computing_is_faster(tmp_path: Path) -> None:
    served(SmallEngine(tmp_path), PROMPT)
    engine = SmallEngine(tmp_path)
    engine.offload.note_computed(512, 1000.0)
    engine.offload.uses[0].cost.note(100, 1000.0, engine.offload._clock())
    assert engine.serve(PROMPT) == 0
    assert engine.offload.read().missed_tokens["not_worth"] == 16
    engine.close()


def test_the_transfers_of_a_segment_are_one_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(SmallEngine(tmp_path), PROMPT)
    monkeypatch.setattr("blockyard_tiers.loader.TRANSFER_BYTES", 1)
    engine = SmallEngine(tmp_path)
    cost, noted = engine.offload.uses[0].cost, []
    monkeypatch.setattr(type(cost), "note", lambda self, *given: noted.append((self, *given)))
    assert engine.serve(PROMPT) == 16
    ((_, num_bytes, seconds, _),) = [each for each in noted if each[0] is cost]
    assert num_bytes == 4 * engine.offload.blocks.object_bytes
    assert 0 < seconds < 60
    engine.close()


def test_a_reset_recomputes_the_fingerprint() -> None:
    """Requests still running used the old weights: their blocks are not stored under the new ones."""
    tier = FaultyTier(random.Random(1), faults=0.0)
    world = OffloadWorld(1, [tier])
    request = Request(list(range(20)), ())
    world.waiting = [request]
    world.admit()
    world.compute([request], [8])
    world.weights = 1
    world.cache.reset_prefix_cache()
    stored = len(tier.transfers)
    assert world.offload.save(request, request.seq, request.tokens, 20) == 0
    assert len(tier.transfers) == stored


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CacheConfig(9, groups=(LayerGroup(4), LayerGroup(8))), "one block size"),
        (CacheConfig(9, groups=(LayerGroup(4, token_bytes=8), StateSpec(state_bytes=8, checkpoint_every=4))), "states"),
        (CacheConfig(9, groups=(LayerGroup(4, shards=2),)), "2 shards"),
        (CacheConfig(9, max_steps_in_flight=2), "max_steps_in_flight is 2"),
        (CacheConfig(9, cpu=CPUPoolConfig(num_blocks=4)), "on_plan is None"),
    ],
)
def test_unsupported_configs_are_refused(config: CacheConfig, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Offload(KVCacheManager(config), SmallBlocks(9, 4, 1, 4), [], {})


def test_a_bad_tier_or_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="tier is 'disk'"):
        TierUse("disk")  # type: ignore[arg-type]
    with FileTierOf(tmp_path) as tier, pytest.raises(InvalidArgument, match="write is 'often'"):
        TierUse(tier, "often")
    with pytest.raises(InvalidArgument, match="tier's name holds"):
        TierUse(FaultyTier(random.Random(0), "\udcff"))
    cache = KVCacheManager(CacheConfig(9))
    tiers = [FaultyTier(random.Random(0)), FaultyTier(random.Random(1))]
    with pytest.raises(InvalidArgument, match="tiers has 'faulty' twice"):
        Offload(cache, SmallBlocks(9, 16, 1, 4), tiers, {})


class FileTierOf:
    """A tier that is closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.tier = FileTier(folder, 2**20)

    def __enter__(self) -> FileTier:
        return self.tier

    def __exit__(self, *_: object) -> None:
        self.tier.close()


def test_costs_are_a_start_up_and_a_rate() -> None:
    from blockyard_tiers.costs import LinearCost

    cost = LinearCost(fresh_seconds=10.0)
    assert cost.seconds(5, 0.0) is None
    cost.note(10, 2.0, 0.0)
    assert cost.seconds(5, 0.0) == 1.0  # of one measurement, all is rate
    for size in (20, 30, 40):
        cost.note(size, 1.0 + size / 10, 0.0)
    assert cost.seconds(100, 0.0) == pytest.approx(11.0)
    assert cost.seconds(100, 11.0) is None
    assert np.isfinite(cost.seconds(0, 1.0) or 0.0)


def test_blocks_of_a_kv_cache_survive_a_round_trip() -> None:
    """Two layer groups: bytes of another request in the parts that the smaller one does not use stay unchanged."""
    torch = pytest.importorskip("torch")
    from blockyard.storage import KVCache
    from blockyard_tiers import KVBlocks

    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 3)):
        cache = KVCache(9, 3, 5, 2, size, dtype=dtype, layer_groups=[[0, 2, 4], [1, 3]])
        blocks = KVBlocks(cache, 10 * 5 * 3 * 2 * 2 * size * dtype.itemsize)
        assert blocks.num_rows == 10
        cache.data.copy_(torch.randn(cache.data.shape))
        ids = np.array([[1, 5], [7, 2]], np.int32)
        kept = cache.data.clone()
        assert blocks.read(ids, [8, 3]) is None
        cache.data.zero_()
        assert blocks.write(ids[::-1], [8, 3]) is None
        for before, after in (((1, 5), (7, 2)), ((7, 2), (1, 5))):
            assert torch.equal(cache.data[:, after[0]], kept[:, before[0]])
            assert torch.equal(cache.data[:2, after[1]], kept[:2, before[1]])
            assert not cache.data[2, after[1]].any()
    with pytest.raises(InvalidArgument, match="two objects of"):
        KVBlocks(cache, blocks.object_bytes * 2 - 1)
    with pytest.raises(InvalidArgument, match="kv_cache is"):
        KVBlocks(None)  # type: ignore[arg-type]


# ---------------------------------------------------------------- snapshots


def snapshot_of(folder: Path, *prompts: list[int], write: str = "back") -> Path:
    """Compute prompts in an engine, take a snapshot, and end it."""
    engine = SmallEngine(folder / "tier", write=write)
    for prompt in prompts:
        engine.serve(prompt, *([CacheSalt("a")] if prompt[0] % 2 else []))
    snapshot = engine.offload.snapshot(folder / "warm", PATIENCE_SECONDS)
    assert (snapshot.is_done, snapshot.error) == (True, "")
    assert snapshot.num_blocks == engine.cache.num_cached_blocks
    engine.close()
    return folder / "warm"


def cached(cache: KVCacheManager, tokens: list[int]) -> int:
    return cache.num_cached_tokens([*tokens, 0], extra_keys=(CacheSalt("a"),) if tokens[0] % 2 else ())


def test_a_snapshot_warms_a_new_process(tmp_path: Path) -> None:
    prompts = [PROMPT, [*PROMPT[:8], 1, 2, 3, 4], list(range(301, 321))]
    path = snapshot_of(tmp_path, *prompts)
    engine = SmallEngine(tmp_path / "tier", write="never")
    assert engine.offload.restore(path, PATIENCE_SECONDS) == 16 + 4 + 20
    assert [cached(engine.cache, prompt) for prompt in prompts] == [16, 12, 20]
    assert engine.cache.num_used_blocks == 0
    assert engine.serve(PROMPT) == 0  # all of it is in the pool, and right
    reading = engine.offload.read()
    assert reading.tiers[0].num_hit_tokens == reading.missed_tokens["absent"] == 0
    assert engine.cache.stats().num_hit_tokens == 16
    engine.close()


def test_a_smaller_pool_restores_the_last_used_prompts(tmp_path: Path) -> None:
    prompts = [list(range(first, first + 20)) for first in (200, 300, 400, 500)]
    path = snapshot_of(tmp_path, *prompts)
    tier = FileTier(tmp_path / "tier", 2**30)
    cache = KVCacheManager(CacheConfig(14, block_size=4, max_num_seqs=4, max_model_len=100))
    offload = Offload(cache, SmallBlocks(14, 4, 1, 6), [tier], {"weights": 0})
    wait_until(lambda: tier.stats().num_objects)  # then the first lookup is answered before the first poll
    assert offload.restore(path, PATIENCE_SECONDS) == 40
    assert [cached(cache, prompt) for prompt in prompts] == [0, 0, 20, 20]
    seq = cache.allocate([1] * 20)  # evicts the oldest
    cache.free(seq)
    assert [cached(cache, prompt) for prompt in prompts[2:]] != [20, 20]
    assert cached(cache, prompts[3]) == 20
    assert offload.close(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"weights": 1}, "its layout is '[0-9a-f]{32}', this engine's is '"),
        ({"block_size": 2}, "its block_size is 4, this engine's is 2"),
    ],
)
def test_a_snapshot_of_another_model_is_refused(tmp_path: Path, other: dict[str, int], words: str) -> None:
    path = snapshot_of(tmp_path, PROMPT)
    engine = SmallEngine(tmp_path / "tier", **other)
    with pytest.raises(InvalidArgument, match=words):
        engine.offload.restore(path)
    assert engine.cache.num_cached_blocks == 0
    engine.close()


def test_a_damaged_snapshot_is_refused(tmp_path: Path) -> None:
    whole = snapshot_of(tmp_path, PROMPT).read_bytes()
    engine = SmallEngine(tmp_path / "tier")
    path = tmp_path / "bad"
    flipped = [bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]) for at in range(0, len(whole), 3)]
    for data in [*(whole[:size] for size in range(len(whole))), *flipped, whole + b"\0", pack("object")]:
        path.write_bytes(data)
        with pytest.raises(InvalidArgument, match="it is not a snapshot"):
            engine.offload.restore(path)
    message = Message.of(whole)
    for keys in ([None], [[["salt", ""], ["salt", "b"]]], [[["span", 0, 1, "a"]]], [[["salt", "\ud800"]]], "a", [[[]]]):
        path.write_bytes(pack(message.kind, {**message.fields, "keys": keys}, message.arrays))
        with pytest.raises(InvalidArgument, match="it is not a snapshot"):
            engine.offload.restore(path)
    with pytest.raises(InvalidArgument, match="it cannot be read: No such file"):
        engine.offload.restore(tmp_path / "none")
    assert engine.cache.num_cached_blocks == 0
    engine.close()


def test_unwritable_snapshots_report_an_error_and_leave_nothing(tmp_path: Path) -> None:
    engine = SmallEngine(tmp_path / "tier")
    engine.serve(PROMPT)
    snapshot = engine.offload.snapshot(tmp_path / "none" / "warm", PATIENCE_SECONDS)
    assert snapshot.is_done
    assert "cannot be written: No such file" in snapshot.error
    long = tmp_path / ("x" * 250)  # no room for what stands beside it
    assert "cannot be written: File name too long" in engine.offload.snapshot(long, PATIENCE_SECONDS).error
    for name in ("", "/", "a\0b"):
        with pytest.raises(InvalidArgument, match=r"it must name a file|it must be the path of a file"):
            engine.offload.begin_snapshot(name)
    (tmp_path / "warm").mkdir()
    assert engine.offload.snapshot(tmp_path / "warm", PATIENCE_SECONDS).error != ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tier", "warm"]
    engine.close()


def test_a_snapshot_continues_while_prompts_are_computed(tmp_path: Path) -> None:
    engine = SmallEngine(tmp_path / "tier", write="back")
    engine.serve(PROMPT)
    snapshot = engine.offload.begin_snapshot(tmp_path / "warm")
    with pytest.raises(InvalidArgument, match="wait until it is done"):
        engine.offload.begin_snapshot(tmp_path / "other")
    for first in range(200, 1000, 80):
        engine.serve(list(range(first, first + 80)))
    wait_until(lambda: engine.offload.poll() or snapshot.is_done)
    assert snapshot.error == ""
    engine.close()
    engine = SmallEngine(tmp_path / "tier")
    assert engine.offload.restore(snapshot.path, PATIENCE_SECONDS) == snapshot.num_blocks * 4
    engine.close()


@pytest.mark.parametrize("most_blocks", [0, 7, 40, 10**6])
@pytest.mark.parametrize("most_tokens", [2, 3, 12, 10**6])
def test_restore_chooses_the_prompts_that_fit_and_are_evicted_last(most_blocks: int, most_tokens: int) -> None:
    """Compared with a plain model that copies sets: prompts branch anywhere, in a random order of eviction."""
    choose = np.random.default_rng(run_seed())
    for _ in range(30):
        size = int(choose.integers(1, 60))
        before = np.array([choose.integers(-2, place) for place in range(size)], np.int32)
        ranks = choose.permutation(size).astype(np.int32)
        tokens = np.arange(3 * size, dtype=np.int32).reshape(size, 3)
        keys = [(), (CacheSalt("a"),)]
        found = list(Contents(before, ranks, tokens, keys).prompts(most_blocks, most_tokens))
        seen: set[int] = set()
        wanted: dict[tuple[int, ...], tuple[CacheSalt, ...]] = {}
        for end in sorted(set(range(size)) - set(before.tolist()), key=lambda end: -ranks[end]):
            path, place = [], end
            while place >= 0:
                path, place = [place, *path], int(before[place])
            path = path[: most_tokens // 3]
            if len(seen | set(path)) > most_blocks:
                break
            seen |= set(path)
            if path:
                wanted.setdefault(tuple(path), keys[-1 - place])
        assert found == [(tokens[list(path)].reshape(-1).tolist(), root) for path, root in reversed(wanted.items())]


def test_old_roots_are_forgotten() -> None:
    """A client invents salts: the records of each salt are removed with its blocks."""
    tier = FaultyTier(random.Random(1), faults=0.0, is_live=True)
    cache = KVCacheManager(CacheConfig(60, block_size=4, max_num_seqs=4, max_model_len=100))
    offload = Offload(cache, SmallBlocks(60, 4, 1, 16), [TierUse(tier, "back")], {"weights": 0})
    names = offload._saver._write_back
    assert names is not None
    for number in range(2000):
        tokens, keys = [1, 2, 3, 4, 5], (CacheSalt(str(number)),)
        offload.prepare(number, tokens, keys, may_load=False)
        seq = cache.allocate(tokens, extra_keys=keys)
        offload.fill(number, seq)
        plan = cache.reserve([seq])
        offload.save(number, seq, tokens, 5)
        cache.commit([seq], plan.num_scheduled)
        cache.free(seq)
        offload.forget(number)
        offload.poll()
        assert len(names) == min(number + 1, 58)  # the second block of a prompt is not cached
    assert len(tier.objects) > 1800
    assert len(names._names._digests) < 600
    assert offload.close(PATIENCE_SECONDS)


def test_a_reset_ends_a_snapshot(tmp_path: Path) -> None:
    engine = SmallEngine(tmp_path / "tier")
    engine.serve(PROMPT)
    snapshot = engine.offload.begin_snapshot(tmp_path / "warm")
    engine.cache.reset_prefix_cache()
    engine.offload.poll()
    assert (snapshot.is_done, snapshot.error) == (True, "the prefix cache was reset")
    assert not (tmp_path / "warm").exists()
    engine.close()


def test_a_snapshot_needs_a_tier_that_is_written(tmp_path: Path) -> None:
    engine = SmallEngine(tmp_path, write="never")
    with pytest.raises(InvalidArgument, match="all tiers have write=never"):
        engine.offload.snapshot(tmp_path / "warm")
    engine.close()


def test_a_process_killed_during_write_back_leaves_whole_prefixes(tmp_path: Path) -> None:
    """All prompts share a prefix that is hit so often that the pool never evicts it."""
    head = list(range(1, 33))
    prompts = [head + list(range(first, first + 24)) for first in range(100, 900, 40)]
    engine = SmallEngine(tmp_path, write="back")
    for prompt in prompts:
        engine.serve(prompt)
        assert engine.offload.settle(PATIENCE_SECONDS)
    assert engine.cache.num_cached_tokens(prompts[0]) == len(head)
    engine.tier.close()  # as kill -9 leaves it: the pool is gone
    second = SmallEngine(tmp_path, write="never")
    for prompt in prompts[:5]:
        second.cache.reset_prefix_cache()
        assert second.serve(prompt) == 52
    second.close()


@pytest.mark.parametrize("fault", ["failed", "refused", "no buffers"])
def test_a_prefix_that_was_not_stored_is_tried_again(fault: str) -> None:
    head = list(range(1, 33))
    tier = FaultyTier(random.Random(1), faults=0.0)
    cache = KVCacheManager(CacheConfig(60, block_size=4, max_num_seqs=4, max_model_len=100))
    num_rows = 14 if fault == "no buffers" else 60
    offload = Offload(cache, SmallBlocks(60, 4, 1, num_rows), [TierUse(tier, "back")], {"weights": 0})

    def serve(tokens: list[int]) -> None:
        offload.prepare(tokens[-1], tokens, may_load=False)
        seq = cache.allocate(tokens)
        offload.fill(tokens[-1], seq)
        plan = cache.reserve([seq])
        offload.save(tokens[-1], seq, tokens, len(tokens))
        cache.commit([seq], plan.num_scheduled)
        cache.free(seq)
        offload.forget(tokens[-1])
        while tier.transfers:
            tier.work()
            offload.poll()
        offload.poll()
        offload.check()

    for turn, first in enumerate(range(100, 900, 40)):
        tier.faults = 1.0 if fault == "refused" and turn < 10 else 0.0
        if fault == "failed" and turn < 10:
            tier._store = lambda transfer: dict.fromkeys(range(len(transfer.names)), Cause.FULL)  # type: ignore[method-assign]
        elif fault == "failed":
            tier.__dict__.pop("_store", None)
        serve(head + list(range(first, first + 24)))
    chain = NameChain(offload._context.layout(), 4)
    chain.extend(head)
    assert all(name in tier.objects for name in chain.names)


@pytest.mark.parametrize("call", ["snapshot", "restore"])
def test_leftovers_of_killed_snapshots_are_removed_and_live_files_stay(tmp_path: Path, call: str) -> None:
    path = snapshot_of(tmp_path, PROMPT)
    left, other = (tmp_path / f".{name}.0123456789abcdef" for name in ("warm", "cold"))
    live = tmp_path / ".warm.fedcba9876543210"
    for each in (left, live, other, tmp_path / ".warm.notes"):
        each.write_bytes(b"half")
    engine = SmallEngine(tmp_path / "tier", write="back")
    with open(live, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if call == "restore":
            engine.offload.restore(path, PATIENCE_SECONDS)
        else:
            engine.serve(PROMPT)
            assert engine.offload.snapshot(path, PATIENCE_SECONDS).error == ""
        names = sorted(each.name for each in tmp_path.iterdir())
    assert names == [".cold.0123456789abcdef", ".warm.fedcba9876543210", ".warm.notes", "tier", "warm"]
    engine.close()


class NoSize:
    """An argument whose own code raises."""

    def __len__(self) -> int:
        raise ValueError("no length")

    def __fspath__(self) -> str:
        raise RuntimeError("no path")


HOSTILE: list[Any] = [None, -1, 2**70, 1.5, float("nan"), "\0", b"x", [], [None], [2**40], {}, object(), NoSize()]


@pytest.mark.parametrize("value", HOSTILE, ids=[*map(repr, HOSTILE[:-2]), "object", "NoSize"])
def test_bad_arguments_are_refused_and_change_nothing(tmp_path: Path, value: Any) -> None:
    engine = SmallEngine(tmp_path / "tier", write="back")
    engine.serve(PROMPT)
    warm = tmp_path / "warm"
    assert engine.offload.snapshot(warm, PATIENCE_SECONDS).error == ""
    offload, cache, tier = engine.offload, engine.cache, engine.tier
    seq = cache.allocate(list(range(20)))
    offload.prepare("k", list(range(20)), may_load=False)
    before = cache.num_cached_blocks, len(offload._records), offload.read().missed_tokens
    layout = offload._context.layout()
    calls: list[Callable[[], object]] = [
        lambda: offload.restore(value),
        lambda: offload.begin_snapshot(value),
        lambda: offload.save("k", seq, value, 8),
        lambda: offload.fill("k", value),
        lambda: Offload(value, engine.blocks, [], {}),
        lambda: Offload(cache, value, [], {}),
        lambda: FileTier(value, 100),
        lambda: open_tier("tier", value),
        lambda: TierUse(value),
        lambda: TierUse(tier, value),
        lambda: Transfer(value, layout, [layout], [layout], [b"x"]),
        lambda: Transfer(1, value, [layout], [layout], [b"x"]),
        lambda: Transfer(1, layout, value, [layout], [b"x"]),
        lambda: Transfer(1, layout, [layout], value, [b"x"]),
        lambda: Transfer(1, layout, [layout], [layout], value),
        lambda: tier.store(value),
        lambda: tier.load(value),
        lambda: NameChain(value, 4),
        lambda: NameChain(layout, value),
        lambda: TierAdapter(value),
    ]
    if not isinstance(value, list) or value:
        calls += [lambda: tier.longest_prefix(value), lambda: tier.first_present(value), lambda: tier.drop(value)]
        calls += [lambda: offload.prepare("n", value), lambda: offload.is_storing(value)]
        calls += [lambda: object_names(layout, value, 1)]
    if not isinstance(value, float) or value != value:
        calls += [lambda: offload.restore(warm, value), lambda: offload.settle(value), lambda: tier.close(value)]
    if value in (None, [], {}) or isinstance(value, (list, dict, set)):
        calls += [lambda: offload.forget(value), lambda: offload.fork(value, [])] if value is not None else []
    for call in calls:
        with contextlib.suppress(BlockyardError):
            call()
    offload._records.pop("n", None)
    assert (cache.num_cached_blocks, len(offload._records), offload.read().missed_tokens) == before
    cache.free(seq)
    engine.close()
