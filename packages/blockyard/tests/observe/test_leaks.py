"""The leak report: who holds which blocks. It adds up to the pool, and looking changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import Admission, BlockLease, LayerGroup
from blockyard.answers import Holding
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt
from ..support.snapshot import snapshot


def test_an_empty_cache_leaks_nothing() -> None:
    cache = Checked()
    assert cache.leak_report() == []
    cache.free(cache.prefilled(prompt(1, 9)))
    assert cache.leak_report() == []


def test_sequences_are_named_with_their_blocks_in_order() -> None:
    cache = Checked()
    first = cache.allocate(prompt(1, 9), holder="chat 17")
    cache.compute(first)
    second = cache.allocate(prompt(1, 6), holder="chat 18")
    assert cache.leak_report() == [
        Holding("sequence", first, "chat 17", 9, [1, 2, 3], []),
        Holding("sequence", second, "chat 18", 6, [1, 4], []),
    ]
    cache.free(first)
    assert cache.leak_report() == [Holding("sequence", second, "chat 18", 6, [1, 4], [])]
    assert cache.running() == {second: "chat 18"}


def test_a_fork_holds_under_the_name_of_its_parent() -> None:
    cache = Checked()
    seq = cache.prefilled(prompt(1, 4))
    child = cache.fork(seq)[0]
    assert [(line.handle, line.block_ids) for line in cache.leak_report()] == [(seq, [1]), (child, [1])]


def test_leases_are_named_by_serial_and_holder() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 3), holder="chat")
    lease = cache.cache.pool.get_new_blocks(2, holder="prefix server")
    assert cache.leak_report() == [
        Holding("sequence", seq, "chat", 3, [1], []),
        Holding("lease", lease.serial, "prefix server", 0, [2, 3], []),
    ]
    cache.cache.pool.free_blocks(lease)
    assert len(cache.leak_report()) == 1


def test_a_swapped_sequence_holds_cpu_blocks() -> None:
    cache = Checked(num_cpu_blocks=10)
    seq = cache.allocate(prompt(1, 9), holder="parked")
    cache.compute(seq)
    plan = cache.swap_out([seq])
    saved = dict(plan.swap_outs.tolist())
    assert cache.leak_report() == [
        Holding("swapped sequence", seq, "parked", 9, [], [saved[1], saved[2], saved[3]]),
    ]
    cache.swap_in([seq])
    assert cache.leak_report() == [Holding("sequence", seq, "parked", 9, cache.row(seq), [])]


def test_blocks_to_load_from_the_cpu_are_held_in_both_pools() -> None:
    cache = Checked(num_blocks=6, num_cpu_blocks=8)
    cache.free(cache.prefilled(prompt(1, 8)))
    cache.cache.pool.free_blocks(cache.cache.pool.get_new_blocks(5))
    cache.reserve([], 0)
    seq = cache.allocate([*prompt(1, 8), 7], holder="loading")
    assert cache.num_computed_tokens(seq) == 8
    line = cache.leak_report()[0]
    assert (line.kind, line.block_ids, len(line.cpu_block_ids)) == ("sequence", cache.row(seq), 2)
    cache.compute(seq)
    assert cache.leak_report()[0].cpu_block_ids == []


def test_layer_groups_follow_one_another_and_windows_leave_no_null_blocks() -> None:
    cache = Checked(groups=(LayerGroup(4), LayerGroup(4, 4)))
    seq = cache.prefilled(prompt(1, 12), [7])
    full, window = cache.block_ids(seq, 0).tolist(), cache.block_ids(seq, 1).tolist()
    assert window.count(0) == 2
    assert cache.leak_report()[0].block_ids == [*full, window[2]]


def test_retiring_blocks_still_have_holders() -> None:
    cache = Checked(num_blocks=8)
    seq = cache.prefilled(prompt(1, 20))
    cache.resize(3)
    assert cache.leak_report()[0].block_ids == cache.row(seq) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"partial_hits": True},
        {"groups": (LayerGroup(4), LayerGroup(4, 6)), "partial_hits": True},
        {"num_cpu_blocks": 16, "partial_hits": True},
        {"num_cpu_blocks": 16, "groups": (LayerGroup(4), LayerGroup(8, 5))},
    ],
)
def test_at_random_the_report_adds_up_to_the_reference_counts(settings: dict[str, Any]) -> None:
    """Every reference in the pool and the CPU pool is on exactly one line, and asking changes nothing."""
    generator = random.Random(run_seed())
    cache = Checked(30, **settings)
    seqs, leases = list[int](), list[BlockLease]()
    for _ in range(80):
        tokens = [generator.choice((1, 1, 2)) for _ in range(generator.randint(1, 20))]
        if cache.can_allocate(tokens) is Admission.OK and len(seqs) < 6:
            seqs.append(cache.allocate(tokens))
        if seqs and generator.random() < 0.5 and not cache.is_swapped_out(seqs[-1]):
            cache.try_compute(seqs[-1])
        if cache.num_free_blocks and generator.random() < 0.2:
            leases.append(cache.cache.pool.get_new_blocks(1, holder="lease"))
        if leases and generator.random() < 0.2:
            cache.cache.pool.free_blocks(leases.pop())
        if seqs and generator.random() < 0.6:
            cache.free(seqs.pop(generator.randrange(len(seqs))))
        if settings.get("num_cpu_blocks") and seqs:
            move(cache, generator.choice(seqs))
        require_sum(cache)


def move(cache: Checked, seq: int) -> None:
    """Swap a sequence out or in where that is possible, and have the plan's saves carried out."""
    ready = not cache.is_swapped_out(seq) and cache.num_computed_tokens(seq) == cache.num_tokens(seq)
    if ready and cache.cpu_pool.num_free_blocks > 12:
        cache.swap_out([seq])
    elif cache.is_swapped_out(seq) and cache.num_free_blocks > 12:
        cache.swap_in([seq])
    cache.reserve([], 0)


def require_sum(cache: Checked) -> None:
    before = snapshot(cache.cache)
    report = cache.leak_report()
    assert snapshot(cache.cache) == before
    held: dict[int, int] = {}
    on_cpu: dict[int, int] = {}
    for line in report:
        for block in line.block_ids:
            held[block] = held.get(block, 0) + 1
        for block in line.cpu_block_ids:
            on_cpu[block] = on_cpu.get(block, 0) + 1
    assert held == {block: count for block, count in enumerate(cache.pool.ref_counts().tolist()) if count}
    if cache.cpu_pool is not None:
        counts = cache.cpu_pool.ref_counts().tolist()
        assert on_cpu == {block: count for block, count in enumerate(counts) if count}
