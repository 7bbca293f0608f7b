"""Admission: who gets in now, later or never, with the exact boundaries; and who gets blocks in a full pool."""

from __future__ import annotations

import random

import pytest

from blockyard import Admission, NeverFits, OutOfBlocks, OutOfRows, SeqStatus
from blockyard.answers import Resize
from blockyard_testing.seeds import draws, run_seed

from ..support.checked import Checked, prompt
from ..support.snapshot import snapshot

OK, LATER, NEVER = Admission.OK, Admission.LATER, Admission.NEVER
SCHEDULED, NO_BLOCKS = SeqStatus.SCHEDULED, SeqStatus.NO_BLOCKS


def test_the_watermark_counts_in_blocks_rounded_down() -> None:
    """21 blocks at 0.1 keep 2 free; 20 are usable: 18 can be had by one prompt and not 19, ever."""
    cache = Checked(num_blocks=21, watermark=0.1, max_model_len=1000)
    assert [cache.can_allocate([1] * 4 * blocks) for blocks in (17, 18, 19, 20)] == [OK, OK, NEVER, NEVER]
    assert cache.can_allocate([1] * 73) is NEVER
    with pytest.raises(NeverFits, match=r"^token_ids needs 19 blocks; the pool has 20, of which the watermark keeps 2"):
        cache.allocate([1] * 73)
    one = cache.allocate(prompt(1, 4))
    assert [cache.can_allocate([1] * 4 * blocks) for blocks in (17, 18, 19)] == [OK, LATER, NEVER]
    message = r"^token_ids needs 18 free blocks.* included; 19 are free, of which the watermark keeps 2$"
    with pytest.raises(OutOfBlocks, match=message) as caught:
        cache.allocate([1] * 72)
    assert (caught.value.num_needed, caught.value.num_free) == (18, 19)
    cache.free(one)
    assert cache.can_allocate([1] * 72) is OK


def test_a_running_sequence_grows_into_the_watermark() -> None:
    """That is what it is for: admission stops, decoding goes on."""
    cache = Checked(num_blocks=5, watermark=0.25)
    seq = cache.prefilled(prompt(1, 12), [7])
    assert cache.can_allocate([1]) is LATER
    assert cache.reserve([seq], 1).all_fit
    assert cache.num_free_blocks == 0


def test_idle_hits_count_against_the_free_blocks() -> None:
    """A revived block leaves the queue as a new one does; a block that a running sequence holds costs nothing."""
    cache = Checked(num_blocks=5)
    done = cache.prefilled(prompt(1, 8))
    cache.free(done)
    running = cache.allocate(prompt(2, 5))
    assert cache.num_free_blocks == 2
    tokens = [*prompt(1, 8), 9]
    assert cache.can_allocate(tokens) is LATER, "two idle hits and a new block, and two blocks are free"
    with pytest.raises(OutOfBlocks, match=r"^token_ids needs 3 free blocks, idle ones that it hits.*; 2 are free"):
        cache.allocate(tokens)
    assert cache.can_allocate([*prompt(1, 4), 9]) is OK
    cache.compute(running)
    assert cache.can_allocate([*prompt(2, 4), *prompt(3, 8)]) is OK, "one hit is held by the running sequence"
    assert cache.can_allocate([*prompt(2, 4), *prompt(3, 9)]) is LATER


def test_max_model_len_limits_prompts_even_in_a_large_pool() -> None:
    cache = Checked(max_model_len=10)
    assert [cache.can_allocate([1] * length) for length in (10, 11)] == [OK, NEVER]
    with pytest.raises(NeverFits, match=r"^token_ids has 11 tokens; max_model_len is 10$"):
        cache.allocate([1] * 11)


def test_no_more_sequences_than_rows() -> None:
    cache = Checked(max_num_seqs=2)
    first, _second = cache.allocate([1]), cache.allocate([2])
    assert cache.can_allocate([3]) is LATER
    before = snapshot(cache.cache)
    message = r"^1 rows are needed, 0 are free: max_num_seqs is 2 sequences at once$"
    with pytest.raises(OutOfRows, match=message):
        cache.allocate([3])
    assert snapshot(cache.cache) == before
    cache.free(first)
    assert cache.can_allocate([3]) is OK


def test_asking_changes_nothing() -> None:
    cache = Checked()
    cache.free(cache.prefilled(prompt(1, 9)))
    before = snapshot(cache.cache)
    assert cache.can_allocate(prompt(1, 9)) is OK
    assert snapshot(cache.cache) == before


def test_prompt_that_does_not_fit_blocks_no_other() -> None:
    """Two blocks are free. The first wants three and gets none, the second gets its one; the third finds one left."""
    cache = Checked(num_blocks=6)
    seqs = [cache.prefilled(prompt(number, 4), [7]) for number in (1, 2, 3)]
    plan = cache.reserve(seqs, [9, 1, 4])
    assert plan.status.tolist() == [NO_BLOCKS, SCHEDULED, SCHEDULED]
    assert plan.num_scheduled.tolist() == [0, 1, 4]
    assert plan.slot_mapping.tolist() == [16, 20, 21, 22, 23]
    assert cache.row(seqs[0]) == [1]
    assert cache.tokens(seqs[0]) == [*prompt(1, 4), 7]
    plan = cache.reserve(seqs, 1)
    assert plan.status.tolist() == [NO_BLOCKS, SCHEDULED, SCHEDULED]
    cache.free(seqs[2])
    assert cache.reserve(seqs[:2], 1).all_fit


def test_a_preempted_sequence_hits_its_own_blocks() -> None:
    cache = Checked(num_blocks=6)
    first, second = cache.prefilled(prompt(1, 8), [7]), cache.prefilled(prompt(2, 8), [7])
    assert cache.row(second) == [3, 4]
    assert cache.reserve([first, second], 1).status.tolist() == [SCHEDULED, NO_BLOCKS]
    tokens = cache.tokens(second)
    cache.free(second)
    cache.commit([first], 1, [8])
    cache.free(first)
    again = cache.allocate(tokens)
    assert cache.state(again) == (9, 8)
    assert cache.row(again)[:2] == [3, 4]


def test_only_ok_is_truthy() -> None:
    assert [bool(answer) for answer in Admission] == [True, False, False]
    assert [bool(answer) for answer in Resize] == [True, False]
    cache = Checked(num_blocks=4)
    assert [bool(cache.try_allocate(prompt(number, 8))) for number in range(2)] == [True, False]


def test_a_prompt_waits_for_a_lease_that_may_be_freed() -> None:
    """Nine usable blocks, three of them leased: what needs seven others fits once the lease is freed, and no sooner."""
    cache = Checked(num_blocks=10)
    system = prompt(1, 12)
    cache.free(cache.prefilled(system))
    pin = cache.hold_cached(system, holder="system prompt")
    assert [cache.can_allocate(prompt(2, 4 * blocks)) for blocks in (6, 7, 9, 10)] == [OK, LATER, LATER, NEVER]
    assert [cache.can_allocate([*system, *prompt(2, 4 * blocks)]) for blocks in (6, 7)] == [OK, NEVER]
    assert cache.try_allocate(prompt(2, 28)) is LATER
    message = r"^token_ids needs 7 free blocks, .*; 6 are free, of which the watermark keeps 0; leases hold 3 blocks$"
    with pytest.raises(OutOfBlocks, match=message):
        cache.allocate(prompt(2, 28))
    running = cache.allocate(prompt(3, 4))
    assert [cache.can_allocate(prompt(2, 4 * blocks)) for blocks in (5, 6, 7, 10)] == [OK, LATER, LATER, NEVER]
    cache.free(running)
    cache.pool.free_blocks(pin)
    assert cache.can_allocate(prompt(2, 28)) is OK


@pytest.mark.parametrize("seed", [1, 2, None])
def test_later_means_that_freeing_sequences_and_leases_makes_room(seed: int | None) -> None:
    """Random sequences and leases: what is LATER fits when all of them are freed, what is NEVER does not."""
    source = random.Random(run_seed() if seed is None else seed)
    seen = {LATER: 0, NEVER: 0}
    num_caches = 0
    while num_caches < draws(60, 60) or not all(seen.values()):
        num_caches += 1
        cache = Checked(num_blocks=14, watermark=source.choice([0.0, 0.2]))
        leases = []
        for _ in range(source.randrange(4)):
            tokens = prompt(source.randrange(3), 4 * source.randrange(1, 4))
            if cache.can_allocate(tokens) is OK:
                cache.free(cache.prefilled(tokens))
                leases.append(cache.hold_cached(tokens, holder="pin"))
        running = []
        while (answer := cache.try_allocate(prompt(source.randrange(6), source.randrange(1, 20)))) not in seen:
            running.append(answer)
        asked = [prompt(source.randrange(6), source.randrange(1, 56)) for _ in range(8)]
        answers = [cache.can_allocate(tokens) for tokens in asked]
        cache.free(running)
        for lease in leases:
            cache.pool.free_blocks(lease)
        for tokens, before in zip(asked, answers, strict=True):
            if before in seen:
                seen[before] += 1
                assert (cache.can_allocate(tokens) is OK) == (before is LATER), tokens
