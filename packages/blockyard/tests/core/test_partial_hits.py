"""Hits that end inside a block: whose first tokens are copied, when, and what may happen before that."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from blockyard import (
    Admission,
    CacheConfig,
    CacheSalt,
    InvalidArgument,
    LayerGroup,
    LoRA,
    SeqStatus,
    SequenceNotReady,
    Span,
)
from blockyard_testing.cached import cached_tokens
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked
from ..support.snapshot import snapshot


def partial(num_blocks: int = 20, block_size: int = 4, **settings: Any) -> Checked:
    return Checked(num_blocks, block_size, partial_hits=True, **settings)


def hit(cache: Checked, tokens: list[int], keys: tuple[Any, ...] = ()) -> tuple[int, list[list[int]]]:
    """Allocate, compute and free a prompt: how much of it was hit, and what was copied for it."""
    seq = cache.allocate(tokens, holder="", extra_keys=keys)
    found = cache.num_computed_tokens(seq)
    plan = cache.reserve([seq], len(tokens) - found)
    assert plan.all_fit
    cache.commit([seq], len(tokens) - found)
    cache.free(seq)
    return found, plan.copies.tolist()


# ---------------------------------------------------------------- what is taken


def test_the_longest_common_beginning_is_chosen() -> None:
    cache = partial()
    rows = [cache.prefilled([1, 2, 3, 4, *tail]) for tail in ([5, 6, 0, 0], [5, 6, 7, 0], [5, 0, 0, 0])]
    source = cache.row(rows[1])[1]
    cache.free(rows)
    seq = cache.allocate([1, 2, 3, 4, 5, 6, 7, 8, 9])
    # One whole block, and three tokens of the block that begins 5, 6, 7; the others have two and one in common.
    assert cache.num_computed_tokens(seq) == 7
    plan = cache.reserve([seq], 2)
    assert plan.copies.tolist() == [[source, cache.row(seq)[1]]]
    assert plan.copy_groups.tolist() == [0]
    assert plan.num_computed.tolist() == [7]
    assert plan.slot_mapping.tolist() == [cache.row(seq)[1] * 4 + 3, cache.row(seq)[2] * 4]
    cache.commit([seq], 2)
    # The prompts before hit 0, 6 (after 1 to 4: 5, 6) and 5 tokens.
    assert cache.stats().num_hit_tokens == 0 + 6 + 5 + 7


def test_without_the_switch_a_hit_ends_with_a_block() -> None:
    cache = Checked()
    cache.free(cache.prefilled([1, 2, 3, 4, 5, 6, 7, 8]))
    assert hit(cache, [1, 2, 3, 4, 5, 6, 9]) == (4, [])


def test_the_last_token_is_left_to_compute() -> None:
    cache = partial()
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7, 8])[0] == 0
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7, 8])[0] == 7
    assert hit(cache, [1, 2, 3, 4, 5])[0] == 4
    assert hit(cache, [1, 2, 3, 4])[0] == 3
    assert hit(cache, [1, 2])[0] == 1
    assert hit(cache, [1]) == (0, [])


def test_hits_never_end_inside_blocks_of_one_token() -> None:
    cache = partial(block_size=1)
    cache.free(cache.prefilled([1, 2, 3]))
    assert hit(cache, [1, 2, 3]) == (2, [])


def test_partial_hits_only_use_full_blocks() -> None:
    """A block of three tokens of four is nowhere in the index."""
    cache = partial()
    cache.free(cache.prefilled([1, 2, 3]))
    assert hit(cache, [1, 2, 3, 4]) == (0, [])


def test_the_first_token_must_be_the_same() -> None:
    cache = partial()
    cache.free(cache.prefilled([1, 2, 3, 4, 5, 6, 7, 8]))
    assert hit(cache, [9, 2, 3, 4, 5]) == (0, [])
    # What comes before counts too: 5, 6 follows 1, 2, 3, 4 and nothing else.
    assert hit(cache, [5, 6, 7, 8]) == (0, [])


def test_the_two_halves_of_a_packed_word_are_compared_apart() -> None:
    """Tokens are stored two to a word: the odd ones must differ as well as the even ones."""
    cache = partial(block_size=6)
    cache.free(cache.prefilled([1, 2, 3, 4, 5, 6]))
    for place in range(1, 6):
        tokens = [1, 2, 3, 4, 5, 6, 7]
        tokens[place] = 99
        assert hit(cache, tokens)[0] == place


def test_block_completed_after_a_partial_hit_is_cached() -> None:
    cache = partial()
    cache.free(cache.prefilled([1, 2, 3, 4]))
    assert hit(cache, [1, 2, 3, 5, 6])[0] == 3
    assert hit(cache, [1, 2, 3, 5, 7])[0] == 4
    assert cached_tokens(cache.cache, [1, 2, 3, 5]) == 4


# ---------------------------------------------------------------- the source


def test_the_source_is_held_until_the_plan_that_copies_it_is_made() -> None:
    cache = partial(num_blocks=5)
    cache.free(cache.prefilled([1, 2, 3, 4]))
    seq = cache.allocate([1, 2, 3, 9, 9])
    source = cache.free_order()
    # Block 1 is held for the copy, 2 and 3 for the prompt: one block is free, and it is none of these.
    assert (cache.row(seq), source) == ([2, 3], [4])
    assert cache.can_allocate([7] * 8) is Admission.LATER
    other = cache.prefilled([8])
    assert cache.row(other) == [4]
    plan = cache.reserve([seq], 2)
    assert plan.copies.tolist() == [[1, 2]]
    assert cache.free_order() == [1]
    assert cache.num_cached_blocks == 2


def test_nobody_served_in_the_same_plan_writes_over_the_source() -> None:
    """The plan's copies come before its writes, but a copy's target could be the source of another."""
    cache = partial(num_blocks=5)
    cache.free(cache.prefilled([1, 2, 3, 4]))
    other = cache.prefilled([7, 7, 7])
    seq = cache.allocate([1, 2, 3, 9])
    assert cache.num_computed_tokens(seq) == 3
    assert cache.num_free_blocks == 1
    plan = cache.reserve([seq, other], [1, 9])
    # The other one needs two more blocks. One is free, and the source is not yet.
    assert plan.status.tolist() == [SeqStatus.SCHEDULED, SeqStatus.NO_BLOCKS]
    assert cache.num_free_blocks == 2
    assert cache.reserve([other], 9).all_fit


def test_a_running_source_that_is_cut_and_rewritten_copies_first() -> None:
    cache = partial()
    writer = cache.prefilled([1, 2, 3, 4], [5])
    source = cache.row(writer)[0]
    seq = cache.allocate([1, 2, 3, 9])
    cache.truncate(writer, 2)
    cache.append([writer], [7])
    plan = cache.reserve([writer], 1)
    assert cache.row(writer)[0] != source
    assert plan.copies.tolist() == [[source, cache.row(writer)[0]]]
    assert cache.reserve([seq], 1).copies.tolist() == [[source, cache.row(seq)[0]]]


def test_a_block_that_is_still_to_be_computed_is_no_source() -> None:
    cache = partial()
    writer = cache.allocate([1, 2, 3, 4, 5, 6, 7, 8])
    assert hit(cache, [1, 2, 3, 9]) == (0, [])
    cache.compute_some(writer, 3)
    assert hit(cache, [1, 2, 3, 8])[0] == 3  # from the prompt above, which is computed by now
    cache.compute_some(writer, 2)
    # Block 0 is there now, block 1 has one token of four: nothing of it is taken.
    assert hit(cache, [1, 2, 3, 4, 5, 6, 9])[0] == 4
    cache.compute_some(writer, 3)
    assert hit(cache, [1, 2, 3, 4, 5, 6, 7, 0])[0] == 7


def test_no_partial_hit_follows_a_shared_pending_block() -> None:
    """The waiter's shared block is not computed yet, so a copy after it would be too early."""
    cache = partial()
    cache.free(cache.prefilled([1, 2, 3, 4, 5, 6, 7, 8]))
    cache.reset_prefix_cache()
    writer = cache.allocate([1, 2, 3, 4, 5, 6, 7, 8, 9])
    joiner = cache.allocate([1, 2, 3, 4, 5, 6, 0])
    assert cache.num_computed_tokens(joiner) == 4
    plan = cache.reserve([writer, joiner], [9, 3])
    assert plan.all_fit
    assert plan.copies.tolist() == []


def test_idle_source_is_dropped_if_the_prompt_needs_its_block() -> None:
    """Four blocks are free and the prompt takes all of them, the source included: no reason to refuse it."""
    cache = partial(num_blocks=5)
    cache.free(cache.prefilled([1, 2, 3, 4]))
    tokens = [1, 2, 3, 9, *range(50, 61)]
    assert cache.can_allocate(tokens) is Admission.OK
    seq = cache.allocate(tokens)
    assert (cache.num_computed_tokens(seq), cache.num_free_blocks) == (0, 0)
    cache.free(seq)


def test_held_source_needs_no_free_block() -> None:
    cache = partial(num_blocks=5)
    cache.prefilled([1, 2, 3, 4])
    seq = cache.allocate([1, 2, 3, 9, *range(50, 58)])
    assert (cache.num_computed_tokens(seq), cache.num_free_blocks) == (3, 0)


def test_a_batch_takes_held_sources_and_leaves_idle_ones() -> None:
    """Together the prompts were promised the free blocks; holding an idle one more could break that promise."""
    cache = partial()
    cache.free(cache.prefilled([1, 2, 3, 4]))
    running = cache.prefilled([5, 6, 7, 8])
    seqs = cache.allocate_batch([[1, 2, 3, 9], [5, 6, 7, 9]])
    assert [cache.num_computed_tokens(seq) for seq in seqs] == [0, 3]
    plan = cache.reserve(seqs, [4, 1])
    assert plan.copies.tolist() == [[cache.row(running)[0], cache.row(seqs[1])[0]]]


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("key", [LoRA("a"), CacheSalt("a")])
def test_partial_hits_respect_extra_keys(key: Any) -> None:
    cache = partial()
    assert hit(cache, [1, 2, 3, 4])[0] == 0
    assert hit(cache, [1, 2, 3, 4], (key,))[0] == 0
    assert hit(cache, [1, 2, 3, 9], (type(key)("b"),)) == (0, [])
    assert hit(cache, [1, 2, 3, 9], (key,))[0] == 3
    assert hit(cache, [1, 2, 3, 8])[0] == 3


def test_a_block_with_an_image_is_neither_begun_nor_a_beginning() -> None:
    """Such a block is known only as a whole; the text after it is ordinary text again."""
    cache = partial()
    image, other = Span("cat", 6, 2), Span("dog", 6, 2)
    tokens = [1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 9]
    assert hit(cache, tokens, (image,))[0] == 0
    assert hit(cache, [1, 2, 3, 4, 5, 6, 0, 0], (other,))[0] == 4
    assert hit(cache, [1, 2, 3, 4, 5, 6, 1])[0] == 4
    assert hit(cache, [1, 2, 3, 0, 5, 6, 0, 0], (image,))[0] == 3
    assert hit(cache, [*tokens[:10], 0], (image,))[0] == 10
    # Under the other image the two blocks before are known, and nothing behind them.
    assert hit(cache, [*tokens[:10], 0], (other,))[0] == 8


def test_reset_leaves_no_partial_hits() -> None:
    cache = partial()
    assert hit(cache, [1, 2, 3, 4])[0] == 0
    cache.reset_prefix_cache()
    assert hit(cache, [1, 2, 3, 9]) == (0, [])
    assert hit(cache, [1, 2, 3, 9])[0] == 3


# ---------------------------------------------------------------- before the first step


@pytest.mark.parametrize("call", ["free", "reset and free"])
def test_sequence_freed_before_its_first_step_releases_the_source(call: str) -> None:
    cache = partial()
    cache.free(cache.prefilled([1, 2, 3, 4]))
    seq = cache.allocate([1, 2, 3, 9])
    assert cache.num_used_blocks == 2
    if call != "free":
        cache.reset_prefix_cache()
    cache.free(seq)
    assert cache.num_used_blocks == 0


@pytest.mark.parametrize("is_mapped", [False, True])
def test_sequence_cannot_be_forked_or_truncated_before_the_copy(is_mapped: bool) -> None:
    """All but the last token count as computed, but the block does not hold them yet."""
    cache = partial(num_cpu_blocks=8 if is_mapped else 0)
    cache.free(cache.prefilled([1, 2, 3, 4]))
    seq = cache.allocate([1, 2, 3, 9], holder="early", num_seqs=2)
    assert cache.num_computed_tokens(seq) == 3
    calls = [lambda: cache.fork(seq), lambda: cache.truncate(seq, 2), lambda: cache.regroup([seq], [0, 0])]
    before = snapshot(cache.cache)
    for call in calls:
        with pytest.raises(
            SequenceNotReady, match="'early' must first copy the beginning of a block: let it run its next step"
        ):
            call()
        assert snapshot(cache.cache) == before
    assert cache.regroup([seq], [0]) == [seq]
    cache.append([seq], [5])
    plan = cache.reserve([seq], 1)
    assert len(plan.copies) == 1
    cache.commit([seq], 1)
    child = cache.fork(seq)[0]
    assert cache.tokens(child) == [1, 2, 3, 9, 5]
    cache.truncate(seq, 2)


def test_swap_out_before_the_copy_drops_the_partial_hit() -> None:
    cache = partial(num_cpu_blocks=8)
    cache.free(cache.prefilled([1, 2, 3, 4, 5, 6, 7, 8]))
    seq = cache.allocate([1, 2, 3, 4, 5, 6, 9])
    assert cache.num_computed_tokens(seq) == 6
    assert cache.can_swap_out([seq])
    assert len(cache.swap_out([seq]).swap_outs) == 1  # its full block; nothing of the second is there
    assert (cache.num_computed_tokens(seq), cache.num_used_blocks) == (4, 0)
    assert cache.can_swap_in([seq])
    cache.swap_in([seq])
    plan = cache.reserve([seq])
    assert (plan.num_computed.tolist(), plan.num_scheduled.tolist(), plan.copies.tolist()) == ([4], [3], [])
    cache.commit([seq], 3)
    cache.free(seq)
    assert cache.num_used_blocks == 0


def test_the_copy_waits_for_the_step_that_serves_it() -> None:
    cache = partial()
    cache.free(cache.prefilled([1, 2, 3, 4]))
    seq = cache.allocate([1, 2, 3, 9])
    assert cache.reserve([seq], 0).copies.tolist() == []
    assert cache.reserve([], 0).copies.tolist() == []
    lease = cache.cache.pool.get_new_blocks(cache.num_free_blocks)
    # Five more tokens take two blocks that are not there: nothing is copied and the source stays held.
    plan = cache.reserve([seq], 6)
    assert (plan.status.tolist(), plan.copies.tolist()) == ([SeqStatus.NO_BLOCKS], [])
    cache.cache.pool.free_blocks(lease)
    assert len(cache.reserve([seq], 6).copies) == 1
    assert cache.reserve([seq], 6).copies.tolist() == []


def test_source_lists_the_sequence_as_holder() -> None:
    cache = partial()
    cache.free(cache.prefilled([1, 2, 3, 4]))
    seq = cache.allocate([1, 2, 3, 9], holder="copying")
    assert [holding.block_ids for holding in cache.leak_report()] == [[*cache.row(seq), 1]]
    assert cache.block(1).holders == [f"sequence {seq} 'copying'"]
    # Preempting it would free its own block and the source.
    assert cache.num_owned_blocks([seq]).tolist() == [2]
    cache.reserve([seq], 1)
    assert cache.block(1).holders == []
    assert cache.num_owned_blocks([seq]).tolist() == [1]


# ---------------------------------------------------------------- layer groups


def test_each_group_copies_its_own_block() -> None:
    cache = partial(groups=(LayerGroup(4, name="full"), LayerGroup(4, 6, name="window")))
    first = cache.prefilled([1, 2, 3, 4, 5, 6, 7, 8])
    sources = [cache.block_ids(first, group).tolist()[1] for group in (0, 1)]
    cache.free(first)
    seq = cache.allocate([1, 2, 3, 4, 5, 6, 7, 0])
    assert cache.num_computed_tokens(seq) == 7
    plan = cache.reserve([seq], 1)
    targets = [cache.block_ids(seq, group).tolist()[1] for group in (0, 1)]
    assert plan.copies.tolist() == [list(pair) for pair in zip(sources, targets, strict=True)]
    assert plan.copy_groups.tolist() == [0, 1]


def test_source_must_exist_in_every_group() -> None:
    """Seven blocks: the window's first block goes when a lease takes the least recently used of the idle ones."""
    cache = partial(num_blocks=8, groups=(LayerGroup(4), LayerGroup(4, 4)))
    cache.free(cache.prefilled([1, 2, 3, 4]))
    assert cache.num_cached_blocks == 2
    lease = cache.cache.pool.get_new_blocks(6)
    assert cache.num_cached_blocks == 1
    cache.cache.pool.free_blocks(lease)
    assert hit(cache, [1, 2, 3, 9]) == (0, [])


def test_window_that_slides_past_a_load_releases_its_block() -> None:
    """The hit is loaded up to the block in which it ends; after that block, the window has moved on."""
    groups = (LayerGroup(4), LayerGroup(4, sliding_window=2))
    cache = partial(num_blocks=8, groups=groups, num_cpu_blocks=10)
    cache.free(cache.prefilled(list(range(12))))
    cache.free(cache.prefilled([70]))  # takes the block that nobody had, and the first one behind the window
    seq = cache.allocate([0, 1, 2, 3, 4, 5, 99])
    assert cache.num_computed_tokens(seq) == 6
    with pytest.raises(SequenceNotReady, match="has 1 blocks to load from the CPU pool"):
        cache.fork(seq)
    cache.commit([seq], [0])  # the window slides
    plan = cache.reserve([seq], 1)
    assert (len(plan.swap_ins), len(plan.copies)) == (0, 2)
    cache.commit([seq], 1)
    cache.free(seq)


def test_groups_of_different_block_sizes_have_no_common_inside() -> None:
    groups = (LayerGroup(4), LayerGroup(8))
    with pytest.raises(InvalidArgument, match=r"partial_hits is True for groups with block sizes \[4, 8\]"):
        CacheConfig(20, groups=groups, partial_hits=True)


# ---------------------------------------------------------------- against brute force


class Shadow:
    """A data plane: what stands in each slot of each group, as (keys, all tokens up to there)."""

    def __init__(self, cache: Checked, num_groups: int, block_size: int) -> None:
        self.cache = cache
        self.block_size = block_size
        self.slots: list[dict[int, Any]] = [{} for _ in range(num_groups)]

    def step(self, seq: int, keys: tuple[Any, ...]) -> None:
        """Compute all that is missing, then read the whole context back."""
        tokens = self.cache.tokens(seq)
        start = self.cache.num_computed_tokens(seq)
        plan = self.cache.reserve([seq], len(tokens) - start)
        assert plan.all_fit
        for (source, target), group in zip(plan.copies.tolist(), plan.copy_groups.tolist(), strict=True):
            for offset in range(self.block_size):
                there = self.slots[group].get(source * self.block_size + offset)
                self.slots[group][target * self.block_size + offset] = there
        for group, view in enumerate(plan.groups):
            for position, slot in enumerate(view.slot_mapping.tolist(), start=start):
                self.slots[group][slot] = (keys, *tokens[: position + 1])
            for position in range(len(tokens)):
                block = int(view.block_tables[0][position // self.block_size])
                if block:
                    slot = block * self.block_size + position % self.block_size
                    assert self.slots[group][slot] == (keys, *tokens[: position + 1])
        self.cache.commit([seq], len(tokens) - start)


def longest(cache: Checked, tokens: list[int], keys: tuple[Any, ...], known: set[Any], size: int) -> int:
    """The hit that looking at every known prompt finds: whole cached blocks, then one more that begins alike."""
    whole = min(cached_tokens(cache, tokens, keys), (len(tokens) - 1) // size * size)
    best = 0
    for other_keys, *other in known:
        if other_keys != keys or len(other) != whole + size or other[:whole] != tokens[:whole]:
            continue
        alike = 0
        while alike < min(size, len(tokens) - 1 - whole) and other[whole + alike] == tokens[whole + alike]:
            alike += 1
        if alike > best and cache.cache.contents.equal_to(other, keys):
            best = alike
    return whole + best


@pytest.mark.parametrize("num_blocks", [30, 200])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_hit_is_as_long_as_brute_force_finds_it(size: int, num_blocks: int) -> None:
    """25 prompts a cache, so no block has more than 32 candidates; the smaller pool evicts, the larger one never."""
    generator = random.Random(run_seed() + size)
    inside = 0
    for _ in range(12):
        cache = partial(num_blocks, size)
        shadow, known = Shadow(cache, 1, size), set[Any]()
        for _ in range(25):
            tokens = [generator.choice((1, 1, 2, 3)) for _ in range(generator.randint(1, 5 * size))]
            keys = generator.choice(((), (), (LoRA("a"),)))
            expected = longest(cache, tokens, keys, known, size)
            seq = cache.allocate(tokens, holder="", extra_keys=keys)
            assert cache.num_computed_tokens(seq) == expected, (tokens, keys)
            inside += expected % size != 0
            shadow.step(seq, keys)
            cache.free(seq)
            known |= {(keys, *tokens[:end]) for end in range(size, len(tokens) + 1, size)}
    assert inside > 10


def test_with_groups_the_contexts_stay_right_and_beginnings_are_taken() -> None:
    generator = random.Random(run_seed())
    inside = 0
    for _ in range(15):
        cache = partial(40, groups=(LayerGroup(4), LayerGroup(4, generator.randint(1, 9))))
        shadow, running = Shadow(cache, 2, 4), []
        for _ in range(25):
            tokens = [generator.choice((1, 1, 1, 2)) for _ in range(generator.randint(1, 20))]
            if cache.can_allocate(tokens) is Admission.OK:
                seq = cache.allocate(tokens)
                inside += cache.num_computed_tokens(seq) % 4 != 0
                shadow.step(seq, ())
                running.append(seq)
            while running and (generator.random() < 0.6 or len(running) > 3):
                cache.free(running.pop(generator.randrange(len(running))))
    assert inside > 10


def test_at_most_32_candidates_are_compared_latest_first() -> None:
    """So a popular first token cannot make lookups slow; the price is a shorter beginning, never a wrong one."""
    cache = partial(num_blocks=60, block_size=4)
    cache.free(cache.prefilled([1, 2, 3, 4]))
    for number in range(31):
        cache.free(cache.prefilled([1, 100 + number, 0, 0]))
    assert hit(cache, [1, 2, 3, 9, 9])[0] == 3  # the 32nd, and now itself the latest
    for number in range(32):
        cache.free(cache.prefilled([1, 200 + number, 0, 0]))
    seq = cache.allocate(np.array([1, 2, 3, 8, 8]))
    assert cache.num_computed_tokens(seq) == 1
