"""What the doors into other engines share, without an engine: batches of its keys on a real folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_tiers import TierDoor

KEYS = [bytes([number]) * 32 for number in range(4)]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[TierDoor]:
    made = TierDoor(f"file:{tmp_path}", model="a")
    yield made
    made.close()


def carry(door: TierDoor, is_load: bool, keys: list[bytes], buffers: list[bytearray]) -> list[bool]:
    ended = door.wait(door.begin(is_load, keys, buffers), PATIENCE_SECONDS)
    assert ended is not None
    return ended.good


def test_what_is_right_of_a_load_counts_and_the_rest_is_zeros(door: TierDoor) -> None:
    assert carry(door, False, KEYS[:3], [bytearray(key) for key in KEYS[:3]]) == [True] * 3
    buffers = [bytearray(b"\xaa" * 32) for _ in range(4)]
    assert carry(door, True, [KEYS[2], KEYS[3], KEYS[0], KEYS[1]], buffers) == [True, False, True, True]
    assert buffers == [KEYS[2], bytes(32), KEYS[0], KEYS[1]]


def test_a_key_twice_is_stored_once_and_loaded_into_one_of_its_buffers(door: TierDoor) -> None:
    assert (
        carry(door, False, [KEYS[0], KEYS[1], KEYS[0]], [bytearray(KEYS[place]) for place in (0, 1, 0)]) == [True] * 3
    )
    buffers = [bytearray(b"\xaa" * 32) for _ in range(3)]
    good = carry(door, True, [KEYS[0], KEYS[1], KEYS[0]], buffers)
    assert sum(good) == 2
    for is_good, buffer, place in zip(good, buffers, (0, 1, 0), strict=True):
        assert bytes(buffer) == (KEYS[place] if is_good else b"\xaa" * 32)


def test_a_refused_batch_ends_at_once_and_nothing_is_left(door: TierDoor) -> None:
    door.tier.close()
    assert carry(door, True, KEYS, [bytearray(32) for _ in KEYS]) == [False] * 4
    assert door.num_running() == 0
    assert door.ended() == []


def test_after_a_turn_nothing_stored_before_is_found(door: TierDoor, tmp_path: Path) -> None:
    assert carry(door, False, KEYS, [bytearray(key) for key in KEYS]) == [True] * 4
    door.turn()
    assert carry(door, True, KEYS, [bytearray(32) for _ in KEYS]) == [False] * 4
    other = TierDoor(f"file:{tmp_path}", model="a")
    assert carry(other, True, KEYS, [bytearray(32) for _ in KEYS]) == [True] * 4
    other.close()


@pytest.mark.parametrize(
    "ticket", [None, -1, 0, 99, 2**70, 1.5, True, "1", [], object()], ids=lambda each: type(each).__name__
)
def test_waiting_for_no_batch_is_refused(door: TierDoor, ticket: Any) -> None:
    with pytest.raises(InvalidArgument, match="ticket is "):
        door.wait(ticket, 0.0)
    with pytest.raises(InvalidArgument, match="ticket is "):
        door.wait(ticket, PATIENCE_SECONDS)


@pytest.mark.parametrize("seconds", [None, float("nan"), float("inf"), 10**400, "1", [], True, 1j], ids=repr)
def test_waiting_for_no_time_is_refused_and_the_batch_stays(door: TierDoor, seconds: Any) -> None:
    ticket = door.begin(False, KEYS, [bytearray(key) for key in KEYS])
    with pytest.raises(InvalidArgument, match="seconds is "):
        door.wait(ticket, seconds)
    ended = door.wait(ticket, PATIENCE_SECONDS)
    assert ended is not None
    assert ended.good == [True] * 4


def test_a_batch_is_reported_once(door: TierDoor) -> None:
    ticket = door.begin(False, KEYS, [bytearray(key) for key in KEYS])
    assert door.wait(ticket, PATIENCE_SECONDS) is not None
    with pytest.raises(InvalidArgument, match=f"ticket is {ticket}; no batch"):
        door.wait(ticket, PATIENCE_SECONDS)
