"""`can_append` foretells `reserve`; `append` is a commit of nothing; `num_owned_blocks` is what preemption frees."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import InvalidArgument, LayerGroup, SeqStatus, SequenceNotReady, UnknownSequence

from ..support.checked import Checked, prompt
from ..support.snapshot import refused, snapshot

GROUPS = (LayerGroup(4), LayerGroup(2, 5))
CONFIGS: list[dict[str, Any]] = [{}, {"num_cpu_blocks": 5}, {"groups": (LayerGroup(4), LayerGroup(8, 5))}]


def test_can_append_is_true_exactly_while_blocks_suffice() -> None:
    """Five blocks, two in use: twelve more tokens fit behind the six, and the two that fill the second block."""
    for settings in CONFIGS[:2]:
        cache = Checked(6, **settings)
        seq = cache.prefilled(prompt(1, 6))
        for count, expected in ((0, True), (2, True), (3, True), (14, True), (15, False), (40, False)):
            before = snapshot(cache.cache)
            assert cache.can_append(seq, count) is expected
            assert snapshot(cache.cache) == before
        assert not cache.reserve([seq], 15).all_fit
        assert cache.reserve([seq], 14).all_fit


def test_all_groups_need_their_blocks() -> None:
    """Ten blocks. Six tokens hold 2 of the full group, 3 of the other until two slide; each more token asks both."""
    cache = Checked(8, groups=GROUPS)
    seq = cache.prefilled(prompt(1, 6))
    assert cache.num_used_blocks == 2 + 2  # token 6 attends to 2 and later: block 0 of two tokens has gone
    assert cache.can_append(seq, 2)  # one block, in the small group
    assert cache.can_append(seq, 4)  # one and two
    assert not cache.can_append(seq, 5)  # two and three
    assert cache.reserve([seq], 4).all_fit


@pytest.mark.parametrize("settings", CONFIGS[:2])
def test_a_shared_last_block_counts_its_copy(settings: dict[str, Any]) -> None:
    """Three blocks, two used: each fork of six tokens that writes needs a copy.

    The last writer owns the old block, so asking for both is cautious by a block, as documented.
    """
    cache = Checked(4, **settings)
    first = cache.prefilled(prompt(1, 6))
    (second,) = cache.fork(first)
    assert cache.can_append(first)
    assert cache.can_append(second)
    assert not cache.can_append([first, second])
    assert cache.reserve([first, second], 1).all_fit


@pytest.mark.parametrize("settings", CONFIGS[:2])
def test_append_is_refused_without_a_block_for_the_copy(settings: dict[str, Any]) -> None:
    """Both blocks are in use and the second is shared: nothing new is needed but the copy, and that is not there."""
    cache = Checked(3, **settings)
    first = cache.prefilled(prompt(1, 6))
    (second,) = cache.fork(first)
    assert not cache.can_append(first)
    assert cache.reserve([first, second], 1).status.tolist() == [SeqStatus.NO_BLOCKS] * 2
    cache.free(second)
    assert cache.can_append(first)
    assert cache.reserve([first], 1).all_fit


def test_can_append_is_false_while_joined_blocks_are_uncomputed() -> None:
    cache = Checked()
    first = cache.allocate(prompt(1, 9))
    second = cache.allocate(prompt(1, 9))
    assert not cache.can_append(second)
    assert cache.can_append(first, 9)
    cache.compute(first)
    assert cache.can_append(second)


@pytest.mark.parametrize("settings", CONFIGS)
def test_append_is_a_commit_of_nothing(settings: dict[str, Any]) -> None:
    shown = []
    for is_appended in (True, False):
        cache = Checked(**settings)
        first, second = (cache.prefilled(prompt(number, 6)) for number in (1, 2))
        if is_appended:
            cache.append([first, second], [[5, 6], [7, -1]])
        else:
            cache.commit([first, second], 0, [[5, 6], [7, -1]])
        assert [cache.num_tokens(seq) for seq in (first, second)] == [8, 7]
        shown.append([(cache.tokens(seq), cache.state(seq), cache.row(seq)) for seq in (first, second)])
        shown.append([cache.stats(), cache.free_order(), _slots(cache.reserve([first, second], [2, 1]))])
    assert shown[:2] == shown[2:]


def _slots(plan: Any) -> list[list[int]]:
    return [group.slot_mapping.tolist() for group in plan.groups]


@pytest.mark.parametrize("settings", CONFIGS)
def test_append_refuses_tokens_without_a_slot(settings: dict[str, Any]) -> None:
    """Six tokens leave room for two; one more may wait in the row; a fourth has no place."""
    cache = Checked(**settings)
    seq = cache.prefilled(prompt(1, 6))
    with refused(cache.cache, InvalidArgument, match="only 3 fit until the next reserve"):
        cache.append([seq], [[1, 2, 3, 4]])
    cache.append([seq], [[1, 2, 3]])
    with pytest.raises(InvalidArgument, match="0 fit"):
        cache.append([seq], [1])
    assert cache.tokens(seq) == [*prompt(1, 6), 1, 2, 3]


def test_owned_blocks_are_those_that_come_free() -> None:
    """A fork owns nothing until it writes; shared blocks are nobody's own."""
    cache = Checked()
    first = cache.prefilled(prompt(1, 10))
    assert cache.num_owned_blocks(first).tolist() == [3]
    (second,) = cache.fork(first)
    assert cache.num_owned_blocks([second, first]).tolist() == [0, 0]
    cache.append([second], [5])
    cache.compute(second)
    assert cache.num_owned_blocks([second, first]).tolist() == [1, 1]
    free = cache.num_free_blocks
    cache.free(second)
    assert cache.num_free_blocks - free == 1
    assert cache.num_owned_blocks([first]).tolist() == [3]
    assert cache.num_owned_blocks([]).tolist() == []


def test_owned_blocks_of_all_groups_and_of_none_on_the_cpu() -> None:
    cache = Checked(30, groups=GROUPS, num_cpu_blocks=20)
    seq = cache.prefilled(prompt(1, 9))
    # Full: 3. Window 5 of blocks of 2: token 9 attends to 5 and later, which is blocks 2, 3 and 4 of five.
    assert cache.num_owned_blocks(seq).tolist() == [6]
    assert cache.num_used_blocks == 6
    cache.swap_out(seq)
    assert cache.num_owned_blocks(seq).tolist() == [0]


HOSTILE: list[Any] = [
    None,
    True,
    1.5,
    "a",
    [None],
    [True],
    [1.5],
    [[1]],
    {1: 2},
    [2**63],
    [2**70],
    2**70,
    -1,
    [-1],
    object(),
]


@pytest.mark.parametrize("settings", CONFIGS)
def test_hostile_arguments_change_nothing(settings: dict[str, Any]) -> None:
    """Every argument of every new call, one after another; errors are the library's own."""
    cache = Checked(30, **settings)
    seq = cache.prefilled(prompt(1, 6), [5])
    dead = cache.prefilled(prompt(2, 3))
    cache.free(dead)
    before = snapshot(cache.cache)
    calls: list[Any] = []
    for bad in [*HOSTILE, dead, [seq, dead], [seq, seq]]:
        calls += [lambda bad=bad: cache.can_append(bad), lambda bad=bad: cache.append(bad, [1])]
        calls += [lambda bad=bad: cache.num_owned_blocks(bad), lambda bad=bad: cache.regroup(bad, [0])]
        if not isinstance(bad, list):
            calls += [lambda bad=bad: cache.is_swapped_out(bad), lambda bad=bad: cache.fork(bad)]
    for bad in [value for value in HOSTILE if not (isinstance(value, list) and value == [-1])]:
        calls.append(lambda bad=bad: cache.can_append(seq, bad))
        if bad is not None and bad not in (-1, [[1]]):
            calls.append(lambda bad=bad: cache.append([seq], bad))
        calls.append(lambda bad=bad: cache.allocate([1], num_seqs=bad))
        calls.append(lambda bad=bad: cache.allocate_batch([[1], bad]))
        calls.append(lambda bad=bad: cache.allocate([1], extra_keys=bad))
        calls.append(lambda bad=bad: cache.allocate_batch([[1]], extra_keys=(bad,)))
    for number, call in enumerate(calls):
        with pytest.raises((InvalidArgument, UnknownSequence, SequenceNotReady)):
            print(number, call())
        assert snapshot(cache.cache) == before, number
