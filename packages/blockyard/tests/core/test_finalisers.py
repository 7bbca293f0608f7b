"""Finalisers that free, or call the cache, in the middle of a call (issue 11): nothing is read that has gone since."""

from __future__ import annotations

import gc

import pytest

import blockyard
from blockyard import CacheConfig, KVCacheManager
from blockyard_testing import seeds
from blockyard_testing.seeds import run_seed

from ..finalisers import run_littered
from ..support.checked import prompt
from ..support.cycles import collector_at, collector_off, leave_to_die

NUM_WORLDS = 24 if blockyard.compiled() else 6


def make_cache() -> KVCacheManager:
    return KVCacheManager(CacheConfig(40, 4, max_num_seqs=8, max_model_len=64, watermark=0.0))


@pytest.mark.parametrize("threshold", range(12))
def test_an_owner_that_dies_during_reserve_leaves_no_wrong_hit(threshold: int) -> None:
    """The joiner waited for 8 tokens that nobody computed; it must not be told that they are there."""
    cache = make_cache()
    other = cache.allocate(prompt(1, 2))
    owner = cache.allocate(prompt(2, 9))
    assert cache.reserve([owner], 8).all_fit
    joiner = cache.allocate(prompt(2, 10))
    seqs, counts = [other, joiner], [2, 2]
    with collector_off():
        leave_to_die(lambda: cache.free(owner))
        # No allocation of ours may come before the call's.
        gc.set_threshold(gc.get_count()[0] + threshold)
        gc.enable()
        plan = cache.reserve(seqs, counts)
        gc.disable()
        answer = plan.status.tolist(), plan.num_computed.tolist()
        gc.collect()
    assert answer != ([0, 0], [0, 8]), "nobody computed these 8 tokens"
    assert owner not in cache.running()
    assert cache.num_computed_tokens(joiner) == 0
    assert cache.reserve([joiner], 10).num_computed.tolist() == [0]
    cache.check()


def test_a_collector_in_every_call_breaks_no_world() -> None:
    counts, broken = run_littered(blockyard, run_seed(), NUM_WORLDS)
    names = ("worlds", "free by finalisers", "free_blocks by finalisers", "calls by finalisers refused")
    seeds.lines.append("finalisers: " + ", ".join(f"{counts[name]} {name}" for name in names))
    assert broken == []
    assert counts["free by finalisers"] > NUM_WORLDS
    assert counts["free_blocks by finalisers"] > NUM_WORLDS
    assert counts["calls by finalisers refused"] > 0


@pytest.mark.parametrize("threshold", range(0, 40, 3))
def test_check_with_a_finaliser_that_frees_finds_nothing(threshold: int) -> None:
    """It used to say that this is a bug in Blockyard."""
    cache = make_cache()
    lost = [cache.allocate(prompt(number, 9)) for number in range(4)]
    with collector_off():
        leave_to_die(lambda: cache.free(lost))
        gc.set_threshold(gc.get_count()[0] + threshold)
        gc.enable()
        cache.check()
        gc.disable()
        gc.collect()
    assert cache.running() == {}
    assert cache.num_used_blocks == 0
    cache.check()


def test_leases_finalised_during_calls_are_freed() -> None:
    cache = make_cache()
    pool = cache.pool
    seq = cache.allocate(prompt(1, 9))
    calls = [
        lambda: cache.reserve([seq], 9),
        lambda: cache.allocate(prompt(2, 9)),
        lambda: pool.get_new_blocks(2),
        lambda: cache.leak_report(),
        lambda: pool.free_block_ids(),
        lambda: cache.resize(60),
    ]
    for call in calls:
        lease = pool.get_new_blocks(3)
        with collector_off():
            leave_to_die(lambda lease=lease: pool.free_blocks(lease))
            with collector_at(1):
                call()
            gc.collect()
        assert lease not in pool.leases()
        cache.check()
