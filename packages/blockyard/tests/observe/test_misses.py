"""Why a prompt did not hit: every token has one cause, and the causes of a prompt add up to its tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import CacheSalt, InvalidArgument, LayerGroup, LoRA, PolicyError, Span
from blockyard.answers import MissCauses
from blockyard.policies import EvictionPolicy
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt


def tracked(num_blocks: int = 20, block_size: int = 4, **settings: Any) -> Checked:
    return Checked(num_blocks, block_size, track_misses=True, **settings)


def causes(
    cache: Checked, tokens: list[int], keys: tuple[Any, ...] = (), resumed: bool = False, forgets: bool = False
) -> dict[str, int]:
    """The causes that are not 0, of a prompt that is computed and freed; they add up.

    forgets: whether enough evictions came since that some of them may be forgotten.
    """
    seq = cache.allocate(tokens, holder="", extra_keys=keys, num_seqs=1, resumed=resumed)
    found = cache.miss_causes(seq)
    cache.compute(seq)
    cache.free(seq)
    assert sum(amounts(found)) == len(tokens)
    assert found.num_evicted > 0 if found.evicted_ago >= 0 else found.num_evicted == 0 or forgets
    return {name: getattr(found, name) for name in found.FIELDS if name != "evicted_ago" and getattr(found, name)}


def amounts(found: MissCauses) -> list[int]:
    """All numbers of tokens: everything but `evicted_ago`, which counts evictions."""
    return [getattr(found, name) for name in found.FIELDS if name != "evicted_ago"]


def evict_all(cache: Checked) -> None:
    """Take every block once, as another request would."""
    lease = cache.cache.pool.get_new_blocks(cache.num_free_blocks)
    cache.cache.pool.free_blocks(lease)


# ---------------------------------------------------------------- each cause


def test_a_new_prompt_was_never_seen_and_its_last_block_cannot_hit() -> None:
    """Ten tokens in blocks of four: two blocks could hit, two tokens are behind the last that could."""
    assert causes(tracked(), prompt(1, 10)) == {"num_never_seen": 8, "num_tail": 2}


def test_full_hit_misses_only_the_tail() -> None:
    cache = tracked()
    causes(cache, prompt(1, 10))
    assert causes(cache, prompt(1, 10)) == {"num_hit": 8, "num_tail": 2}
    assert causes(cache, [*prompt(1, 8), 7, 7, 7, 7, 7]) == {"num_hit": 8, "num_never_seen": 4, "num_tail": 1}


def test_a_prompt_below_one_block_is_all_tail() -> None:
    cache = tracked()
    for length in (1, 3, 4):  # four tokens fill a block, but the last is always left to compute
        assert causes(cache, prompt(1, length)) == {"num_tail": length}
    assert causes(cache, prompt(1, 4)) == {"num_tail": 4}


def test_evicted_and_never_seen_tokens_are_distinguished() -> None:
    cache = tracked()
    causes(cache, prompt(1, 13))
    evict_all(cache)
    assert causes(cache, [*prompt(1, 8), *prompt(2, 5)]) == {"num_evicted": 8, "num_never_seen": 4, "num_tail": 1}


def test_evicted_blocks_after_a_hit_count_as_evicted() -> None:
    """A suffix goes before its prefix: with one block taken, the third of three is gone."""
    cache = tracked(num_blocks=4)
    causes(cache, prompt(1, 12))
    cache.cache.pool.free_blocks(cache.cache.pool.get_new_blocks(1))
    # Whoever asks for all 13 tokens would need four blocks; 12 leave the last token of the third to compute.
    cache.resize(6)
    assert causes(cache, [*prompt(1, 12), 7]) == {"num_hit": 8, "num_evicted": 4, "num_tail": 1}


def test_other_salt_or_adapter_is_a_separate_cause() -> None:
    cache = tracked()
    causes(cache, prompt(1, 9), (CacheSalt("a"),))
    assert causes(cache, prompt(1, 9), (CacheSalt("b"),)) == {"num_other_keys": 8, "num_tail": 1}
    assert causes(cache, prompt(1, 9), (LoRA("a"),)) == {"num_other_keys": 8, "num_tail": 1}
    assert causes(cache, prompt(1, 9)) == {"num_other_keys": 8, "num_tail": 1}
    # All of them are cached now, each under its own keys.
    for keys in ((), (LoRA("a"),), (CacheSalt("a"),), (CacheSalt("b"),)):
        assert causes(cache, prompt(1, 9), keys) == {"num_hit": 8, "num_tail": 1}
    assert causes(cache, prompt(2, 9), (CacheSalt("a"),)) == {"num_never_seen": 8, "num_tail": 1}


def test_evicted_under_these_keys_says_more_than_cached_under_others() -> None:
    cache = tracked()
    causes(cache, prompt(1, 9), (CacheSalt("a"),))
    evict_all(cache)
    causes(cache, prompt(1, 9), (CacheSalt("b"),))
    assert causes(cache, prompt(1, 9), (CacheSalt("a"),)) == {"num_evicted": 8, "num_tail": 1}


def test_after_a_reset_it_was_cached_in_another_generation() -> None:
    cache = tracked()
    causes(cache, prompt(1, 9))
    cache.reset_prefix_cache()
    assert causes(cache, prompt(1, 9)) == {"num_other_keys": 8, "num_tail": 1}
    assert causes(cache, prompt(1, 9)) == {"num_hit": 8, "num_tail": 1}


def test_a_resumed_request_is_recomputed_whatever_the_cause() -> None:
    cache = tracked()
    assert causes(cache, prompt(1, 9), resumed=True) == {"num_recomputed": 8, "num_tail": 1}
    evict_all(cache)
    assert causes(cache, prompt(1, 9), resumed=True) == {"num_recomputed": 8, "num_tail": 1}
    assert causes(cache, prompt(1, 13), resumed=True) == {"num_hit": 8, "num_recomputed": 4, "num_tail": 1}


def test_a_hit_that_ends_inside_a_block_leaves_the_rest_of_it() -> None:
    cache = tracked(partial_hits=True)
    causes(cache, prompt(1, 8))
    tokens = [*prompt(1, 6), 7, 7, 7, 7]
    assert causes(cache, tokens) == {"num_hit": 6, "num_never_seen": 2, "num_tail": 2}
    # Where the copied beginning reaches into the tail, the tail is what is left.
    assert causes(cache, prompt(1, 8)) == {"num_hit": 7, "num_tail": 1}


# ---------------------------------------------------------------- how long ago


def test_how_many_evictions_ago() -> None:
    """Blocks 3, 2, 1 of prompt 1 go in this order, then two of prompt 2: its first block is the youngest of all."""
    cache = tracked(num_blocks=10, block_size=4)
    first = cache.prefilled(prompt(1, 12))
    second = cache.prefilled(prompt(2, 12))
    cache.free(first)
    cache.free(second)
    # Three blocks never used, then the oldest idle ones: the whole of prompt 1, its last block first.
    lease = cache.cache.pool.get_new_blocks(3 + 3 + 2)
    assert cache.stats().num_evicted_blocks == 5
    cache.cache.pool.free_blocks(lease)
    seq = cache.allocate(prompt(1, 13))
    # Its first block was the third of five evictions: two have come since.
    assert (cache.miss_causes(seq).num_evicted, cache.miss_causes(seq).evicted_ago) == (12, 2)
    cache.free(seq)
    seq = cache.allocate(prompt(2, 12))
    # Its first block still hits; the second was the last eviction of all, and the third is in the tail.
    assert (cache.miss_causes(seq).num_hit, cache.miss_causes(seq).num_evicted) == (4, 4)
    assert cache.miss_causes(seq).evicted_ago == 0


def test_evicted_ago_is_minus_one_without_evictions() -> None:
    cache = tracked()
    seq = cache.allocate(prompt(1, 9))
    assert cache.miss_causes(seq).evicted_ago == -1
    assert cache.miss_totals().evicted_ago == -1


def test_before_any_prompt_the_totals_are_empty() -> None:
    assert tracked().miss_totals() == MissCauses(0, 0, 0, 0, 0, 0, -1)


def test_an_old_eviction_is_forgotten_and_never_misread() -> None:
    """The memory is bounded, newer over older: what it lost reads "never seen"."""
    cache = tracked(num_blocks=4)
    for number in range(200):
        causes(cache, prompt(number, 8))
    found = [causes(cache, prompt(number, 9)) for number in range(200)]
    assert all(set(part) <= {"num_evicted", "num_never_seen", "num_tail", "num_hit"} for part in found)
    assert any("num_never_seen" in part for part in found)


# ---------------------------------------------------------------- totals


def test_the_totals_are_the_sum_and_a_resumed_hit_is_no_hit() -> None:
    cache = tracked()
    causes(cache, prompt(1, 10))
    causes(cache, prompt(1, 14))
    totals = cache.miss_totals()
    assert totals == MissCauses(8, 4, 8 + 4, 0, 0, 0, -1)
    assert totals.num_hit == cache.stats().num_hit_tokens
    causes(cache, prompt(1, 18), resumed=True)  # 12 of them are still there
    assert cache.miss_totals() == MissCauses(8, 6, 12, 0, 0, 4, -1)
    assert cache.stats().num_hit_tokens == 8
    assert cache.stats().num_prompt_tokens == 24


def test_a_batch_is_explained_prompt_by_prompt() -> None:
    cache = tracked()
    first, second = cache.allocate_batch([prompt(1, 9), prompt(1, 13)])
    assert amounts(cache.miss_causes(first)) == [0, 1, 8, 0, 0, 0, 0]
    assert amounts(cache.miss_causes(second)) == [8, 1, 4, 0, 0, 0, 0]
    cache.commit([first, second], cache.reserve([first, second], [9, 5]).num_scheduled)
    assert cache.miss_totals() == MissCauses(8, 2, 12, 0, 0, 0, -1)


def test_a_fork_has_no_prompt_of_its_own() -> None:
    cache = tracked()
    seq = cache.prefilled(prompt(1, 9))
    child = cache.fork(seq)[0]
    assert cache.miss_causes(child) == MissCauses(0, 0, 0, 0, 0, 0, -1)
    assert cache.miss_totals() == MissCauses(0, 1, 8, 0, 0, 0, -1)
    # Nor does a row's next tenant inherit anything.
    cache.free([seq])
    again = cache.fork(child)[0]
    assert cache.miss_causes(again) == MissCauses(0, 0, 0, 0, 0, 0, -1)


class Broken(EvictionPolicy):
    """Fails whenever it is asked."""

    def insert(self, block: int, key: int, depth: int) -> None:
        pass

    def remove(self, block: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def evict(self) -> int:
        raise RuntimeError("no idea")


def test_a_prompt_that_a_policy_failed_is_not_counted() -> None:
    cache = tracked(num_blocks=4, eviction_policy=Broken)
    causes(cache, prompt(1, 12))
    before = cache.miss_totals()
    with pytest.raises(PolicyError):
        cache.allocate(prompt(2, 12))
    assert cache.miss_totals() == before
    cache.set_eviction_policy("lru")
    # It was not remembered either: under other keys it is new.
    assert causes(cache, prompt(2, 12), (CacheSalt("a"),)) == {"num_never_seen": 8, "num_tail": 4}


def test_a_refused_prompt_is_not_counted() -> None:
    cache = tracked(num_blocks=4)
    cache.prefilled(prompt(1, 12))
    before = cache.miss_totals()
    with pytest.raises(Exception, match="token_ids needs 3 free blocks"):
        cache.allocate(prompt(2, 12))
    assert cache.miss_totals() == before


# ---------------------------------------------------------------- images, groups, switches


def test_an_image_that_is_cached_hits_and_one_that_is_new_was_never_seen() -> None:
    cache = tracked()
    tokens = prompt(1, 13)
    assert causes(cache, tokens, (Span("cat", 5, 2),)) == {"num_never_seen": 12, "num_tail": 1}
    assert causes(cache, tokens, (Span("cat", 5, 2),)) == {"num_hit": 12, "num_tail": 1}
    assert causes(cache, tokens, (Span("dog", 5, 2),)) == {"num_hit": 4, "num_never_seen": 8, "num_tail": 1}


def test_an_image_evicted_behind_text_that_is_still_there_counts_as_evicted() -> None:
    """The chain of hashes begins anew at an image, so it must be followed there to be recognised."""
    cache = tracked(num_blocks=5)
    tokens, keys = prompt(1, 13), (Span("cat", 5, 2),)
    causes(cache, tokens, keys)
    cache.cache.pool.free_blocks(cache.cache.pool.get_new_blocks(3))
    assert causes(cache, tokens, keys) == {"num_hit": 4, "num_evicted": 8, "num_tail": 1}


def test_with_layer_groups_what_the_pool_evicted_is_evicted_though_its_tokens_are_known() -> None:
    cache = tracked(groups=(LayerGroup(4), LayerGroup(4, 8)))
    assert causes(cache, prompt(1, 13)) == {"num_never_seen": 12, "num_tail": 1}
    assert causes(cache, prompt(1, 13)) == {"num_hit": 12, "num_tail": 1}
    evict_all(cache)
    assert causes(cache, prompt(1, 13)) == {"num_evicted": 12, "num_tail": 1}
    assert causes(cache, prompt(1, 13), (CacheSalt("a"),)) == {"num_other_keys": 12, "num_tail": 1}


def test_with_layer_groups_the_evictions_since_are_those_of_the_pool() -> None:
    """Two groups: each content goes in two blocks, and three contents are six evictions."""
    cache = tracked(num_blocks=30, groups=(LayerGroup(4), LayerGroup(4, 16)))
    causes(cache, prompt(1, 12))
    evict_all(cache)
    assert cache.stats().num_evicted_blocks == 6
    seq = cache.allocate(prompt(1, 13))
    assert cache.miss_causes(seq).evicted_ago == 0
    cache.free(seq)


def test_blocks_from_the_cpu_pool_count_as_hits() -> None:
    cache = tracked(num_blocks=6, num_cpu_blocks=8)
    causes(cache, prompt(1, 13))
    evict_all(cache)
    cache.reserve([], 0)
    assert causes(cache, prompt(1, 13)) == {"num_hit": 12, "num_tail": 1}


def test_miss_causes_are_rejected_if_tracking_is_off() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 9))
    for ask in (lambda: cache.miss_causes(seq), cache.miss_totals):
        with pytest.raises(InvalidArgument, match="track_misses is False"):
            ask()


def test_misses_are_not_tracked_without_prefix_caching() -> None:
    with pytest.raises(
        InvalidArgument, match=r"^track_misses is True, which does nothing while enable_prefix_caching is"
    ):
        tracked(enable_prefix_caching=False)


@pytest.mark.parametrize("settings", [{}, {"partial_hits": True}, {"groups": (LayerGroup(4), LayerGroup(4, 6))}])
def test_at_random_causes_add_up_and_totals_follow(settings: dict[str, Any]) -> None:
    generator = random.Random(run_seed())
    cache = tracked(24, **settings)
    total, resumed_hits = 0, 0
    for _ in range(150):
        tokens = [generator.choice((1, 1, 2)) for _ in range(generator.randint(1, 24))]
        keys = generator.choice(((), (CacheSalt("a"),), (Span("cat", 0, 1),)))
        resumed = generator.random() < 0.3
        found = causes(cache, tokens, keys, resumed, forgets=True)
        total += len(tokens)
        resumed_hits += found.get("num_hit", 0) if resumed else 0
        if generator.random() < 0.05:
            cache.reset_prefix_cache()
    totals = cache.miss_totals()
    assert sum(amounts(totals)) == total - resumed_hits
    assert totals.num_hit == cache.stats().num_hit_tokens


def test_with_block_sizes_of_4_and_8_a_hit_ends_every_8_tokens_and_the_rest_is_tail() -> None:
    cache = tracked(groups=(LayerGroup(4), LayerGroup(8)))
    assert causes(cache, prompt(1, 14)) == {"num_never_seen": 8, "num_tail": 6}
    assert causes(cache, prompt(1, 14)) == {"num_hit": 8, "num_tail": 6}


def test_an_image_behind_text_that_was_evicted_too_is_recognised() -> None:
    cache = tracked()
    tokens, keys = prompt(1, 21), (Span("cat", 5, 2), Span("dog", 14, 4))
    causes(cache, tokens, keys)
    evict_all(cache)
    assert causes(cache, tokens, (Span("cat", 5, 2),)) == {"num_evicted": 12, "num_never_seen": 8, "num_tail": 1}
    evict_all(cache)
    assert causes(cache, tokens, keys)["num_evicted"] >= 12


def test_the_latest_turnover_of_the_pool_is_remembered() -> None:
    """As many evictions as the pool has blocks: of what went, about a hundredth may have been overwritten."""
    blocks = 1000
    remembered = [num_remembered(blocks) for _ in range(5)]
    assert sum(remembered) >= 0.99 * blocks * len(remembered)
    assert min(remembered) >= 0.98 * blocks


def num_remembered(blocks: int) -> int:
    """Of a pool's blocks that were all evicted, those that a prompt is told of, under a hash seed that was drawn."""
    cache = tracked(num_blocks=blocks + 1, max_model_len=4000, max_num_seqs=2).cache
    for number in range(0, 2 * blocks, 100):
        seq = cache.allocate(range(number * 400, number * 400 + 400))
        cache.reserve([seq], 400)
        cache.commit([seq], 400)
        cache.free(seq)
    assert cache.stats().num_evicted_blocks == blocks
    evicted = 0
    for number in range(0, blocks, 100):
        seq = cache.allocate([*range(number * 400, number * 400 + 400), 7])
        evicted += cache.miss_causes(seq).num_evicted // 4
        cache.free(seq)
    return evicted
