"""`FreeKVCacheBlockQueue` as people may use it alone: every misuse is caught at the call, and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from blockyard import BlockyardError, DoubleFree, InvalidArgument, OutOfBlocks
from blockyard.core.blocks.block_queue import FreeKVCacheBlockQueue
from blockyard_testing.seeds import run_seed

Queue = FreeKVCacheBlockQueue


def order(queue: Queue) -> list[int]:
    queue.check()
    ids = queue.get_all_free_blocks()
    assert len(ids) == queue.num_free_blocks
    return ids


def test_it_keeps_the_order() -> None:
    queue = Queue(7)
    assert order(queue) == [1, 2, 3, 4, 5, 6]
    assert queue.popleft() == 1
    assert queue.popleft_n(2) == [2, 3]
    queue.remove(5)
    assert order(queue) == [4, 6]
    queue.append_n([3, 1])
    queue.append_left(5)
    queue.append(2)
    assert order(queue) == [5, 4, 6, 3, 1, 2]
    assert queue.popleft_n(0) == []
    assert queue.popleft_n(6) == [5, 4, 6, 3, 1, 2]
    assert order(queue) == []


MISUSES: dict[str, tuple[type[BlockyardError], Callable[[Queue], object]]] = {
    "append a free block": (DoubleFree, lambda queue: queue.append(3)),
    "append_left a free block": (DoubleFree, lambda queue: queue.append_left(3)),
    "append_n with a free block": (DoubleFree, lambda queue: queue.append_n([1, 3])),
    "append_n with a block twice": (DoubleFree, lambda queue: queue.append_n([1, 2, 1])),
    "append_n of a set": (InvalidArgument, lambda queue: queue.append_n({1})),
    "append_n of an array that is none": (InvalidArgument, lambda queue: queue.append_n(1)),
    "remove a taken block": (InvalidArgument, lambda queue: queue.remove(1)),
    "remove the null block": (InvalidArgument, lambda queue: queue.remove(0)),
    "append the null block": (InvalidArgument, lambda queue: queue.append(0)),
    "append beyond the end": (InvalidArgument, lambda queue: queue.append(6)),
    "append a huge id": (InvalidArgument, lambda queue: queue.append(2**70)),
    "append a bool": (InvalidArgument, lambda queue: queue.append(True)),
    "remove a float": (InvalidArgument, lambda queue: queue.remove(3.0)),
    "remove a negative id": (InvalidArgument, lambda queue: queue.remove(-1)),
    "pop too many": (OutOfBlocks, lambda queue: queue.popleft_n(4)),
    "pop fewer than none": (InvalidArgument, lambda queue: queue.popleft_n(-1)),
    "pop a float": (InvalidArgument, lambda queue: queue.popleft_n(1.0)),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_every_misuse_is_refused_and_changes_nothing(misuse: str) -> None:
    error, call = MISUSES[misuse]
    queue = Queue(6)
    assert queue.popleft_n(2) == [1, 2]
    with pytest.raises(error) as caught:
        call(queue)
    assert type(caught.value) is error
    assert order(queue) == [3, 4, 5]
    queue.append_n([1, 2])
    assert order(queue) == [3, 4, 5, 1, 2]


def test_an_empty_queue_says_so() -> None:
    queue = Queue(2)
    assert queue.popleft() == 1
    with pytest.raises(OutOfBlocks, match="only 0 blocks are free") as caught:
        queue.popleft()
    assert (caught.value.num_needed, caught.value.num_free) == (1, 0)


@pytest.mark.parametrize("num_blocks", [0, 1, -1, 2**27 + 1, 1.5, True, "6", None])
def test_its_size_has_limits(num_blocks: object) -> None:
    with pytest.raises(InvalidArgument, match="num_blocks"):
        Queue(num_blocks)


def test_random_calls_against_a_list() -> None:
    draw = random.Random(run_seed())
    for _ in range(20):
        size = draw.randint(2, 12)
        queue, model, taken = Queue(size), list(range(1, size)), []
        for _ in range(200):
            block, choice = draw.randrange(-1, size + 1), draw.randrange(5)
            try:
                if choice == 0:
                    queue.append(block)
                    model.append(block)
                elif choice == 1:
                    queue.append_left(block)
                    model.insert(0, block)
                elif choice == 2:
                    queue.remove(block)
                    model.remove(block)
                elif choice == 3:
                    taken = queue.popleft_n(draw.randint(0, 3))
                    assert taken == model[: len(taken)]
                    del model[: len(taken)]
                else:
                    queue.append_n(taken)
                    model += taken
            except BlockyardError:
                pass
            assert order(queue) == model
            assert len(set(model)) == len(model)
            assert set(model) <= set(range(1, size))
