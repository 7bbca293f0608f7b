"""KV events: a content comes with its first computed block and goes with its last, in order, and nothing is lost."""

from __future__ import annotations

import pytest

from blockyard import CacheConfig, CacheSalt, InvalidArgument, InvariantError, KVCacheManager, LayerGroup
from blockyard.config import cache_config
from blockyard_testing.told import Told


def make_cache(**settings: object) -> KVCacheManager:
    given = {"num_blocks": 12, "block_size": 2, "max_model_len": 64, "watermark": 0.0, "enable_kv_cache_events": True}
    return KVCacheManager(cache_config(**(given | settings)))


def compute(cache: KVCacheManager, tokens: list[int], keys: tuple[object, ...] = ()) -> int:
    seq = cache.allocate(tokens, extra_keys=keys)
    cache.reserve([seq], len(tokens) - cache.num_computed_tokens(seq))
    cache.commit([seq], len(tokens) - cache.num_computed_tokens(seq))
    return seq


def test_events_are_off_by_default() -> None:
    with pytest.raises(InvalidArgument, match="enable_kv_cache_events is False"):
        KVCacheManager(CacheConfig(num_blocks=4)).take_events()


def test_computed_prompt_is_published_parents_first() -> None:
    cache = make_cache()
    seq = cache.allocate([1, 2, 3, 4, 5])
    events = cache.take_events()
    assert events.contents.tolist() == []
    ((root, keys),) = events.new_roots
    cache.reserve([seq], 5)
    cache.commit([seq], 5)
    events = cache.take_events()
    first, second = events.contents.tolist()
    assert keys == ()
    assert events.parents.tolist() == [root, first]
    assert root < first < second
    assert events.token_ids.tolist() == [[1, 2], [3, 4]]
    assert cache.take_events().is_empty


def test_uncomputed_prompt_is_never_published() -> None:
    cache = make_cache()
    cache.free(cache.allocate([1, 2, 3, 4, 5]))
    assert cache.take_events().contents.tolist() == []


def test_content_is_removed_with_its_last_block() -> None:
    cache = make_cache(num_blocks=7)
    seqs = [cache.allocate([token]) for token in (1, 1, 1)]
    for _ in range(2):  # each computes the same two tokens in a block of its own
        cache.reserve(seqs, 1)
        cache.commit(seqs, 1, [2, 2, 2])
    (content,) = cache.take_events().contents.tolist()
    assert len({cache.block_ids(seq)[0] for seq in seqs}) == 3
    cache.free(seqs)
    others = [cache.allocate([number] * 3) for number in (7, 8)]  # four of six blocks: one equal block is left
    assert cache.take_events().contents.tolist() == []
    cache.free(others)
    cache.allocate([9] * 11)
    assert -content in cache.take_events().contents.tolist()
    cache.check()


def test_content_added_and_removed_between_readings_has_no_event() -> None:
    cache = make_cache(num_blocks=5)
    cache.free(compute(cache, [1, 2, 3, 4]))
    cache.allocate([5] * 8)
    assert cache.take_events().contents.tolist() == []


def test_reset_is_published_before_later_contents() -> None:
    cache = make_cache()
    told = Told()
    cache.free(compute(cache, [1, 2, 3, 4]))
    told.apply(cache.take_events())
    cache.reset_prefix_cache()
    compute(cache, [1, 2])
    events = cache.take_events()
    assert events.cleared
    assert events.token_ids.tolist() == [[1, 2]]
    told.apply(events)
    assert told.differences(cache) == []


def test_other_keys_have_another_root() -> None:
    cache = make_cache()
    compute(cache, [1, 2])
    compute(cache, [1, 2], (CacheSalt("a"),))
    events = cache.take_events()
    assert [keys for _, keys in events.new_roots] == [(), (("salt", "a"),)]
    assert events.parents.tolist() == [root for root, _ in events.new_roots]


def test_forgotten_root_is_published() -> None:
    cache = make_cache(num_blocks=4)
    told = Told()
    for tenant in range(8):
        cache.free(compute(cache, [1, 2], (CacheSalt(str(tenant)),)))
        told.apply(cache.take_events())
        assert told.differences(cache) == []
    assert len(told.roots) == 5


@pytest.mark.parametrize("num_blocks", [5, 40])
def test_a_pool_that_changes_its_size_loses_no_event(num_blocks: int) -> None:
    cache = make_cache()
    told = Told()
    seqs = [compute(cache, [token] * 4) for token in (1, 2)]
    cache.resize(num_blocks)
    cache.free(seqs)
    seqs = [compute(cache, [token] * 4) for token in (3, 4)]
    told.apply(cache.take_events())
    assert told.differences(cache) == []
    cache.check()


def test_events_distinguish_the_cpu_pool_and_layer_groups() -> None:
    cache = make_cache(groups=(LayerGroup(2, name="full"), LayerGroup(2, sliding_window=4)), num_cpu_blocks=10)
    told = Told()
    cache.free(compute(cache, [1, 2, 3, 4, 5, 6, 7]))
    events = cache.take_events()
    told.apply(events)
    gpu, cpu = events.pools
    assert sorted(set(gpu.groups.tolist())) == [0, 1]
    assert len(cpu.ids) == 0
    for token in (7, 8, 9):
        cache.free(compute(cache, [token] * 7))
    events = cache.take_events()
    told.apply(events)
    assert len(events.pools[1].ids) > 0
    assert told.differences(cache) == []


def test_check_finds_a_log_without_a_mark() -> None:
    cache = make_cache()
    seq = compute(cache, [1, 2, 3, 4])
    cache._parts.token_blocks.index.log.marks[int(cache.block_ids(seq)[0])] = 0
    with pytest.raises(InvariantError, match="are logged"):
        cache.check()


def test_log_that_is_never_read_stays_bounded() -> None:
    cache = make_cache(num_blocks=6)
    log = cache._parts.token_blocks.index.log
    for token in range(500):
        cache.free(compute(cache, [token] * 4))
    assert log.num_entries <= len(log.entries) == 4 * 6
    cache.check()
    told = Told()
    told.apply(cache.take_events())
    assert told.differences(cache) == []
