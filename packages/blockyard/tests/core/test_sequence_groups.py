"""Sequence groups: rows set aside for the forks of a prompt, and blocks for their first copies."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import Admission, InvalidArgument, LayerGroup, NeverFits, OutOfBlocks, OutOfRows, SeqStatus
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt
from ..support.snapshot import refused, snapshot


def test_the_rows_are_there_when_the_forks_come() -> None:
    """Three rows: a group of two leaves one for others, whatever they ask, until its fork has come."""
    cache = Checked(max_num_seqs=3)
    first = cache.allocate(prompt(1, 6), num_seqs=2)
    assert cache.can_allocate(prompt(2, 1), num_seqs=2) is Admission.LATER
    with pytest.raises(OutOfRows, match="2 rows are needed, 1 are free"):
        cache.allocate(prompt(2, 1), num_seqs=2)
    other = cache.allocate(prompt(2, 1))
    assert cache.can_allocate(prompt(3, 1)) is Admission.LATER
    cache.compute(other)
    with pytest.raises(OutOfRows):
        cache.fork(other)
    cache.compute(first)
    (child,) = cache.fork(first, 1)
    assert cache.tokens(child) == prompt(1, 6)
    with pytest.raises(OutOfRows):
        cache.fork(first)
    cache.free(child)  # its row is anybody's now
    cache.allocate(prompt(3, 1))


def test_forks_one_after_another_use_up_the_promise() -> None:
    cache = Checked(max_num_seqs=4)
    first = cache.allocate(prompt(1, 6), num_seqs=3)
    cache.compute(first)
    cache.fork(first)
    other = cache.allocate(prompt(2, 1))  # the fourth row
    with pytest.raises(OutOfRows):
        cache.fork(first, 2)
    cache.fork(first)
    cache.free(other)
    cache.fork(first)


def test_more_forks_than_promised_take_open_rows() -> None:
    cache = Checked(max_num_seqs=4)
    first = cache.allocate(prompt(1, 6), num_seqs=2)
    cache.compute(first)
    assert len(cache.fork(first, 3)) == 3
    assert cache.num_seqs == 4


def test_the_promise_ends_with_the_sequence() -> None:
    """All rows can be asked for at once again; one by one would not show it, for the same row is reused first."""
    cache = Checked(max_num_seqs=3)
    cache.free(cache.allocate(prompt(1, 6), num_seqs=3))
    seq = cache.allocate(prompt(2, 6), num_seqs=3)
    cache.regroup([seq], [])
    assert cache.can_allocate_batch([prompt(1, 1), prompt(2, 1), prompt(3, 1)]) is Admission.OK


def test_regrouping_uses_up_the_promise() -> None:
    """One of two promised rows is used by the second child; the fourth row is all that others may have then."""
    cache = Checked(max_num_seqs=4)
    first = cache.prefilled(prompt(1, 6))
    group = cache.allocate(prompt(2, 6), num_seqs=3)
    cache.compute(group)
    assert len(cache.regroup([first, group], [1, 1])) == 2  # `first` ends
    assert cache.can_allocate(prompt(3, 1)) is Admission.OK
    assert cache.can_allocate(prompt(3, 1), num_seqs=2) is Admission.LATER
    cache.regroup([group], [0, 0])
    assert cache.num_seqs == 3
    assert cache.can_allocate(prompt(3, 1)) is Admission.OK


def test_a_child_has_no_promise_of_its_own() -> None:
    cache = Checked(max_num_seqs=3)
    first = cache.allocate(prompt(1, 6), num_seqs=3)
    cache.compute(first)
    (child,) = cache.fork(first)
    with pytest.raises(OutOfRows):
        cache.fork(child)
    cache.fork(first)


def test_copies_are_counted_where_the_last_block_is_partial() -> None:
    """Six tokens are two blocks, and each further sequence copies the second one; of eight tokens none is copied."""
    for length, copies in ((6, 1), (8, 0), (5, 1), (9, 1), (12, 0)):
        blocks = -(-length // 4)
        for num_seqs in (1, 2, 4):
            needed = blocks + (num_seqs - 1) * copies
            assert Checked(1 + needed).can_allocate(prompt(1, length), num_seqs=num_seqs) is Admission.OK
            if needed > 1:
                small = Checked(needed)
                assert small.can_allocate(prompt(1, length), num_seqs=num_seqs) is Admission.NEVER
                with refused(small.cache, NeverFits, match=f"needs {needed} blocks"):
                    small.allocate(prompt(1, length), num_seqs=num_seqs)


def test_later_while_others_hold_the_blocks_for_the_copies() -> None:
    cache = Checked(num_blocks=7)
    other = cache.allocate(prompt(9, 7))  # two of six blocks
    assert cache.can_allocate(prompt(1, 6), num_seqs=3) is Admission.OK
    assert cache.can_allocate(prompt(1, 6), num_seqs=4) is Admission.LATER
    with pytest.raises(OutOfBlocks) as caught:
        cache.allocate(prompt(1, 6), num_seqs=4)
    assert (caught.value.num_needed, caught.value.num_free) == (5, 4)
    cache.free(other)
    assert cache.can_allocate(prompt(1, 6), num_seqs=4) is Admission.OK


def test_each_group_copies_its_own_last_block() -> None:
    """Six tokens fill three blocks of 2, and a block and a half of 4: one copy a fork, though no page is partial."""
    groups = (LayerGroup(2), LayerGroup(4))
    assert Checked(1 + 5 + 1, groups=groups).can_allocate(prompt(1, 6), num_seqs=2) is Admission.OK
    assert Checked(5 + 1, groups=groups).can_allocate(prompt(1, 6), num_seqs=2) is Admission.NEVER


SETTINGS: list[dict[str, Any]] = [
    {},
    {"enable_prefix_caching": False},
    {"groups": (LayerGroup(2), LayerGroup(4))},
    {"groups": (LayerGroup(4), LayerGroup(3, 5))},
    {"num_cpu_blocks": 5},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_admitted_can_fork_and_make_its_first_copies(settings: dict[str, Any]) -> None:
    """OK is a promise: with nobody else around, prefill, fork and rewriting the last token all get their blocks."""
    draw = random.Random(run_seed())
    admitted = 0
    for _ in range(60):
        cache = Checked(draw.randint(2, 30), **settings)
        tokens, num_seqs = prompt(1, draw.randint(1, 20)), draw.randint(1, 5)
        if cache.can_allocate(tokens, num_seqs=num_seqs) is not Admission.OK:
            continue
        admitted += 1
        seq = cache.allocate(tokens, num_seqs=num_seqs)
        for _ in tokens:
            cache.compute_some(seq, 1)
        seqs = [seq, *(cache.fork(seq, num_seqs - 1) if num_seqs > 1 else [])]
        if len(tokens) == 1 or "groups" in settings:
            continue  # nothing to cut, or the window may forbid it
        for each in seqs:
            cache.truncate(each, len(tokens))
        # The place behind the last token: in the copied block, if that is not full.
        room = -len(tokens) % cache.block_size
        if room:
            plan = cache.reserve(seqs, 1)
            assert plan.status.tolist() == [SeqStatus.SCHEDULED] * num_seqs
    assert admitted > 15


@pytest.mark.parametrize("num_seqs", [0, -1, 9, True, 1.0, "2", None, 2**63, 2**70, [1]])
def test_a_number_of_sequences_that_is_none(num_seqs: object) -> None:
    cache = Checked(max_num_seqs=8)
    before = snapshot(cache.cache)
    for call in (cache.allocate, cache.can_allocate):
        with pytest.raises(InvalidArgument, match="num_seqs"):
            call(prompt(1, 4), num_seqs=num_seqs)
    assert snapshot(cache.cache) == before
