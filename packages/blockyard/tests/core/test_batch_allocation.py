"""Several prompts admitted at once: all or none, and blocks of a common beginning are taken once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import Admission, CapacityError, InvalidArgument, LayerGroup, LoRA, NeverFits, OutOfBlocks, OutOfRows
from blockyard_testing.seeds import draws, run_seed

from ..support.checked import Checked, prompt
from ..support.snapshot import refused, snapshot


def test_a_common_beginning_is_taken_once() -> None:
    """Two blocks in common and one more each: four blocks, and the second and third wait for the first's."""
    cache = Checked(num_blocks=6)
    common = prompt(1, 8)
    prompts = [[*common, 5], [*common, 6], [*common, 7]]
    assert cache.can_allocate_batch(prompts) is Admission.OK
    first, second, third = cache.allocate_batch(prompts)
    assert cache.row(first) == [1, 2, 3]
    assert cache.row(second) == [1, 2, 4]
    assert cache.row(third) == [1, 2, 5]
    assert [cache.num_computed_tokens(seq) for seq in (first, second, third)] == [0, 8, 8]
    plan = cache.reserve([first, second, third], [9, 1, 1])
    assert plan.all_fit


@pytest.mark.parametrize("num_cpu_blocks", [0, 60])
def test_group_of_answers_is_preempted_and_readmitted_as_one(num_cpu_blocks: int) -> None:
    """In as many blocks as before, once `can_allocate_batch` says so, or with `swap_out` and `swap_in`."""
    draw = random.Random(f"{run_seed()} group {num_cpu_blocks}")
    num_waits = 0
    for _ in range(60):
        cache = Checked(num_blocks=30, max_num_seqs=12, max_model_len=128, num_cpu_blocks=num_cpu_blocks)
        first = cache.prefilled(prompt(1, draw.randrange(1, 14)))
        group = [first, *cache.fork(first, 3)]
        for step in range(draw.randrange(1, 6)):
            cache.append(group, [100 * step + number for number in range(4)])
            cache.commit(group, cache.reserve(group).num_scheduled)
        tokens = [cache.token_ids(seq).tolist() for seq in group]
        used = cache.num_used_blocks
        if num_cpu_blocks:
            cache.swap_out(group)
        else:
            cache.free(group)
        assert cache.num_used_blocks == 0
        other = cache.prefilled(prompt(2, draw.randrange(1, 100)))
        before = snapshot(cache.cache)
        fits = cache.can_swap_in(group) if num_cpu_blocks else cache.can_allocate_batch(tokens) is Admission.OK
        if not fits:
            num_waits += 1
            with pytest.raises(OutOfBlocks):
                cache.swap_in(group) if num_cpu_blocks else cache.allocate_batch(tokens)
            assert snapshot(cache.cache) == before
            cache.free(other)
        held = cache.num_used_blocks
        if num_cpu_blocks:
            cache.swap_in(group)
        else:
            group = [cache.allocate(each, resumed=True) for each in tokens]
            while cache.num_computed_tokens(group).sum() < cache.num_tokens(group).sum():
                cache.commit(group, cache.reserve(group).num_scheduled)
        assert cache.num_used_blocks - held <= used
        assert [cache.token_ids(seq).tolist() for seq in group] == tokens
    assert num_waits


def test_holders_follow_the_order_of_prompts() -> None:
    cache = Checked()
    seqs = cache.allocate_batch([prompt(1, 3), prompt(2, 3)], holders=["a", "b"])
    assert cache.running() == dict(zip(seqs, ["a", "b"], strict=True))
    seqs = cache.allocate_batch((prompt(1, 3),), extra_keys=(LoRA("x"),))
    assert cache.running()[seqs[0]] == ""


def test_extra_keys_apply_to_the_whole_batch() -> None:
    cache = Checked()
    cache.free(cache.prefilled(prompt(1, 8)))
    first, second = cache.allocate_batch([[*prompt(1, 8), 5], [*prompt(1, 8), 6]], extra_keys=(LoRA("x"),))
    assert cache.num_computed_tokens(first) == 0  # what is cached has no adapter
    assert cache.row(first)[:2] == cache.row(second)[:2]


def test_all_or_none() -> None:
    cache = Checked(num_blocks=7, max_num_seqs=3)
    cache.prefilled(prompt(1, 5))
    before = snapshot(cache.cache)
    refused: list[tuple[type[Exception], Any, Admission]] = [
        (OutOfBlocks, [prompt(2, 8), prompt(3, 12)], Admission.LATER),
        (NeverFits, [prompt(2, 1), prompt(3, 100)], Admission.NEVER),
        (NeverFits, [prompt(2, 1), prompt(3, 28)], Admission.NEVER),
        (NeverFits, [prompt(2, 12), prompt(3, 16)], Admission.NEVER),
        (NeverFits, [prompt(2, 1)] * 4, Admission.NEVER),
        (OutOfRows, [prompt(2, 1)] * 3, Admission.LATER),
    ]
    for error, prompts, answer in refused:
        assert cache.can_allocate_batch(prompts) is answer
        with pytest.raises(error) as caught:
            cache.allocate_batch(prompts)
        assert type(caught.value) is error
        # The roots of extra keys are asked for before the first change, so that a refusal comes first of all.
        assert snapshot(cache.cache) == before


@pytest.mark.parametrize(
    "prompts",
    [None, [], (), "ab", {1: [1]}, 5, [[1], None], [[1], []], [[1], [-1]], [[1], [True]], [1, 2], [[1], [2**31]]],
)
def test_batch_must_be_a_list_of_prompts(prompts: Any) -> None:
    cache = Checked()
    before = snapshot(cache.cache)
    for call in (cache.allocate_batch, cache.can_allocate_batch):
        with pytest.raises(InvalidArgument):
            call(prompts)
    assert snapshot(cache.cache) == before


@pytest.mark.parametrize("holders", [None, "ab", ["a"], ["a", "b", "c"], ["a", 5], {"a": 1, "b": 2}, [None, None], 5])
def test_holders_of_a_batch_must_be_names(holders: Any) -> None:
    cache = Checked()
    with refused(cache.cache, InvalidArgument, match="holders"):
        cache.allocate_batch([prompt(1, 3), prompt(2, 3)], holders=holders)


def test_a_hit_that_the_batch_itself_evicts() -> None:
    """The second prompt's hit hangs on one idle block of a window, which the first prompt takes.

    A running sequence holds the full group's first 18 blocks, so a hit of 32 tokens costs one idle block there. Once
    that is gone the hit is gone, and the full group needs nine new blocks where one was counted.
    """
    groups = (LayerGroup(4), LayerGroup(4, 2))
    answers = set()
    for num_taken in range(20, 33):
        cache = Checked(60, groups=groups, max_model_len=80)
        running = cache.prefilled(prompt(1, 73))
        assert [block != 0 for block in cache.block_ids(running, 1)] == [False] * 18 + [True]
        lease = cache.pool.get_new_blocks(num_taken)
        batch = [[5] * 16, [*prompt(1, 33), *[9] * 3]]
        answers.add(cache.can_allocate_batch(batch))
        if cache.can_allocate_batch(batch) is Admission.OK:
            for seq in cache.allocate_batch(batch):
                cache.free(seq)
        cache.pool.free_blocks(lease)
    assert answers == {Admission.OK, Admission.LATER}


def test_nothing_runs_and_still_they_do_not_fit() -> None:
    """Each prompt fits alone, both do not: to wait would be to wait forever."""
    for settings in ({}, {"enable_prefix_caching": False}, {"num_cpu_blocks": 9}, {"groups": (LayerGroup(4, 40),)}):
        cache = Checked(num_blocks=6, **settings)
        assert cache.can_allocate(prompt(1, 12)) is Admission.OK
        assert cache.can_allocate_batch([prompt(1, 12), prompt(2, 12)]) is Admission.NEVER
    # With a beginning in common they do fit.
    assert Checked(num_blocks=6).can_allocate_batch([prompt(1, 12), [*prompt(1, 11), 5]]) is Admission.OK


SETTINGS: list[dict[str, Any]] = [
    {},
    {"enable_prefix_caching": False},
    {"watermark": 0.2},
    {"groups": (LayerGroup(4), LayerGroup(2, 3))},
    {"num_cpu_blocks": 6},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_against_one_after_another(settings: dict[str, Any]) -> None:
    """OK for a batch means that one after another fit; without layer groups the other way round as well."""
    draw = random.Random(run_seed())
    answers: list[Admission] = []
    while len(answers) < draws(600, 60) or set(answers) != set(Admission):
        seed = draw.randrange(2**32)
        together, apart = scene(seed, settings), scene(seed, settings)
        first = prompt(draw.randint(1, 3), draw.randint(1, 20))
        prompts = [first]
        for _ in range(draw.randint(0, 3)):
            kept = first[: draw.randint(0, len(first))] if draw.random() < 0.7 else []
            prompts.append([*kept, *prompt(draw.randint(1, 3), draw.randint(1, 9))])
        answer = together.can_allocate_batch(prompts)
        answers.append(answer)
        try:
            for tokens in prompts:
                apart.allocate(tokens)
            fits = True
        except CapacityError:
            fits = False
        if answer is Admission.OK:
            assert fits
            seqs = together.allocate_batch(prompts)
            assert [together.tokens(seq) for seq in seqs] == prompts
            assert together.stats() == apart.stats()
        elif "groups" not in settings and "num_cpu_blocks" not in settings and not any_within(prompts):
            assert not fits


def any_within(prompts: list[list[int]]) -> bool:
    """Whether a prompt of whole blocks begins another: its last block is counted twice then."""
    ends = [tuple(tokens) for tokens in prompts if len(tokens) % 4 == 0]
    return any(tuple(tokens[: len(end)]) == end for end in ends for tokens in prompts if len(tokens) > len(end))


def scene(seed: int, settings: dict[str, Any]) -> Checked:
    """A cache with a history: some prompts computed, some of them finished."""
    draw = random.Random(seed)
    cache = Checked(draw.randint(4, 25), max_num_seqs=draw.randint(2, 6), **settings)
    for _ in range(draw.randint(0, 4)):
        tokens = prompt(draw.randint(1, 3), draw.randint(1, 16))
        if cache.can_allocate(tokens) is Admission.OK:
            seq = cache.allocate(tokens)
            lacking = len(tokens) - cache.num_computed_tokens(seq)
            while lacking and cache.can_append(seq):
                cache.compute_some(seq, 1)
                lacking -= 1
            if lacking or draw.random() < 0.6:
                cache.free(seq)
    return cache
