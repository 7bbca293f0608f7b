"""The CPU pool keeps evicted blocks: they are saved there, hit again, and loaded by the next step."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import CacheSalt, LayerGroup, LoRA, SequenceNotReady, Span

from ..support.checked import Checked, prompt


def tiered(num_blocks: int = 5, num_cpu_blocks: int = 9, **settings: Any) -> Checked:
    return Checked(num_blocks, num_cpu_blocks=num_cpu_blocks, **settings)


def run(cache: Checked, tokens: list[int], keys: tuple[Any, ...] = ()) -> list[int]:
    """Compute a prompt and finish it; the blocks it had."""
    seq = cache.allocate(tokens, extra_keys=keys)
    cache.compute(seq)
    row = cache.row(seq)
    cache.free(seq)
    return row


def push_out(cache: Checked) -> None:
    """Fill the pool with something else, which is gone again without a trace."""
    cache.pool.free_blocks(cache.pool.get_new_blocks(cache.num_free_blocks))
    assert cache.num_cached_blocks == 0


def test_evicted_blocks_are_saved_hit_and_loaded() -> None:
    cache = tiered()
    assert run(cache, prompt(1, 8)) == [1, 2]
    # The pool has four blocks: the newcomer takes 3 and 4, then evicts 2, a suffix, before 1.
    other = cache.allocate(prompt(2, 12))
    assert cache.row(other) == [3, 4, 2]
    assert cache.cpu_pool.num_used_blocks == 1  # held for a save that no plan has told of yet
    plan = cache.reserve([other], 12)
    assert plan.swap_outs.tolist() == [[2, 1]]
    assert plan.swap_out_groups.tolist() == [0]
    assert plan.swap_ins.tolist() == []
    assert cache.cpu_pool.num_used_blocks == 0
    cache.commit([other], 12)
    cache.free(other)
    again = cache.allocate([*prompt(1, 8), 5])
    assert cache.num_computed_tokens(again) == 8  # block 0 from the pool, block 1 from the CPU
    assert cache.row(again)[0] == 1
    assert cache.cpu_pool.ref_counts()[:2].tolist() == [0, 1]
    plan = cache.reserve([again], 1)
    assert plan.swap_ins.tolist() == [[1, cache.row(again)[1]]]
    assert plan.swap_in_groups.tolist() == [0]
    assert cache.cpu_pool.num_used_blocks == 0
    cache.commit([again], 1)
    assert cache.reserve([again], 0).swap_ins.tolist() == []  # loaded once


def test_loaded_blocks_are_hit_in_the_pool() -> None:
    cache = tiered(num_blocks=9)
    run(cache, prompt(1, 8))
    push_out(cache)
    first = cache.allocate([*prompt(1, 8), 5])
    early = cache.allocate([*prompt(1, 8), 6])  # before the load: loads for itself
    assert set(cache.row(first)).isdisjoint(cache.row(early))
    plan = cache.reserve([first], 1)
    assert len(plan.swap_ins) == 2
    cache.commit([first], 1)
    late = cache.allocate([*prompt(1, 8), 7])
    assert cache.row(late)[:2] == cache.row(first)[:2]
    assert cache.reserve([late], 1).swap_ins.tolist() == []


def test_plan_saves_a_block_before_it_is_overwritten() -> None:
    """The next plan has all evictions since the last one, even if it is a plan without sequences."""
    cache = tiered()
    run(cache, prompt(1, 16))
    push_out(cache)
    plan = cache.reserve([], 0)
    assert sorted(plan.swap_outs.tolist()) == [[1, 4], [2, 3], [3, 2], [4, 1]]
    assert cache.reserve([], 0).swap_outs.tolist() == []


def test_swap_plans_include_saves() -> None:
    cache = tiered(num_blocks=6)
    run(cache, prompt(1, 8))
    seq = cache.allocate(prompt(2, 3))
    cache.compute(seq)
    push_out(cache)
    plan = cache.swap_out(seq)
    assert sorted(plan.swap_outs.tolist()) == [[1, 2], [2, 1], [3, 3]]
    push_out(cache)
    run(cache, prompt(3, 20))
    push_out(cache)
    plan = cache.swap_in(seq)
    assert len(plan.swap_ins) == 1
    assert len(plan.swap_outs) == 5


def test_a_duplicate_in_the_pool_is_not_saved() -> None:
    """If two blocks have equal contents, only the last one to be evicted is saved."""
    cache = tiered()
    first, second = cache.allocate(prompt(1, 5)), cache.allocate(prompt(1, 5))
    cache.compute(first)
    cache.compute(second)
    cache.free(first)
    cache.pool.free_blocks(cache.pool.get_new_blocks(2))
    assert cache.num_cached_blocks == 1
    assert cache.reserve([], 0).swap_outs.tolist() == []
    block = cache.row(second)[0]
    cache.free(second)
    push_out(cache)
    assert cache.reserve([], 0).swap_outs.tolist() == [[block, 1]]


def test_content_in_the_cpu_pool_is_not_saved_again() -> None:
    cache = tiered()
    run(cache, prompt(1, 4))
    push_out(cache)
    assert len(cache.reserve([], 0).swap_outs) == 1
    run(cache, prompt(1, 4))
    push_out(cache)
    assert cache.reserve([], 0).swap_outs.tolist() == []


def test_sequences_come_first_on_the_cpu() -> None:
    """The CPU pool is full of a sequence: evicted blocks are not kept, and the sequence comes back whole."""
    cache = tiered(num_cpu_blocks=3)
    seq = cache.prefilled(prompt(1, 7))
    cache.swap_out(seq)
    assert cache.cpu_pool.num_free_blocks == 0
    run(cache, prompt(2, 16))
    push_out(cache)
    assert cache.reserve([], 0).swap_outs.tolist() == []
    plan = cache.swap_in(seq)
    assert len(plan.swap_ins) == 2
    cache.compute_some(cache.allocate(prompt(3, 2)), 2)


def test_nothing_is_saved_over_what_the_same_plan_loads() -> None:
    """The CPU pool has one block, which the first sequence loads; the second evicts a block, for which no place is.

    Saves are carried out before loads: over the same CPU block, the first sequence would get the second's victim.
    """
    cache = tiered(num_cpu_blocks=2)
    run(cache, prompt(1, 4))
    push_out(cache)
    assert len(cache.reserve([], 0).swap_outs) == 1
    growing = cache.prefilled(prompt(3, 4), [5])
    victim = run(cache, prompt(2, 4))
    loading = cache.allocate([*prompt(1, 4), 5])
    assert cache.free_order() == victim
    plan = cache.reserve([loading, growing], 1)
    assert plan.swap_ins.tolist() == [[1, cache.row(loading)[0]]]
    assert plan.swap_outs.tolist() == []
    assert cache.row(growing)[1] == victim[0]


def test_nothing_is_saved_over_what_the_same_plan_brings_back() -> None:
    """The CPU pool is full of a sequence of two blocks; its way back evicts two others, for which no place is."""
    cache = tiered(num_blocks=3, num_cpu_blocks=3)
    seq = cache.prefilled(prompt(1, 7))
    cache.swap_out(seq)
    run(cache, prompt(2, 8))
    assert cache.num_cached_blocks == 2
    plan = cache.swap_in(seq)
    assert sorted(plan.swap_ins[:, 0].tolist()) == [1, 2]
    assert plan.swap_outs.tolist() == []


def test_nothing_is_saved_over_a_save_of_the_same_plan() -> None:
    """Two sequences grow into two idle blocks while the CPU pool has one: the first victim is saved, the second not."""
    cache = tiered(num_cpu_blocks=2)
    seqs = [cache.prefilled(prompt(number, 4), [5]) for number in (1, 2)]
    run(cache, prompt(3, 8))
    first, second = cache.free_order()
    plan = cache.reserve(seqs, 1)
    assert plan.swap_outs.tolist() == [[first, 1]]
    assert [cache.row(seq)[1] for seq in seqs] == [first, second]


def test_full_cpu_pool_evicts_its_oldest_block() -> None:
    cache = tiered(num_cpu_blocks=3)
    for number in (1, 2, 3):
        run(cache, prompt(number, 4))
        push_out(cache)
        cache.reserve([], 0)
    hits = []
    for number in (3, 2, 1):
        seq = cache.allocate([*prompt(number, 4), 5])
        hits.append(cache.num_computed_tokens(seq))
        cache.free(seq)
    assert hits == [4, 4, 0]


def test_without_keep_evicted_nothing_is_saved() -> None:
    cache = tiered(keep_evicted=False)
    run(cache, prompt(1, 8))
    push_out(cache)
    assert cache.reserve([], 0).swap_outs.tolist() == []
    assert cache.num_computed_tokens(cache.allocate([*prompt(1, 8), 5])) == 0


def test_a_loading_sequence_can_be_freed_and_nothing_stays() -> None:
    cache = tiered()
    run(cache, prompt(1, 8))
    push_out(cache)
    seq = cache.allocate([*prompt(1, 8), 5])
    assert cache.cpu_pool.num_used_blocks == 2
    for call in (lambda: cache.fork(seq), lambda: cache.truncate(seq, 5)):
        with pytest.raises(SequenceNotReady, match="to load from the CPU pool"):
            call()
    cache.free(seq)
    cache.reserve([], 0)
    assert cache.cpu_pool.num_used_blocks == 0
    assert cache.num_used_blocks == 0


def test_a_group_finds_its_own_blocks_only() -> None:
    """The blocks of both groups are saved; a hit loads to each group the blocks that were computed for it."""
    cache = tiered(num_blocks=9, num_cpu_blocks=20, groups=(LayerGroup(4), LayerGroup(8)))
    run(cache, prompt(1, 16))
    push_out(cache)
    saved = cache.reserve([], 0)
    by_group = dict(zip(map(tuple, saved.swap_outs.tolist()), saved.swap_out_groups.tolist(), strict=True))
    assert sorted(by_group.values()) == [0, 0, 0, 0, 1, 1]
    seq = cache.allocate([*prompt(1, 16), 5])
    assert cache.num_computed_tokens(seq) == 16
    plan = cache.reserve([seq], 1)
    cpu_group = {target: group for (_, target), group in by_group.items()}
    for (source, target), group in zip(plan.swap_ins.tolist(), plan.swap_in_groups.tolist(), strict=True):
        assert cpu_group[source] == group
        assert target in cache.block_ids(seq, group)


# ---------------------------------------------------------------- identity on every tier

SPAN = Span("cat", 1, 2)
IDENTITIES = [
    (),
    (CacheSalt("a"),),
    (CacheSalt("b"),),
    (LoRA("a"),),
    (LoRA("a", "v2"),),
    (LoRA("a"), CacheSalt("a")),
    (SPAN,),
    (Span("dog", 1, 2),),
    (CacheSalt("a"), SPAN),
]


def in_the_pool(cache: Checked, keys: tuple[Any, ...]) -> None:
    run(cache, prompt(1, 9), keys)


def running(cache: Checked, keys: tuple[Any, ...]) -> None:
    cache.compute(cache.allocate(prompt(1, 9), extra_keys=keys))


def on_the_cpu(cache: Checked, keys: tuple[Any, ...]) -> None:
    run(cache, prompt(1, 9), keys)
    push_out(cache)


def swapped_out(cache: Checked, keys: tuple[Any, ...]) -> None:
    seq = cache.allocate(prompt(1, 9), extra_keys=keys)
    cache.compute(seq)
    cache.swap_out(seq)
    push_out(cache)


def brought_back(cache: Checked, keys: tuple[Any, ...]) -> None:
    seq = cache.allocate(prompt(1, 9), extra_keys=keys)
    cache.compute(seq)
    cache.swap_out(seq)
    push_out(cache)
    cache.swap_in(seq)


@pytest.mark.parametrize("place", [in_the_pool, running, on_the_cpu, swapped_out, brought_back])
@pytest.mark.parametrize("stored", IDENTITIES)
def test_only_the_same_identity_hits_on_every_tier(place: Any, stored: tuple[Any, ...]) -> None:
    cache = tiered(num_blocks=9)
    place(cache, stored)
    for asked in IDENTITIES:
        seq = cache.allocate([*prompt(1, 8), 5, 5], extra_keys=asked)
        assert cache.num_computed_tokens(seq) == (8 if set(asked) == set(stored) else 0), (stored, asked)
        cache.free(seq)
    # The order of the keys is no part of the identity.
    seq = cache.allocate([*prompt(1, 8), 5, 5], extra_keys=stored[::-1])
    assert cache.num_computed_tokens(seq) == 8


@pytest.mark.parametrize("place", [in_the_pool, running, on_the_cpu, swapped_out, brought_back])
def test_nothing_older_than_a_reset_hits_on_any_tier(place: Any) -> None:
    cache = tiered(num_blocks=9)
    place(cache, ())
    cache.reset_prefix_cache()
    assert cache.num_cached_blocks == cache.cpu_pool.num_cached_blocks == 0
    assert cache.num_computed_tokens(cache.allocate([*prompt(1, 8), 5])) == 0
