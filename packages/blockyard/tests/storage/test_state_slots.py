"""Slots of states: bytes that go to blocks of the pool and back, whatever lies beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from blockyard import InvalidArgument
from blockyard.storage import KVCache, SlotLists, StateSlots, StateTensor

#: 30, 24 and 10 bytes, of which the second stands first, because its numbers are widest.
TENSORS = [
    StateTensor((3, 5), torch.bfloat16),
    StateTensor((2, 3), torch.float32),
    StateTensor((5,), torch.float16),
]


def cache_of(**options: Any) -> KVCache:
    # Blocks of 16 bytes in each of two layers.
    return KVCache(20, 2, **{"num_layers": 2, "num_kv_heads": 1, "head_size": 1, **options})


def ids(*values: Any) -> Any:
    return np.array(values, np.int32)


def moves(copies: Any = (), clears: Any = (), loads: Any = (), load_blocks: Any = ()) -> SlotLists:
    lists = [np.array(each, np.int32) for each in (copies, clears, loads, load_blocks)]
    return SlotLists(lists[0].reshape(-1, 2), lists[1], lists[2], lists[3].reshape(len(lists[2]), -1 if loads else 2))


def filled(slots: StateSlots, slot: int, seed: int) -> list[torch.Tensor]:
    """Random numbers in a slot; returns them."""
    torch.manual_seed(seed)
    rows, is_copy = slots.rows(np.array([slot]))
    assert not is_copy
    views = slots.views(rows)
    for view in views:
        view.copy_(torch.randn(view.shape))
    return [view.clone() for view in views]


def states(slots: StateSlots, *which: int) -> list[torch.Tensor]:
    return [view.clone() for view in slots.views(slots.rows(np.array(which))[0])]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("options", [{}, {"head_size": 3, "value_size": 5}, {"dtype": torch.float16, "layout": "HND"}])
def test_a_state_goes_to_blocks_and_comes_back_and_no_other_byte_changes(options: dict[str, Any]) -> None:
    cache = cache_of(**options)
    with torch.inference_mode():
        cache.data.normal_()
    before = cache.data.clone()
    slots = StateSlots(3, TENSORS, cache)
    assert slots.num_bytes == 64
    number = -(-64 // cache.bytes_per_block)
    blocks = [9, 4, 17, 2][:number]
    saved, other = filled(slots, 1, 1), filled(slots, 2, 2)
    slots.save(ids(1), ids(blocks))
    rest = [block for block in range(20) if block not in blocks]
    assert torch.equal(cache.data[:, rest], before[:, rest])
    slots.move(moves(clears=[1]))
    assert all(not view.any() for view in states(slots, 1))
    slots.move(moves(loads=[0], load_blocks=[blocks]))
    assert equal(states(slots, 0), saved)
    assert equal(states(slots, 2), other)


def test_copies_come_first_in_their_order_then_clears_then_loads() -> None:
    slots = StateSlots(4, TENSORS, cache_of())
    first, second = filled(slots, 0, 1), filled(slots, 1, 2)
    slots.save(ids(1), ids([5, 6]))
    slots.move(moves(copies=[[0, 2], [1, 0], [2, 3]], clears=[1], loads=[2], load_blocks=[[5, 6]]))
    assert equal(states(slots, 0), second)
    assert equal(states(slots, 3), first)
    assert equal(states(slots, 2), second)
    assert not any(view.any() for view in states(slots, 1))


def test_neighbours_are_views_and_others_copies_that_are_put_back() -> None:
    slots = StateSlots(5, TENSORS, cache_of())
    assert [slots.rows(np.array(which))[1] for which in ([1, 2, 3], [4], [1, 3], [2, 1])] == [False, False, True, True]
    rows, _ = slots.rows(np.array([1, 3]))
    for view in slots.views(rows):
        view.fill_(2)
    assert not any(view.any() for view in states(slots, 0, 1, 2, 3, 4))
    slots.put_back(np.array([1, 3]), rows)
    assert [float(state.float().mean()) for state in states(slots, 3)] == [2, 2, 2]
    assert not any(view.any() for view in states(slots, 0))


def test_invalid_slots_and_blocks_are_rejected() -> None:
    slots = StateSlots(2, TENSORS, cache_of())
    for slot, blocks, words in (
        (2, [5, 6], "slot is 2; it must be from 0 to 1"),
        (0, [5, 20], r"blocks of a state are \[5, 20\]; they must be 2 ids from 1 to 19"),
        (0, [0, 5], "they must be 2 ids from 1 to 19"),
        (0, [5], "they must be 2 ids from 1 to 19"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            slots.save(ids(slot), ids(blocks))
        with pytest.raises(InvalidArgument, match=words):
            slots.move(moves(loads=[slot], load_blocks=[blocks]))
    with pytest.raises(InvalidArgument, match="tensors is empty"):
        StateSlots(2, [], cache_of())
    with pytest.raises(InvalidArgument, match="num_slots is 0"):
        StateSlots(0, TENSORS, cache_of())
