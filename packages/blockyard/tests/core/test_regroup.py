"""Beam search's regrouping, against a plain beam search on lists."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import InvalidArgument, LayerGroup, OutOfRows, SequenceNotReady, UnknownSequence
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt
from ..support.snapshot import refused, snapshot

CONFIGS: list[dict[str, Any]] = [
    {"num_blocks": 80},
    {"num_blocks": 80, "enable_prefix_caching": False},
    {"num_blocks": 160, "groups": (LayerGroup(4), LayerGroup(2, 5))},
    {"num_blocks": 80, "num_cpu_blocks": 80},
]


def test_first_children_stay_and_others_are_forks() -> None:
    cache = Checked()
    first = cache.prefilled(prompt(1, 6))
    second, third = cache.fork(first, 2)
    children = cache.regroup([first, second, third], [2, 0, 2, 2])
    assert children[:2] == [third, first]  # each parent goes on as its first child
    assert len(set(children)) == 4
    assert not set(children[2:]) & {first, second, third}
    assert set(cache.running()) == set(children)  # `second` has no child, so it is freed
    assert all(cache.tokens(child) == prompt(1, 6) for child in children)
    assert cache.ref_counts(first) == [4, 4]


def test_nothing_to_change() -> None:
    cache = Checked()
    first = cache.prefilled(prompt(1, 6))
    (second,) = cache.fork(first)
    assert cache.regroup([first, second], [0, 1]) == [first, second]
    assert cache.regroup([first, second], [1, 0]) == [second, first]
    assert cache.regroup([], []) == []


def test_no_parents_end_all() -> None:
    cache = Checked()
    first = cache.prefilled(prompt(1, 6))
    assert cache.regroup([first], []) == []
    assert cache.num_used_blocks == 0


def test_whoever_only_goes_on_may_be_in_any_state() -> None:
    """One child asks nothing of a sequence: reserved and not yet computed ones keep what they have."""
    cache = Checked()
    waiting = cache.allocate(prompt(1, 6))
    reserved = cache.prefilled(prompt(2, 3), [5])
    assert cache.reserve([reserved], 1).all_fit
    assert cache.regroup([waiting, reserved], [1, 0]) == [reserved, waiting]
    cache.commit([reserved], 1)
    with pytest.raises(SequenceNotReady, match="regroup"):
        cache.regroup([waiting], [0, 0])


def test_rows_of_those_that_end_are_taken_by_forks() -> None:
    """All rows are in use; three of four beams end, and their rows hold the new children."""
    cache = Checked(max_num_seqs=4)
    first = cache.prefilled(prompt(1, 5))
    beams = [first, *cache.fork(first, 3)]
    children = cache.regroup(beams, [1, 1, 1, 1])
    assert len(set(children)) == 4
    assert cache.num_seqs == 4


def test_rows_set_aside_for_a_sequence_group_serve_its_first_regrouping() -> None:
    cache = Checked(max_num_seqs=4)
    first = cache.allocate(prompt(1, 5), num_seqs=4)
    cache.compute(first, [7])
    with pytest.raises(OutOfRows):
        cache.allocate(prompt(2, 1))
    assert len(set(cache.regroup([first], [0, 0, 0, 0]))) == 4
    with pytest.raises(OutOfRows):
        cache.regroup(list(cache.running()), [0, 1, 2, 3, 3])


def test_rows_set_aside_for_another_group_are_not_taken() -> None:
    cache = Checked(max_num_seqs=4)
    cache.allocate(prompt(1, 5), num_seqs=2)
    second = cache.prefilled(prompt(2, 5))
    with refused(cache.cache, OutOfRows):
        cache.regroup([second], [0, 0, 0])
    assert len(cache.regroup([second], [0, 0])) == 2


def test_a_refused_regrouping_changes_nothing() -> None:
    cache = Checked(max_num_seqs=3)
    first = cache.prefilled(prompt(1, 6))
    (second,) = cache.fork(first)
    reserved = cache.prefilled(prompt(2, 3), [5])
    assert cache.reserve([reserved], 1).all_fit
    beams = [first, second, reserved]
    before = snapshot(cache.cache)
    refused: list[tuple[type[Exception], object, object]] = [
        (InvalidArgument, beams, [0, 3]),
        (InvalidArgument, beams, [-1]),
        (InvalidArgument, beams, [2**63]),
        (InvalidArgument, beams, [True]),
        (InvalidArgument, beams, [0.0]),
        (InvalidArgument, beams, [None]),
        (InvalidArgument, beams, [[0]]),
        (InvalidArgument, beams, "0"),
        (InvalidArgument, beams, None),
        (InvalidArgument, [first, first], [0]),
        (InvalidArgument, [], [0]),
        (UnknownSequence, [first, 2**61], [0]),
        (SequenceNotReady, beams, [2, 2, 0]),
        (OutOfRows, beams, [0, 0, 1, 1]),
    ]
    for error, seqs, parents in refused:
        with pytest.raises(error) as caught:
            cache.regroup(seqs, parents)
        assert type(caught.value) is error
        assert snapshot(cache.cache) == before, (seqs, parents)


@pytest.mark.parametrize("settings", CONFIGS)
def test_against_a_beam_search_on_lists(settings: dict[str, Any]) -> None:
    """Up to four beams, scores at random: their tokens are those of the lists, blocks are shared as ancestors are."""
    for number in range(10):
        draw = random.Random(run_seed() + number)
        cache = Checked(**settings)
        tokens = prompt(1, draw.randint(1, 9))
        beams, lists = [cache.prefilled(tokens)], [[(token, position) for position, token in enumerate(tokens)]]
        for step in range(draw.randint(5, 30)):
            chosen = [(draw.randrange(len(lists)), draw.randint(1, 3)) for _ in range(draw.randint(1, 4))]
            beams = cache.regroup(beams, [parent for parent, _ in chosen])
            # Each token is one of a kind, so lists that agree have the same ancestor.
            lists = [[*lists[parent], (token, 100 * step + i)] for i, (parent, token) in enumerate(chosen, start=100)]
            cache.append(beams, [[token] for _, token in chosen])
            if cache.cpu_pool is not None:
                away = draw.sample(beams, draw.randint(0, len(beams)))
                cache.swap_out(away)
                cache.swap_in(away)
            assert cache.reserve(beams, 1).all_fit
            cache.commit(beams, 1)
            assert [cache.tokens(beam) for beam in beams] == [[token for token, _ in tokens] for tokens in lists]
            if cache.cpu_pool is None:
                require_shared(cache, beams, lists)
        cache.free(beams)
        assert cache.num_used_blocks == 0


def require_shared(cache: Checked, beams: list[int], lists: list[list[tuple[int, int]]]) -> None:
    """Two beams hold one block at a place exactly when they have all ancestors up to its end in common."""
    for group, layers in enumerate(cache.config.layer_groups):
        size, rows = layers.block_size, [cache.block_ids(beam, group).tolist() for beam in beams]
        for row, mine in zip(rows, lists, strict=True):
            for other, theirs in zip(rows, lists, strict=True):
                for place in range(layers.first_needed_block(len(mine)), min(len(row), len(other))):
                    end = (place + 1) * size
                    assert (row[place] == other[place]) == (mine[:end] == theirs[:end]), (group, place)
