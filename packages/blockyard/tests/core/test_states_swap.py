"""Sequences of hybrid models that are swapped out before their first step: their state is found again, or given up."""

from __future__ import annotations

import pytest

from blockyard import CacheConfig, CPUPoolConfig, KVCacheManager, LayerGroup, SequenceNotReady, StateHints, StateSpec
from blockyard_testing.state_memory import StateMemory, compute

GROUPS = (LayerGroup(16, token_bytes=1000), StateSpec(state_bytes=48_000, checkpoint_every=16))


def swapped_at_its_hit() -> tuple[KVCacheManager, StateMemory, int, list[int]]:
    """A sequence that hit 32 tokens and a state, and was swapped out before its first step."""
    cache = KVCacheManager(CacheConfig(num_blocks=24, groups=GROUPS, cpu=CPUPoolConfig(num_blocks=40)))
    memory = StateMemory(cache)
    prompt = list(range(40))
    first = cache.allocate(prompt, states=StateHints(checkpoints=[32]))
    compute(cache, memory, first, list(prompt), [1, 2])
    cache.free(first)
    tokens = [*prompt[:36], 99, 98]
    seq = cache.allocate(tokens)
    assert cache.num_computed_tokens(seq) == 32
    assert cache.can_swap_out([seq])
    cache.swap_out([seq])
    cache.check()
    assert cache.num_used_blocks == 0
    return cache, memory, seq, tokens


def test_state_of_a_hit_is_found_again_after_a_swap() -> None:
    cache, memory, seq, tokens = swapped_at_its_hit()
    for refused in (lambda: cache.fork(seq), lambda: cache.truncate(seq, 3)):
        with pytest.raises(SequenceNotReady, match="swapped out before its first step has loaded the state"):
            refused()
    assert cache.can_swap_in([seq])
    cache.swap_in([seq])
    cache.check()
    loaded = memory.num_loaded
    compute(cache, memory, seq, tokens, [5])
    assert memory.num_loaded == loaded + 1
    cache.free(seq)
    cache.check()


@pytest.mark.parametrize("is_reset", [False, True])
def test_prompt_is_computed_anew_if_the_state_of_its_hit_was_evicted(is_reset: bool) -> None:
    cache, memory, seq, tokens = swapped_at_its_hit()
    if is_reset:
        cache.reset_prefix_cache()
    else:
        lease = cache.pool.get_new_blocks(cache.num_free_blocks)
        memory.prepare(cache.reserve([]))
        cache.pool.free_blocks(lease)
    cache.swap_in([seq])
    cache.check()
    assert (cache.num_computed_tokens(seq), cache.num_used_blocks) == (0, 0)
    compute(cache, memory, seq, tokens, [5])
    cache.check()
    cache.free(seq)
    assert cache.num_used_blocks == 0
