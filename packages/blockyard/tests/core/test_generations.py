"""After `reset_prefix_cache` nothing cached earlier is hit; running sequences continue and cache nothing more."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import LayerGroup

from ..support.checked import Checked, prompt

CONFIGS: list[dict[str, Any]] = [
    {},
    {"num_cpu_blocks": 12},
    {"groups": (LayerGroup(4), LayerGroup(8, 12)), "num_cpu_blocks": 30, "num_blocks": 60},
]
CPU = CONFIGS[1:]


def hit(cache: Checked, tokens: list[int]) -> int:
    """What a prompt of these tokens, and one more, would hit."""
    seq = cache.allocate([*tokens, 5])
    found: int = cache.num_computed_tokens(seq)
    cache.free(seq)
    return found


@pytest.mark.parametrize("settings", CONFIGS)
def test_a_running_sequence_goes_on_and_publishes_nothing(settings: dict[str, Any]) -> None:
    cache = Checked(**settings)
    seq = cache.prefilled(prompt(1, 8), [5])
    assert hit(cache, prompt(1, 8)) == 8
    cache.reset_prefix_cache()
    assert cache.generation == 1
    assert hit(cache, prompt(1, 8)) == 0
    for _ in range(12):
        cache.compute(seq, [5])
    tokens = cache.tokens(seq)
    assert tokens == [*prompt(1, 8), *[5] * 13]
    assert hit(cache, tokens[:16]) == 0
    (child,) = cache.fork(seq)
    cache.free(seq)
    for _ in range(8):
        cache.compute(child, [6])
    assert hit(cache, cache.tokens(child)) == 0


@pytest.mark.parametrize("settings", CONFIGS)
def test_contents_after_a_reset_are_cached_normally(settings: dict[str, Any]) -> None:
    cache = Checked(**settings)
    old = cache.prefilled(prompt(1, 16), [5])
    cache.reset_prefix_cache()
    new = cache.prefilled(prompt(1, 16), [5])
    assert set(cache.row(new)).isdisjoint(cache.row(old))
    assert hit(cache, prompt(1, 16)) == 16
    cache.free(old)
    assert hit(cache, prompt(1, 16)) == 16


@pytest.mark.parametrize("settings", CONFIGS)
def test_a_prompt_begun_before_the_reset_and_computed_after_it(settings: dict[str, Any]) -> None:
    """Half of its keys and values come from the old weights, so none of it may be hit."""
    cache = Checked(**settings)
    seq = cache.allocate(prompt(1, 16))
    cache.compute_some(seq, 8)
    cache.reset_prefix_cache()
    cache.compute(seq, [5])
    assert hit(cache, prompt(1, 16)) == 0


@pytest.mark.parametrize("settings", CPU)
def test_sequence_swapped_out_during_a_reset_caches_nothing(settings: dict[str, Any]) -> None:
    """On the CPU when the weights change: it comes back whole, and brings nothing back that could be hit."""
    cache = Checked(**settings)
    seq = cache.prefilled(prompt(1, 16), [5])
    cache.swap_out(seq)
    cache.reset_prefix_cache()
    assert hit(cache, prompt(1, 16)) == 0
    plan = cache.swap_in(seq)
    held = {block for group in range(len(plan_groups(cache))) for block in cache.block_ids(seq, group).tolist()} - {0}
    # No short cut by content is left: every block is moved.
    assert {target for _, target in plan.swap_ins.tolist()} == held
    assert hit(cache, prompt(1, 16)) == 0
    cache.compute(seq, [5])
    cache.swap_out(seq)
    assert hit(cache, prompt(1, 16)) == 0
    assert cache.cpu_pool.num_cached_blocks == 0
    cache.swap_in(seq)
    assert cache.tokens(seq) == [*prompt(1, 16), 5, 5]


def plan_groups(cache: Checked) -> list[Any]:
    return cache.reserve([], 0).groups


@pytest.mark.parametrize("settings", CPU)
def test_a_hit_on_the_cpu_that_is_loaded_after_the_reset(settings: dict[str, Any]) -> None:
    """It was admitted on the old keys and values and may use them; nobody else may afterwards."""
    cache = Checked(**settings)
    cache.free(cache.prefilled(prompt(1, 16)))
    cache.pool.free_blocks(cache.pool.get_new_blocks(cache.num_free_blocks))
    seq = cache.allocate([*prompt(1, 16), 5])
    assert cache.num_computed_tokens(seq) == 16
    cache.reset_prefix_cache()
    plan = cache.reserve([seq], 1)
    assert len(plan.swap_ins) > 0
    cache.commit([seq], 1)
    assert hit(cache, prompt(1, 16)) == 0
    assert cache.num_cached_blocks == 0


@pytest.mark.parametrize("settings", CPU)
def test_save_pending_during_a_reset_is_not_hit(settings: dict[str, Any]) -> None:
    """Evicted before the reset, told of after it: the move is harmless, and no key leads to it."""
    cache = Checked(**settings)
    cache.free(cache.prefilled(prompt(1, 16)))
    cache.pool.free_blocks(cache.pool.get_new_blocks(cache.num_free_blocks))
    cache.reset_prefix_cache()
    cache.reserve([], 0)
    assert cache.cpu_pool.num_used_blocks == 0
    assert hit(cache, prompt(1, 16)) == 0


def test_many_resets_between_steps() -> None:
    """Each generation hits its own and nothing else, however often the counter moves on."""
    cache = Checked(num_blocks=40, num_cpu_blocks=9)
    for generation in range(20):
        assert cache.generation == generation
        assert hit(cache, prompt(1, 8)) == 0
        seq = cache.prefilled(prompt(1, 8))
        assert hit(cache, prompt(1, 8)) == 8
        if generation % 2:
            cache.swap_out(seq)
        if generation % 3 == 0:
            cache.free(seq)
        else:
            for old in list(cache.running())[:-2]:
                cache.free(old)
        cache.reset_prefix_cache()


@pytest.mark.parametrize("is_reset", [True, False])
def test_uncached_blocks_of_a_freed_sequence_are_taken_first(is_reset: bool) -> None:
    cache = Checked(num_blocks=20)
    seq = cache.allocate(prompt(1, 16))
    cache.compute_some(seq, 8)
    if is_reset:
        cache.reset_prefix_cache()
    cache.free(cache.prefilled(prompt(2, 12)))
    blocks = cache.row(seq)
    cached = [] if is_reset else blocks[:2]
    cache.free(seq)
    assert set(cache.free_order()[: 4 - len(cached)]) == set(blocks) - set(cached)
    assert cache.free_order()[-len(cached) or 20 :] == cached[::-1]
