"""The common part of the adapters of other engines: batches of keys on a real folder, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_tiers import TierAdapter

KEYS = [bytes([number]) * 32 for number in range(4)]


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[TierAdapter]:
    made = TierAdapter(f"file:{tmp_path}", model="a")
    yield made
    made.close()


def carry(adapter: TierAdapter, is_load: bool, keys: list[bytes], buffers: list[bytearray]) -> list[bool]:
    result = adapter.wait(adapter.submit(is_load, keys, buffers), PATIENCE_SECONDS)
    assert result is not None
    return result.good


def test_good_objects_of_a_load_count_and_others_are_zeros(adapter: TierAdapter) -> None:
    assert carry(adapter, False, KEYS[:3], [bytearray(key) for key in KEYS[:3]]) == [True] * 3
    buffers = [bytearray(b"\xaa" * 32) for _ in range(4)]
    assert carry(adapter, True, [KEYS[2], KEYS[3], KEYS[0], KEYS[1]], buffers) == [True, False, True, True]
    assert buffers == [KEYS[2], bytes(32), KEYS[0], KEYS[1]]


def test_a_key_twice_is_stored_once_and_loaded_into_one_of_its_buffers(adapter: TierAdapter) -> None:
    assert (
        carry(adapter, False, [KEYS[0], KEYS[1], KEYS[0]], [bytearray(KEYS[place]) for place in (0, 1, 0)])
        == [True] * 3
    )
    buffers = [bytearray(b"\xaa" * 32) for _ in range(3)]
    good = carry(adapter, True, [KEYS[0], KEYS[1], KEYS[0]], buffers)
    assert sum(good) == 2
    for is_good, buffer, place in zip(good, buffers, (0, 1, 0), strict=True):
        assert bytes(buffer) == (KEYS[place] if is_good else b"\xaa" * 32)


def test_refused_batches_end_at_once(adapter: TierAdapter) -> None:
    adapter.tier.close()
    assert carry(adapter, True, KEYS, [bytearray(32) for _ in KEYS]) == [False] * 4
    assert adapter.num_running() == 0
    assert adapter.take_results() == []


def test_nothing_stored_before_a_layout_change_is_found(adapter: TierAdapter, tmp_path: Path) -> None:
    assert carry(adapter, False, KEYS, [bytearray(key) for key in KEYS]) == [True] * 4
    adapter.change_layout()
    assert carry(adapter, True, KEYS, [bytearray(32) for _ in KEYS]) == [False] * 4
    other = TierAdapter(f"file:{tmp_path}", model="a")
    assert carry(other, True, KEYS, [bytearray(32) for _ in KEYS]) == [True] * 4
    other.close()


@pytest.mark.parametrize(
    "ticket", [None, -1, 0, 99, 2**70, 1.5, True, "1", [], object()], ids=lambda each: type(each).__name__
)
def test_waiting_for_an_unknown_ticket_is_refused(adapter: TierAdapter, ticket: Any) -> None:
    with pytest.raises(InvalidArgument, match="ticket is "):
        adapter.wait(ticket, 0.0)
    with pytest.raises(InvalidArgument, match="ticket is "):
        adapter.wait(ticket, PATIENCE_SECONDS)


@pytest.mark.parametrize("seconds", [None, float("nan"), float("inf"), 10**400, "1", [], True, 1j], ids=repr)
def test_an_invalid_timeout_is_refused_and_the_batch_stays(adapter: TierAdapter, seconds: Any) -> None:
    ticket = adapter.submit(False, KEYS, [bytearray(key) for key in KEYS])
    with pytest.raises(InvalidArgument, match="seconds is "):
        adapter.wait(ticket, seconds)
    result = adapter.wait(ticket, PATIENCE_SECONDS)
    assert result is not None
    assert result.good == [True] * 4


def test_a_batch_is_reported_once(adapter: TierAdapter) -> None:
    ticket = adapter.submit(False, KEYS, [bytearray(key) for key in KEYS])
    assert adapter.wait(ticket, PATIENCE_SECONDS) is not None
    with pytest.raises(InvalidArgument, match=f"ticket is {ticket}; no batch"):
        adapter.wait(ticket, PATIENCE_SECONDS)
