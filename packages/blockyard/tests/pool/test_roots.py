"""The roots of prompts with extra keys: as many are remembered as the pool has blocks, and forgetting one is O(1)."""

from __future__ import annotations

import random
from collections import OrderedDict

from blockyard import CacheConfig, CacheSalt, KVCacheManager
from blockyard.core.index.roots import Roots
from blockyard_testing.seeds import run_seed


def test_thirty_thousand_salts_leave_as_many_roots_as_there_are_blocks() -> None:
    cache = KVCacheManager(CacheConfig(20, 4, max_num_seqs=2, max_model_len=16, hash_seed=1))
    roots = cache._parts.token_blocks.index.roots
    for number in range(30_000):
        cache.free(cache.allocate([1, 2, 3, 4, 5], holder="", extra_keys=(CacheSalt(f"tenant {number}"),)))
    assert len(roots) == 21
    cache.check()


def test_an_allocation_keeps_the_root_of_its_keys_and_a_question_does_not() -> None:
    cache = KVCacheManager(CacheConfig(4, 4, max_num_seqs=2, max_model_len=12, hash_seed=1))
    roots = cache._parts.token_blocks.index.roots
    salts = [(CacheSalt(f"tenant {number}"),) for number in range(6)]
    for salt in salts[:5]:
        cache.free(cache.allocate([1, 2, 3, 4, 5], holder="", extra_keys=salt))
    cache.num_cached_tokens([1, 2, 3, 4, 5], extra_keys=salts[0])
    cache.can_allocate([1, 2, 3, 4, 5], extra_keys=salts[5])
    assert [keys[0][1] for keys in roots.latest(9).values()] == [f"tenant {n}" for n in (4, 3, 2, 1, 0)]
    cache.free(cache.allocate([1, 2, 3, 4, 5], holder="", extra_keys=salts[0]))
    cache.free(cache.allocate_batch([[1, 2, 3, 4, 5], [1, 2, 3, 4, 9]], holders=(), extra_keys=salts[5]))
    assert [keys[0][1] for keys in roots.latest(9).values()] == [f"tenant {n}" for n in (5, 0, 4, 3, 2)]
    cache.check()


def test_the_oldest_is_found_without_a_walk() -> None:
    """A plain dict walks over all keys deleted before its first one; an ordered one links them."""
    assert isinstance(Roots(5)._contents, OrderedDict)


def test_the_least_recently_used_is_forgotten_first() -> None:
    draw = random.Random(run_seed())
    roots, model, content = Roots(7), OrderedDict(), 0
    for _ in range(5000):
        keys = (f"tenant {draw.randrange(12)}",)
        assert roots.find(keys) == model.get(keys, 0)
        if roots.touch(keys) == 0:
            assert keys not in model
            content += 1
            roots.remember(keys, content)
            model[keys] = content
            if len(model) > 7:
                model.popitem(last=False)
        else:
            model.move_to_end(keys)
        assert len(roots) == len(model) <= 7
        assert roots.holds(content)
    assert [keys for keys in (f"tenant {number}" for number in range(12)) if roots.find((keys,))] != []
    roots.clear()
    assert len(roots) == 0
