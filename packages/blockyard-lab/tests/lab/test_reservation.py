"""Contiguous memory and paging, compared with counts by hand, a slow reference, and the manager itself."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard_lab.replay import (
    ReplayOptions,
    Reservation,
    ServiceModel,
    compare_reservations,
    replay,
)
from blockyard_lab.replay.reservation import next_power_of_two
from blockyard_lab.traces import open_trace
from blockyard_testing.lab_reference import ListedTrace, lengths
from blockyard_testing.seeds import run_seed


def compared(
    pairs: list[tuple[int, int]], num_blocks: int, max_model_len: int, block_size: int = 4
) -> list[Reservation]:
    return compare_reservations(lengths(pairs), num_blocks, block_size=block_size, max_model_len=max_model_len)


def test_reservations_match_a_trace_counted_by_hand() -> None:
    """Eight requests of 6 tokens, 5 of them a prompt, in 32 slots: 8 or 16 for each, or two blocks of 4."""
    longest, power, paged = compared([(5, 1)] * 8, 8, max_model_len=16)
    assert [found.scheme for found in (longest, power, paged)] == ["longest", "power of two", "paged"]
    assert [found.num_requests for found in (longest, power, paged)] == [8, 8, 8]
    assert [found.mean_running for found in (longest, power, paged)] == [2, 4, 3]  # the pool's null block is not used
    assert longest.wasted_share == pytest.approx(10 / 16)
    assert power.wasted_share == paged.wasted_share == pytest.approx(2 / 8)


def test_a_paged_request_holds_no_more_than_it_has_filled() -> None:
    """Prompts of a block grow to three: four start in four blocks, and then the youngest wait again."""
    longest, _, paged = compared([(4, 8)] * 5, 5, max_model_len=12)
    assert longest.peak_running == longest.mean_running == 1
    assert paged.peak_running == 4
    assert 1 < paged.mean_running < 3


def test_large_memory_holds_all_requests_at_once() -> None:
    assert [found.mean_running for found in compared([(5, 1)] * 3, 100, max_model_len=16)] == [3, 3, 3]


def test_requests_larger_than_memory_are_refused() -> None:
    longest, power, paged = compared([(5, 1), (20, 4), (9, 4)], 5, max_model_len=13)
    assert (longest.num_requests, longest.num_refused) == (2, 1)
    assert (power.num_requests, power.num_refused) == (2, 1)
    assert (paged.num_requests, paged.num_refused) == (2, 1)
    assert all(found.num_requests == 0 and found.wasted_share == 0 for found in compared([(20, 4)], 5, 13))
    assert compared([(5, 1)], 2, max_model_len=16)[0].num_refused == 1  # 16 slots are more than there are


def test_next_power_of_two_is_exact() -> None:
    found = next_power_of_two(np.array([1, 2, 3, 4, 5, 1023, 1024, 1025, 2**27], np.int64))
    assert found.tolist() == [1, 2, 4, 4, 8, 1024, 1024, 2048, 2**27]


def test_paging_runs_more_requests_of_the_shipped_trace() -> None:
    """Reserving a model's 8,192 tokens wastes 60 to 80 %, as in the PagedAttention paper."""
    longest, power, paged = compare_reservations(open_trace("small"), 8192, max_model_len=8192)
    assert [round(found.wasted_share, 3) for found in (longest, power, paged)] == [0.764, 0.308, 0.004]
    assert [round(found.mean_running) for found in (longest, power, paged)] == [16, 51, 82]


def test_the_waste_of_paging_equals_the_replays() -> None:
    trace = open_trace("chat:requests=60,seed=3")
    paged = compare_reservations(trace, 20_000, max_model_len=32_768)[2]
    found = replay(trace, ReplayOptions(num_blocks=20_000, max_model_len=32_768))
    assert paged.wasted_share == pytest.approx(found.wasted_share)


def test_the_manager_runs_as_many_at_once() -> None:
    """The real manager, its steps and its preemptions, on a queue that is never empty."""
    trace = lengths(
        [(request.num_prompt_tokens, request.num_output_tokens) for request in open_trace("small")], every=0
    )
    paged = compare_reservations(trace, 2000, max_model_len=8192)[2]
    service = ServiceModel(max_num_batched_tokens=2**20)
    found = replay(trace, ReplayOptions(num_blocks=2000, max_model_len=8192, service=service))
    assert abs(found.peak_running - paged.peak_running) <= 2


@pytest.mark.parametrize("number", range(40))
def test_result_equals_a_step_by_step_simulation(number: int) -> None:
    draw = random.Random(f"{run_seed()} {number}")
    pairs = [(draw.randint(1, 20), draw.randint(0, 12)) for _ in range(draw.randint(1, 40))]
    num_blocks, block_size, longest = draw.randint(2, 30), draw.choice([1, 2, 4, 16]), draw.randint(8, 40)
    size = num_blocks * block_size
    schemes: list[tuple[int, Callable[[int, int], int]]] = [
        (size, lambda filled, total: longest),
        (size, lambda filled, total: 2 ** math.ceil(math.log2(total))),
        (size - block_size, lambda filled, total: -(-filled // block_size) * block_size),
    ]
    for found, (slots, held) in zip(compared(pairs, num_blocks, longest, block_size), schemes, strict=True):
        assert (found.num_requests, found.mean_running, found.peak_running) == stepped(pairs, slots, longest, held)


def stepped(
    pairs: list[tuple[int, int]], slots: int, longest: int, held: Callable[[int, int], int]
) -> tuple[int, float, int]:
    """The same, a step at a time."""
    totals = [(prompt, prompt + max(output, 1)) for prompt, output in pairs]
    waiting = deque([both for both in totals if both[1] <= longest and held(both[1], both[1]) <= slots])
    num_requests, running, counts = len(waiting), list[tuple[int, int]](), list[int]()
    peak = 0
    while True:
        while waiting and sum(held(*both) for both in [*running, waiting[0]]) <= slots:
            running.append(waiting.popleft())
        peak = max(peak, len(running))
        if not waiting:
            return num_requests, sum(counts) / len(counts) if counts else peak, peak
        ended = False
        while waiting and not ended:
            while sum(held(filled + 1, total) for filled, total in running) > slots:
                waiting.appendleft(running.pop())
                ended = True  # admitting comes after the step
            running = [(filled + 1, total) for filled, total in running]
            counts.append(len(running))
            ended = ended or any(filled == total for filled, total in running)
            running = [both for both in running if both[0] < both[1]]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": 2**28}, "max_model_len is 268435456"),
        ({"max_model_len": 16, "block_size": 0}, "block_size is 0"),
    ],
)
def test_invalid_arguments_are_refused(others: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        compare_reservations(ListedTrace([]), 8, **others)
    with pytest.raises(InvalidArgument, match="num_blocks is 1"):
        compare_reservations(ListedTrace([]), 1, max_model_len=8)
