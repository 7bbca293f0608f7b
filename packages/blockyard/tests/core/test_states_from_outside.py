"""States that leave the cache or come from outside: their blocks, and hits without a state."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import CacheConfig, InvalidArgument, KVCacheManager, SequenceNotReady, StateHints
from blockyard_testing.state_loads import Request
from blockyard_testing.state_memory import StateMemory, compute

from ..support.snapshot import snapshot
from .test_states import hybrid, serve


def test_where_a_kept_state_lies_is_said_of_exactly_its_tokens() -> None:
    cache = hybrid(state_checkpoints=("every:64",))
    memory = StateMemory(cache)
    prompt = list(range(200))
    compute(cache, memory, cache.allocate(prompt), list(prompt), [])
    cache.free(list(cache.running()))
    assert [len(cache.states.blocks(prompt[:end])) for end in range(1, 201)] == [
        3 * (end % 64 == 0) for end in range(1, 201)
    ]
    assert [memory.blocks[int(block)] for block in cache.states.blocks(prompt[:64])] == [
        (tuple(prompt[:64]), part) for part in range(3)
    ]
    assert len(cache.states.blocks([9, *prompt[1:64]])) == 0
    assert cache.num_used_blocks == 0


def test_a_state_from_elsewhere_is_kept_where_it_comes_and_none_before() -> None:
    cache = hybrid(state_checkpoints=("every:64",))
    seq = cache.allocate(list(range(200)))
    cache.states.skip(seq, 144)
    plan = cache.reserve([seq], [144])
    assert plan.num_scheduled.tolist() == [144]
    assert plan.states.save_positions.tolist() == [144]
    cache.commit([seq], 144)
    assert [end for end in range(16, 201, 16) if len(cache.states.blocks(list(range(end))))] == [144]
    assert cache.reserve([seq]).states.save_positions.tolist() == [192]


def left_without_states(prompt: list[int], **fields: Any) -> tuple[KVCacheManager, StateMemory]:
    """A cache that has all keys and values of a prompt, and no state of it but the last one."""
    cache = hybrid(**{"state_checkpoints": ("last",), **fields})
    memory = StateMemory(cache)
    compute(cache, memory, cache.allocate(prompt), list(prompt), [])
    cache.free(list(cache.running()))
    return cache, memory


@pytest.mark.parametrize("brought", [145, 150, 160])
def test_where_a_state_is_brought_keys_and_values_alone_are_hit(brought: int) -> None:
    cache, memory = left_without_states(list(range(200)))
    prompt = [*range(150), *range(1000, 1050)]
    assert cache.num_cached_tokens(prompt) == 0
    seq = cache.allocate(prompt, states=StateHints(external_state_tokens=brought))
    assert cache.num_computed_tokens(seq) == 144
    assert cache.num_used_blocks == 13  # no block of a state
    assert cache.miss_causes(seq).num_no_state == 0
    plan = cache.reserve([seq], [brought - 144])
    assert plan.states.loads.size == 0
    assert plan.states.save_positions.tolist() == [160] * (brought == 160)
    memory.prepare(plan)
    for blocks in plan.states.save_blocks.tolist():
        memory.blocks.update((block, (tuple(prompt[:brought]), part)) for part, block in enumerate(blocks))
    cache.commit([seq], brought - 144)
    memory.settle(cache.states.slot(seq), prompt, brought)
    compute(cache, memory, seq, list(prompt), [1, 2])
    cache.free(seq)
    assert cache.num_used_blocks == 0
    assert len(cache.states.blocks(prompt[:160])) == 3 * (brought == 160)
    assert serve(cache, memory, Request([*prompt, 7], [1], [])) == 192


def test_a_hit_ends_before_the_state_that_is_brought_unless_one_is_here() -> None:
    prompt = list(range(200))
    cache, _ = left_without_states(prompt)
    for brought, hit in ((0, 192), (192, 192), (150, 192), (193, 192), (200, 192)):
        seq = cache.allocate(prompt, states=StateHints(external_state_tokens=brought))
        assert cache.num_computed_tokens(seq) == hit
        assert cache.reserve([seq], [1]).states.loads.size == 1
        cache.free(seq)
    for count, brought, hit in ((150, 150, 144), (150, 96, 80), (150, 16, 0), (96, 96, 80), (97, 97, 96)):
        seq = cache.allocate(prompt[:count], states=StateHints(external_state_tokens=brought))
        assert cache.num_computed_tokens(seq) == hit
        cache.free(seq)
    assert cache.num_used_blocks == 0
    cache.check()


def test_nothing_is_computed_from_a_state_that_has_not_come() -> None:
    cache, memory = left_without_states(list(range(200)))
    prompt = list(range(150))
    seq = cache.allocate(prompt, states=StateHints(external_state_tokens=145))
    waits = "still waits for its external state"
    for _ in range(2):
        before = snapshot(cache)
        with pytest.raises(SequenceNotReady, match=waits):
            cache.states.slot(seq)
        assert snapshot(cache) == before
        cache.reserve([seq], [1])
        cache.commit([seq], 0)  # it did not come
    other = cache.allocate(prompt, states=StateHints(external_state_tokens=150))
    words = r"num_new_tokens\[0\] is 5 for .*; it must be 0 or at least 6: 144 tokens are computed, and the next state"
    for _ in range(2):
        before = snapshot(cache)
        with pytest.raises(InvalidArgument, match=words):
            cache.reserve([other, seq], [5, 1])
        assert snapshot(cache) == before
        assert cache.reserve([other, seq], [0, 1]).num_scheduled.tolist() == [0, 1]
        cache.reserve([other], [6])
        cache.commit([other], 2)  # and a part of it is of no use
        with pytest.raises(InvalidArgument, match=r"it must be 0 or at least 4: 146 tokens are computed"):
            cache.reserve([other], [3])
        cache.free(other)
        other = cache.allocate(prompt, states=StateHints(external_state_tokens=150))
    (child,) = cache.fork(cache.allocate(prompt[:145], states=StateHints(external_state_tokens=145)))
    with pytest.raises(SequenceNotReady, match=waits):
        cache.states.slot(child)
    cache.free(list(cache.running()))
    assert cache.num_used_blocks == 0
    assert serve(cache, memory, Request(prompt, [1], [])) == 0  # and is computed cold


def test_a_further_state_is_brought_behind_keys_and_values_that_are_here() -> None:
    cache, _ = left_without_states(list(range(200)))
    seq = cache.allocate(list(range(150)), states=StateHints(external_state_tokens=150))
    cache.states.skip(seq, 150, checkpoint=96)
    for _ in range(2):
        plan = cache.reserve([seq], [6])
        assert plan.states.save_positions.tolist() == [96]
        cache.check()
        assert cache.num_used_blocks == 10 + 3  # that of the first step is let go
    cache.commit([seq], 0)
    assert (len(cache.states.blocks(list(range(96)))), cache.num_used_blocks) == (0, 10)
    cache.reserve([seq], [6])
    cache.commit([seq], 6)
    assert (len(cache.states.blocks(list(range(96)))), cache.num_used_blocks) == (3, 10)
    cache.free(seq)
    seq = cache.allocate(list(range(150)), states=StateHints(external_state_tokens=150))
    assert cache.num_computed_tokens(seq) == 144
    cache.states.skip(seq, 150, checkpoint=144)
    cache.reserve([seq], [6])
    cache.free(seq)  # given up
    assert len(cache.states.blocks(list(range(144)))) == 0
    cache.check()
    assert cache.num_used_blocks == 0


def test_a_fork_that_waits_for_its_state_takes_a_further_one_too() -> None:
    cache, _ = left_without_states(list(range(200)))
    seq = cache.allocate(list(range(145)), states=StateHints(external_state_tokens=145))
    cache.states.skip(seq, 145, checkpoint=96)
    (child,) = cache.fork(seq)
    for waiting in (seq, child):
        plan = cache.reserve([waiting], [1])
        assert (plan.num_scheduled.tolist(), plan.states.save_positions.tolist()) == ([1], [96])
        cache.commit([waiting], 0)
    cache.free([seq, child])
    cache.check()
    assert cache.num_used_blocks == 0


def test_a_state_is_brought_in_one_of_several_steps_in_flight() -> None:
    cache = hybrid(state_checkpoints=("last",), max_steps_in_flight=3)
    seq = cache.allocate(list(range(200)))
    for count in (192, 8):
        step = cache.reserve([seq]).step
        cache.commit([seq], count, step=step)
        cache.end_step(step)
    cache.free(seq)
    seq = cache.allocate(list(range(170)), states=StateHints(external_state_tokens=150))
    cache.states.skip(seq, 150, checkpoint=96)
    first = cache.reserve([seq], [6])
    assert first.states.save_positions.tolist() == [96]
    second = cache.reserve([seq], [3])
    third = cache.reserve([seq])
    assert [plan.num_scheduled.tolist() for plan in (second, third)] == [[3], [7]]
    assert len(cache.states.blocks(list(range(96)))) == 0
    cache.commit([seq], 0, step=first.step)
    for plan in (second, third):
        cache.commit([seq], 0, step=plan.step)
    cache.end_step(third.step)
    assert (len(cache.states.blocks(list(range(96)))), cache.num_used_blocks) == (0, 11)
    with pytest.raises(InvalidArgument, match="it must be 0 or at least 6"):
        cache.reserve([seq], [5])
    steps = [cache.reserve([seq], [count]).step for count in (6, 10)]
    for step, count in zip(steps, (6, 10), strict=True):
        cache.commit([seq], count, step=step)
    assert len(cache.states.blocks(list(range(96)))) == 3
    cache.free(seq)
    cache.end_step(steps[-1])
    assert cache.num_used_blocks == 0
    cache.check()


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        (-1, "external_state_tokens is -1; it must be from 0 to 20"),
        (21, "external_state_tokens is 21; it must be from 0 to 20"),
        (True, "True"),
    ],
)
def test_a_state_is_brought_behind_tokens_of_the_prompt(brought: Any, words: str) -> None:
    cache = hybrid()
    for allocate in (cache.allocate, cache.try_allocate):
        with pytest.raises(InvalidArgument, match=words):
            allocate(list(range(20)), states=StateHints(external_state_tokens=brought))
    with pytest.raises(
        InvalidArgument, match=r"states is given, but the cache has no states \(groups has no StateSpec\): leave it out"
    ):
        KVCacheManager(CacheConfig(100)).allocate([1, 2, 3], states=StateHints(external_state_tokens=2))


def test_several_states_from_elsewhere_are_kept_by_one_step() -> None:
    cache = hybrid(state_checkpoints=("every:64",))
    seq = cache.allocate(list(range(200)))
    cache.states.skip(seq, 150, checkpoint=96)
    for _ in range(2):  # the first is not carried out
        plan = cache.reserve([seq], [150])
        assert (plan.num_scheduled.tolist(), plan.states.save_positions.tolist()) == ([150], [96])
    cache.commit([seq], 150)
    assert [end for end in range(16, 201, 16) if len(cache.states.blocks(list(range(end))))] == [96]
    assert cache.reserve([seq]).states.save_positions.tolist() == [192]
    cache.commit([seq], 42)
    cache.free(seq)
    other = cache.allocate(list(range(1000, 1200)))
    cache.states.skip(other, 144, checkpoint=64)
    assert cache.reserve([other], [144]).states.save_positions.tolist() == [64, 144]
    for kept, words in (
        (40, "checkpoint is 40; it must be a multiple of 16, above the 0 computed tokens"),
        (144, "checkpoint is 144; it must be from 0 to 143"),
    ):
        cache.commit([other], 0)
        with pytest.raises(InvalidArgument, match=words):
            cache.states.skip(other, 144, checkpoint=kept)


def test_states_that_could_not_be_written_are_not_kept() -> None:
    cache = hybrid(state_checkpoints=("every:64",))
    seq = cache.allocate(list(range(200)))
    assert cache.reserve([seq]).states.save_positions.tolist() == [64]
    used = cache.num_used_blocks
    cache.states.drop_checkpoints(seq)
    cache.states.drop_checkpoints(seq)
    cache.check()
    assert cache.num_used_blocks == used - 3
    cache.commit([seq], 64)
    cache.reserve([seq])
    cache.commit([seq], 64)
    assert [end for end in range(16, 201, 16) if len(cache.states.blocks(list(range(end))))] == [128]
    cache.free(seq)
    assert cache.num_used_blocks == 0


def test_the_slot_of_a_state_is_the_parents_until_it_was_copied() -> None:
    cache = hybrid()
    seqs = [cache.allocate([number, *range(40)]) for number in range(2)]
    with pytest.raises(
        SequenceNotReady, match=r"states.slot: .* has no state in a slot yet; its next step puts one there"
    ):
        cache.states.slot(seqs[1])
    plan = cache.reserve(seqs)
    with pytest.raises(SequenceNotReady, match=r"states.slot: .* has 32 reserved tokens"):
        cache.states.slot(seqs[1])
    cache.commit(seqs, 32)
    cache.reserve(seqs)
    cache.commit(seqs, 9, [1, 1])
    assert [cache.states.slot(seq) for seq in seqs] == plan.rows.tolist()
    (child,) = cache.fork(seqs[1])
    (grandchild,) = cache.fork(child)
    assert cache.states.slot(child) == cache.states.slot(grandchild) == plan.rows[1]
    cache.free(seqs[1])
    slots = {int(plan.rows[1]): "the parent's"}
    for source, target in cache.reserve([]).states.copies.tolist():
        slots[target] = slots[source]
    own = [cache.states.slot(child), cache.states.slot(grandchild)]
    assert len({*own, int(plan.rows[1])}) == 3
    assert [slots[slot] for slot in own] == ["the parent's"] * 2


@pytest.mark.parametrize(
    ("num_tokens", "error", "words"),
    [
        (0, InvalidArgument, "num_tokens is 0; it must be from 1 to 20"),
        (21, InvalidArgument, "num_tokens is 21; it must be from 1 to 20"),
        (True, InvalidArgument, "num_tokens is True"),
    ],
)
def test_a_state_from_elsewhere_is_of_tokens_that_are_there(num_tokens: Any, error: type, words: str) -> None:
    cache = hybrid()
    seq = cache.allocate(list(range(20)))
    with pytest.raises(error, match=words):
        cache.states.skip(seq, num_tokens)
    cache.reserve([seq])
    with pytest.raises(SequenceNotReady, match=r"states.skip: .* has 16 reserved tokens"):
        cache.states.skip(seq, 20)
