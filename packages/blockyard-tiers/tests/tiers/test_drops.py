"""Removing objects: damaged ones go after their load, sound ones stay, and a place that refuses is not asked again."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from blockyard_testing.patience import wait_until
from blockyard_testing.tiers_servers import free_port, missing_for_redis
from blockyard_tiers import BackendError, Cause, FileTier, PeerTier, WorkingTier

from .support import Clock, load, load_transfer, name_of, store, store_transfer, wait_for
from .test_files import path_of


class Kept(FileTier):
    """A folder whose removals hang until a test releases them, or are refused."""

    def __init__(self, folder: Path, **more: int | float | Clock) -> None:
        self.goes_on = threading.Event()
        self.is_denied = False
        self.asked: list[list[bytes]] = []
        super().__init__(folder, 2**30, reads_folder=False, **more)

    def _remove(self, names: Sequence[bytes]) -> None:
        self.asked.append(list(names))
        if self.is_denied:
            raise BackendError(Cause.DENIED, "not yours")
        assert self.goes_on.wait(60)
        super()._remove(names)


DEAD = ["peer"] if missing_for_redis() else ["peer", "redis"]


def dead(kind: str, clock: Clock) -> WorkingTier:
    if kind == "peer":
        return PeerTier(f"peer:127.0.0.1:{free_port()}", clock=clock)
    from blockyard_tiers import RedisTier

    return RedisTier(f"redis://127.0.0.1:{free_port()}", clock=clock)


def drop_until_open(tier: WorkingTier) -> int:
    """Drop one object after another until one is refused; return how many were accepted."""
    for number in range(100):
        if tier.drop([name_of(number)]) is Cause.CIRCUIT_OPEN:
            return number
        wait_until(lambda: not tier._drops and not tier._busy)
    raise AssertionError("drops are taken on and on")


@pytest.mark.parametrize("kind", DEAD)
def test_a_dead_backend_gets_three_drops(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    clock = Clock()
    with contextlib.closing(dead(kind, clock)) as tier:
        assert drop_until_open(tier) == 3
        told = [record.message for record in caplog.records]
        assert sum("were not deleted" in each for each in told) == 3
        assert sum("drops fail; the circuit breaker opens" in each for each in told) == 1
        assert tier.stats().refusals == {Cause.CIRCUIT_OPEN: 1}
        assert tier.load(load_transfer(1, [1])) is None  # which has a health of its own
        clock.now += 1
        assert drop_until_open(tier) == 1
        assert sum("were not deleted" in record.message for record in caplog.records) == 4


def test_drops_that_wait_after_failed_ones_do_not_reach_the_backend(tmp_path: Path) -> None:
    tier = Kept(tmp_path, num_threads=1, clock=Clock())
    assert store(tier, list(range(40))).is_done
    tier.is_denied = True
    with tier._changed:
        assert [tier.drop([name_of(number)]) for number in range(40)] == [None] * 40
    wait_until(lambda: not tier._drops and not tier._busy)
    assert len(tier.asked) == 3
    assert tier.close()


def test_drops_work_again_after_a_trial(tmp_path: Path) -> None:
    clock = Clock()
    tier = Kept(tmp_path, num_threads=1, clock=clock)
    assert store(tier, list(range(9))).is_done
    tier.is_denied = True
    assert drop_until_open(tier) == 3
    tier.is_denied = False
    tier.goes_on.set()
    clock.now += 1
    for number in (7, 8):
        assert tier.drop([name_of(number)]) is None
    wait_until(lambda: not any(path_of(tmp_path, number).exists() for number in (7, 8)))
    assert tier.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_hanging_drop_is_noticed_and_delays_no_transfers(tmp_path: Path, num_threads: int) -> None:
    """With one thread nothing else can run, so all waiting transfers are abandoned. With two, loads go on."""
    clock = Clock()
    tier = Kept(tmp_path, num_threads=num_threads, slow_seconds=5.0, clock=clock)
    assert store(tier, [1, 2, 3]).is_done
    assert tier.drop([name_of(1)]) is None
    wait_until(lambda: tier.asked)
    transfer = load_transfer(5, [2])
    assert tier.load(transfer) is None
    if num_threads == 2:
        assert wait_for(tier, 5).is_done
    clock.now += 6
    results = tier.take_results()
    if num_threads == 1:
        assert [each.causes for each in results] == [{0: Cause.CIRCUIT_OPEN}]
    assert tier.drop([name_of(3)]) is Cause.CIRCUIT_OPEN
    assert (tier.load(load_transfer(6, [2])) is None) == (num_threads == 2)
    tier.goes_on.set()
    wait_until(lambda: tier.drop([name_of(3)]) is None)
    assert tier.close()


def test_a_load_ends_before_its_bad_objects_are_deleted(tmp_path: Path) -> None:
    tier = Kept(tmp_path)
    assert store(tier, [1, 2]).is_done
    path_of(tmp_path, 1).write_bytes(b"?")
    assert load(tier, [1, 2]) == {1: Cause.TRUNCATED}
    assert path_of(tmp_path, 1).exists()
    tier.goes_on.set()
    wait_until(lambda: not path_of(tmp_path, 1).exists())
    assert tier.close()


def test_objects_stored_after_a_bad_load_stay(tmp_path: Path) -> None:
    """Removing a bad object does not remove the new one stored in its place."""
    tier = FileTier(tmp_path, 2**30, reads_folder=False, num_threads=4)
    for _ in range(300):
        path_of(tmp_path, 1).parent.mkdir(exist_ok=True)
        path_of(tmp_path, 1).write_bytes(b"?")
        assert load(tier, [1]) == {1: Cause.TRUNCATED}
        assert store(tier, [1]).is_done
        assert load(tier, [1]) == {}
        tier.drop([name_of(1)])
        assert store(tier, [1]).is_done
        assert load(tier, [1]) == {}
    assert tier.close()


def test_a_store_waits_only_for_the_deletion_of_its_own_names(tmp_path: Path) -> None:
    tier = Kept(tmp_path, num_threads=2)
    assert store(tier, [1]).is_done
    assert tier.drop([name_of(1)]) is None
    wait_until(lambda: tier.asked)
    assert store(tier, [2]).is_done
    assert tier.store(store_transfer(3, [1])) is None
    assert tier.store(store_transfer(4, [4])) is None
    assert load(tier, [2]) == {}
    tier.goes_on.set()
    wait_until(lambda: not tier.stats().num_waiting)
    assert sorted(each.id for each in tier.take_results()) == [3, 4]
    assert load(tier, [1, 4]) == {}
    assert tier.close()


def good(data: bytes) -> bytes:
    return data


def cut(data: bytes) -> bytes:
    return data[:-1]


def longer(data: bytes) -> bytes:
    return data + b"?"


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(("change", "stays"), [(good, True), (cut, False), (longer, False), (flipped, False)])
def test_objects_bad_at_the_recheck_are_deleted(tmp_path: Path, change: Callable[[bytes], bytes], stays: bool) -> None:
    tier = FileTier(tmp_path, 2**30)
    assert store(tier, [1, 2]).is_done
    tier.put(name_of(1), change(tier.get(name_of(1))))
    tier.remove_bad([name_of(number) for number in (1, 2, 3)])
    assert sorted(tier.names()) == sorted(name_of(number) for number in ((1, 2) if stays else (2,)))
    assert tier.close()
    tier.check()
