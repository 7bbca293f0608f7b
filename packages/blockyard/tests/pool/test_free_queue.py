"""The free queue: every order asserted whole, because the order is who is evicted next."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from librt.vecs import vec
from mypy_extensions import i32

from blockyard import InvariantError
from blockyard.core.blocks.free_queue import FreeQueue
from blockyard_testing.seeds import run_seed

Corruption = Callable[[FreeQueue], None]


def popleft_n(queue: FreeQueue, count: int) -> list[int]:
    out = vec[i32]([0] * count)
    queue.popleft_n(out, 0, count)
    return list(out)


def order(queue: FreeQueue) -> list[int]:
    queue.check()
    ids = queue.block_ids()
    assert len(ids) == queue.num_free
    return ids


def backwards(queue: FreeQueue) -> list[int]:
    """The same list by its other links: a removal must mend both."""
    ids = []
    block = queue.prev_free[0]
    while block != 0:
        ids.append(block)
        block = queue.prev_free[block]
    return ids


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("num_blocks", [2, 3, 10, 1000])
def test_a_new_queue_gives_ids_in_ascending_order_and_never_the_null_block(num_blocks: int) -> None:
    queue = FreeQueue(num_blocks)
    assert order(queue) == list(range(1, num_blocks))
    assert popleft_n(queue, num_blocks - 1) == list(range(1, num_blocks))
    assert order(queue) == []


def test_append_is_last_and_append_left_is_next() -> None:
    queue = FreeQueue(7)
    popleft_n(queue, 3)
    queue.append(2)
    assert order(queue) == [4, 5, 6, 2]
    queue.append_left(3)
    assert order(queue) == [3, 4, 5, 6, 2]
    queue.append(1)
    assert order(queue) == [3, 4, 5, 6, 2, 1]
    assert backwards(queue) == [1, 2, 6, 5, 4, 3]


def test_append_left_in_reverse_restores_the_order_of_a_pop() -> None:
    """Why uncached blocks are freed last first: a run that held nothing reusable comes out again as it went in."""
    queue = FreeQueue(6)
    for block in reversed(popleft_n(queue, 3)):
        queue.append_left(block)
    assert order(queue) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("removed", "left"),
    [
        ([3], [1, 2, 4, 5]),
        ([1], [2, 3, 4, 5]),
        ([5], [1, 2, 3, 4]),
        ([2, 3, 4], [1, 5]),
        ([1, 5, 3], [2, 4]),
        ([5, 4, 3, 2], [1]),
        ([3, 1, 2, 5, 4], []),
    ],
)
def test_a_block_leaves_from_anywhere_and_the_rest_keeps_its_order(removed: list[int], left: list[int]) -> None:
    queue = FreeQueue(6)
    for block in removed:
        queue.remove(block)
    assert order(queue) == left
    assert backwards(queue) == left[::-1]


def test_a_removed_block_may_come_back_at_either_end() -> None:
    queue = FreeQueue(6)
    queue.remove(3)
    queue.append(3)
    assert order(queue) == [1, 2, 4, 5, 3]
    queue.remove(4)
    queue.append_left(4)
    assert order(queue) == [4, 1, 2, 5, 3]


def test_popleft_n_fills_a_part_of_a_row() -> None:
    """It writes `out[start:start + count]` and nothing beside it: the row of a sequence holds hits before that."""
    queue = FreeQueue(6)
    out = vec[i32]([77] * 6)
    queue.popleft_n(out, 2, 3)
    assert list(out) == [77, 77, 1, 2, 3, 77]
    assert order(queue) == [4, 5]
    assert backwards(queue) == [5, 4]


def test_popping_none_changes_nothing() -> None:
    queue = FreeQueue(4)
    assert popleft_n(queue, 0) == []
    assert order(queue) == [1, 2, 3]
    popleft_n(queue, 3)
    assert popleft_n(queue, 0) == []
    assert order(queue) == []


@pytest.mark.parametrize("at_the_front", [True, False])
def test_an_emptied_queue_is_filled_again(at_the_front: bool) -> None:
    """The null block is both ends of the list, so an empty list is no special case."""
    queue = FreeQueue(4)
    popleft_n(queue, 3)
    assert order(queue) == backwards(queue) == []
    for block in (2, 1, 3):
        (queue.append_left if at_the_front else queue.append)(block)
    assert order(queue) == ([3, 1, 2] if at_the_front else [2, 1, 3])


def test_the_smallest_queue_has_one_block() -> None:
    queue = FreeQueue(2)
    for _ in range(3):
        assert popleft_n(queue, 1) == [1]
        assert order(queue) == []
        queue.append(1)
        queue.remove(1)
        queue.append_left(1)
        assert order(queue) == [1]


def test_a_long_random_walk_keeps_the_order_of_a_plain_list() -> None:
    draw = random.Random(run_seed())
    queue = FreeQueue(40)
    free = list(range(1, 40))
    taken: list[int] = []
    for _ in range(3000):
        action = draw.randrange(4)
        if action == 0 and free:
            count = draw.randint(0, min(5, len(free)))
            assert popleft_n(queue, count) == free[:count]
            taken += free[:count]
            del free[:count]
        elif action == 1 and free:
            block = draw.choice(free)
            queue.remove(block)
            free.remove(block)
            taken.append(block)
        elif taken:
            block = taken.pop(draw.randrange(len(taken)))
            if action == 2:
                queue.append(block)
                free.append(block)
            else:
                queue.append_left(block)
                free.insert(0, block)
        assert order(queue) == free
        assert backwards(queue) == free[::-1]


# ---------------------------------------------------------------- check() sees what is broken


def set_link(name: str, block: int, value: int) -> Corruption:
    def corrupt(queue: FreeQueue) -> None:
        getattr(queue, name)[block] = value

    return corrupt


def set_count(value: int) -> Corruption:
    def corrupt(queue: FreeQueue) -> None:
        queue.num_free = value

    return corrupt


CORRUPTIONS = {
    "the count is one too high": (set_count(6), "5 blocks are linked, but num_free is 6"),
    "the count is one too low": (set_count(4), "5 blocks are linked, but num_free is 4"),
    "a link skips a block": (set_link("next_free", 2, 4), "4 blocks are linked, but num_free is 5"),
    "the list ends early": (set_link("next_free", 2, 0), "2 blocks are linked, but num_free is 5"),
    "the head is lost": (set_link("next_free", 0, 0), "0 blocks are linked, but num_free is 5"),
    "a link goes round in a circle": (set_link("next_free", 4, 2), "7 blocks are linked, but num_free is 5"),
    "a block links to itself": (set_link("next_free", 3, 3), "7 blocks are linked, but num_free is 5"),
    "a block points back to a wrong one": (set_link("prev_free", 3, 1), "block 3 has the predecessor 1; it must be 2"),
    "the first block has one before it": (set_link("prev_free", 1, 5), "block 1 has the predecessor 5; it must be 0"),
    "the tail is not the last block": (set_link("prev_free", 0, 4), "the tail is 4, but the last block is 5"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_check_finds_a_broken_list(what: str) -> None:
    corrupt, message = CORRUPTIONS[what]
    queue = FreeQueue(6)
    queue.check()
    corrupt(queue)
    with pytest.raises(InvariantError, match=f"^free queue: {message}$"):
        queue.check()


@pytest.mark.parametrize("name", ["next_free", "prev_free"])
@pytest.mark.parametrize("value", [6, -7, 2**31 - 1])
def test_check_finds_a_link_that_leaves_the_pool(name: str, value: int) -> None:
    """A broken law is an InvariantError, wherever the link points: an IndexError names no law."""
    queue = FreeQueue(6)
    set_link(name, 3, value)(queue)
    with pytest.raises(InvariantError, match=r"^free queue: "):
        queue.check()


def test_a_block_appended_twice_is_found() -> None:
    """Such a bug would give one block to two owners (I8)."""
    queue = FreeQueue(6)
    popleft_n(queue, 2)
    queue.append(1)
    queue.append(1)
    with pytest.raises(InvariantError, match="free queue"):
        queue.check()
