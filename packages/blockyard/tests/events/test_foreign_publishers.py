"""Publishers as vLLM and SGLang have them: a mirror is LIVE when it has heard all, and says so when it cannot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from blockyard.events import Mirror, Trust

WORKER = "worker"


def message(number: int, *events: Any, ts: float | None = None, epoch: int | None = None) -> tuple[int, bytes]:
    life = [] if epoch is None else [epoch]
    return number, msgspec.msgpack.encode([float(number) if ts is None else ts, list(events), 0, *life])


def stored(name: int, *tokens: int, parent: int | None = None) -> dict[str, Any]:
    fields = {"type": "BlockStored", "block_hashes": [name], "parent_block_hash": parent, "token_ids": list(tokens)}
    return fields | {"block_size": len(tokens), "lora_id": None, "medium": "GPU", "lora_name": None}


def removed(name: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"}


def replay(mirror: Mirror, *messages: tuple[int, bytes]) -> None:
    for each in messages:
        mirror.receive_replayed(WORKER, *each)
    mirror.end_replay(WORKER)


def known(mirror: Mirror, *tokens: int) -> int:
    found = mirror.match(list(tokens)).get(WORKER)
    return 0 if found is None else found.num_tokens


def test_a_replay_from_number_0_is_complete_without_a_sign_that_all_is_cleared() -> None:
    mirror = Mirror(hash_seed=1)
    assert mirror.replay_from(WORKER) == 0
    replay(mirror, message(0, stored(5, 1, 2)), message(1, stored(6, 3, 4, parent=5)))
    assert mirror.trust(WORKER) is Trust.LIVE
    assert known(mirror, 1, 2, 3, 4) == 4
    mirror.receive_live(WORKER, *message(2, removed(6)))
    assert known(mirror, 1, 2, 3, 4) == 2


def test_a_publisher_that_starts_again_has_nothing_of_its_earlier_life() -> None:
    mirror = Mirror(hash_seed=1)
    replay(mirror, message(0, stored(5, 1, 2)), message(1))
    again = message(0, stored(7, 8, 9), ts=100.0)
    mirror.receive_live(WORKER, *again)
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    replay(mirror, again)
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


def test_live_messages_of_an_earlier_life_do_not_count_when_it_starts_again() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_live(WORKER, *message(8, stored(5, 1, 2)))
    replay(mirror, message(0, stored(7, 8, 9), ts=100.0))
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


def test_nor_where_the_clock_went_back() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_live(WORKER, *message(1, stored(5, 1, 2), ts=100.0))
    again = message(0, stored(7, 8, 9), ts=1.0)
    mirror.receive_live(WORKER, *again)
    replay(mirror, again)
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


UNREADABLE = b"\xc1"
CLEARED = {"type": "AllBlocksCleared"}


@pytest.mark.parametrize("begins", [(message(0), message(1)), (message(0), message(1, CLEARED))])
def test_a_message_that_could_not_be_read_is_missing_until_a_replay_comes_to_it(begins: Any) -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_replayed(WORKER, *begins[0])
    mirror.receive_live(WORKER, 2, UNREADABLE)
    replay(mirror, *begins[1:])
    assert mirror.trust(WORKER) is not Trust.LIVE
    replay(mirror, message(0), message(1))
    assert mirror.trust(WORKER) is not Trust.LIVE
    replay(mirror, message(3, CLEARED, stored(5, 1, 2)))
    assert mirror.trust(WORKER) is Trust.LIVE
    assert known(mirror, 1, 2) == 2


def test_a_publisher_that_starts_again_sends_no_message_that_could_not_be_read_in_its_earlier_life() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_live(WORKER, 5000, UNREADABLE)
    mirror.receive_live(WORKER, *message(0, stored(5, 1, 2)))
    replay(mirror, message(0, stored(5, 1, 2)))
    assert mirror.trust(WORKER) is Trust.LIVE
    assert known(mirror, 1, 2) == 2


def test_a_message_from_after_the_clock_went_back_is_waited_for() -> None:
    mirror = Mirror(hash_seed=1)
    latest = message(6, stored(5, 1, 2), ts=3.0)
    mirror.receive_live(WORKER, *latest)
    replay(mirror, message(5, CLEARED))
    assert mirror.trust(WORKER) is not Trust.LIVE
    replay(mirror, message(5, CLEARED), latest)
    assert mirror.trust(WORKER) is Trust.LIVE
    assert known(mirror, 1, 2) == 2


@pytest.mark.parametrize("epochs", [(None, None), (7, 8)])
def test_replay_from_before_the_restart_is_not_trusted(epochs: tuple[int | None, int | None]) -> None:
    """It was on its way when the publisher started again."""
    mirror = Mirror(hash_seed=1)
    earlier, later = epochs
    again = message(0, CLEARED, stored(9, 8, 9), ts=100.0, epoch=later)
    mirror.receive_live(WORKER, *again)
    first = stored(5, 1, 2)
    replay(mirror, message(0, *([CLEARED] if earlier else []), first, epoch=earlier), message(1, epoch=earlier))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    replay(mirror, again)
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


@pytest.mark.parametrize("epochs", [(None, None), (7, 8)])
def test_nor_is_a_snapshot_of_it(epochs: tuple[int | None, int | None]) -> None:
    mirror = Mirror(hash_seed=1)
    earlier, later = epochs
    again = message(0, CLEARED, stored(9, 8, 9), ts=100.0, epoch=later)
    mirror.receive_live(WORKER, *again)
    replay(mirror, message(30, CLEARED, stored(5, 1, 2), epoch=earlier), message(31, epoch=earlier))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    replay(mirror, again)
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


def test_live_message_stays_missing_if_the_replay_has_an_unreadable_one() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_live(WORKER, *message(4, stored(5, 1, 2)))
    replay(mirror, message(0), (1, UNREADABLE), message(2, CLEARED))
    assert mirror.trust(WORKER) is not Trust.LIVE
    replay(mirror, message(2, CLEARED), message(3))
    assert mirror.trust(WORKER) is Trust.LIVE
    assert known(mirror, 1, 2) == 2


@pytest.mark.parametrize("begin", [(message(0, ts=100.0), message(1, ts=1.0)), (message(1, CLEARED, ts=100.0),)])
def test_message_after_a_gap_stays_missing_if_the_clock_went_back(begin: Any) -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_live(WORKER, *message(3, stored(5, 1, 2), ts=3.0))
    replay(mirror, *begin)
    assert mirror.trust(WORKER) is not Trust.LIVE
    whole = (*begin, message(2, ts=2.0), message(3, stored(5, 1, 2), ts=3.0))
    while (start := mirror.replay_from(WORKER)) is not None:
        replay(mirror, *(each for each in whole if each[0] >= start))
    assert known(mirror, 1, 2) == 2


def test_the_rest_of_a_replay_does_not_count_when_the_publisher_starts_again_meanwhile() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.receive_replayed(WORKER, *message(0))
    again = message(0, stored(9, 8, 9), ts=100.0)
    mirror.receive_live(WORKER, *again)
    replay(mirror, message(1), message(2, CLEARED, stored(5, 1, 2)))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    replay(mirror, again)
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


def test_nor_when_a_live_message_cannot_be_read_meanwhile() -> None:
    """It may be of another life than the answer that is on its way."""
    mirror = Mirror(hash_seed=1)
    mirror.begin_replay(WORKER)
    mirror.receive_replayed(WORKER, *message(0))
    mirror.receive_live(WORKER, 1, UNREADABLE)
    assert mirror.is_replay_void(WORKER)
    replay(mirror, message(1), message(2, CLEARED, stored(5, 1, 2)))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    mirror.begin_replay(WORKER)
    assert not mirror.is_replay_void(WORKER)
    replay(mirror, message(0, ts=100.0), message(1, stored(9, 8, 9), ts=101.0))
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


def test_nor_when_one_comes_before_its_first_message() -> None:
    mirror = Mirror(hash_seed=1)
    mirror.begin_replay(WORKER)
    mirror.receive_live(WORKER, 1, UNREADABLE)
    replay(mirror, message(0, stored(5, 1, 2)), message(1))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    replay(mirror, message(0, stored(9, 8, 9), ts=100.0), message(1, ts=101.0))
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


def test_live_messages_judge_a_replay_after_an_unreadable_one() -> None:
    mirror = Mirror(hash_seed=1)
    again = (message(0, ts=99.0), message(1, ts=100.0), message(2, ts=101.0), message(3, stored(9, 8, 9), ts=102.0))
    mirror.receive_live(WORKER, *again[3])
    replay(mirror, message(0), (1, UNREADABLE), message(2, CLEARED, stored(5, 1, 2)), message(3), message(4))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    replay(mirror, *again)
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 8, 9)) == (0, 2)


@pytest.mark.parametrize("first", [1, 4, 9000])
def test_a_replay_that_begins_late_is_trusted_by_nobody(first: int) -> None:
    mirror = Mirror(hash_seed=1)
    replay(mirror, message(first, stored(5, 1, 2)), message(first + 1))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    assert mirror.replay_from(WORKER) == 0
    assert known(mirror, 1, 2) == 0


def test_a_reset_of_the_cache_makes_a_late_one_whole() -> None:
    mirror = Mirror(hash_seed=1)
    cleared = message(70, stored(5, 1, 2), {"type": "AllBlocksCleared"}, stored(6, 3, 4))
    replay(mirror, message(69, stored(4, 7, 7)), cleared)
    assert mirror.trust(WORKER) is Trust.LIVE
    assert (known(mirror, 1, 2), known(mirror, 3, 4), known(mirror, 7, 7)) == (0, 2, 0)


@pytest.mark.parametrize("kept", [(), (6, 7, 8), (7,)])
def test_missing_messages_that_are_not_kept_leave_no_trust(kept: tuple[int, ...]) -> None:
    """A removal under number 5 was lost, and the ring begins behind it; or the publisher gave the replay up."""
    mirror = Mirror(hash_seed=1)
    replay(mirror, message(0, stored(5, 1, 2)), message(1), message(2), message(3), message(4))
    mirror.receive_live(WORKER, *message(8))
    assert mirror.trust(WORKER) is Trust.CATCHING_UP
    assert mirror.replay_from(WORKER) == 5
    replay(mirror, *map(message, kept))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED
    assert mirror.replay_from(WORKER) == 0


def test_live_messages_dropped_for_space_stay_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live messages that wait for a replay are dropped when they are too many; the replay begins behind the gap."""
    monkeypatch.setattr("blockyard.events.following.stream.MOST_AHEAD", 1)
    mirror = Mirror(hash_seed=1)
    replay(mirror, message(0, stored(5, 1, 2)))
    mirror.receive_live(WORKER, *message(3))
    mirror.receive_live(WORKER, *message(2))
    replay(mirror, message(2), message(3))
    assert mirror.trust(WORKER) is Trust.UNTRUSTED


def test_a_part_of_what_is_missing_is_asked_for_again() -> None:
    mirror = Mirror(hash_seed=1)
    replay(mirror, message(0, stored(5, 1, 2)))
    mirror.receive_live(WORKER, *message(4))
    replay(mirror, message(1), message(2, removed(5)))
    assert mirror.trust(WORKER) is Trust.CATCHING_UP
    assert mirror.replay_from(WORKER) == 3
    replay(mirror, message(3))
    assert mirror.trust(WORKER) is Trust.LIVE
    assert known(mirror, 1, 2) == 0
