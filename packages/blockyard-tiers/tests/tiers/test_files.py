"""A folder as a tier: a load returns the stored bytes or a miss with its cause, whatever happened to the files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from blockyard import CacheSalt, InvalidArgument, LoRA, Span
from blockyard.wire.message import pack
from blockyard_testing.patience import wait_until
from blockyard_testing.places import child_environment
from blockyard_tiers import (
    BackendError,
    Cause,
    FileTier,
    Header,
    NameChain,
    Tier,
    Transfer,
    files,
    layout_id,
    object_names,
    open_tier,
)
from blockyard_tiers.header import PAGE_BYTES, VERSION

from .support import (
    LAYOUT,
    OTHER_LAYOUT,
    Clock,
    known,
    load,
    load_transfer,
    name_of,
    payload_of,
    size_of,
    store,
    store_transfer,
    tokens_of,
    wait_for,
)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[FileTier]:
    made = FileTier(tmp_path, 2**30)
    yield made
    assert made.close()
    made.check()


def path_of(folder: Path, number: int, layout: bytes = LAYOUT) -> Path:
    name = name_of(number, layout).hex()
    return folder / "objects" / name[:2] / name


def test_a_file_tier_is_a_tier(tier: FileTier) -> None:
    assert isinstance(tier, Tier)


def test_stored_objects_are_loaded(tier: FileTier, tmp_path: Path) -> None:
    numbers = list(range(50))
    assert store(tier, numbers).is_done
    assert load(tier, numbers) == {}
    assert known(tier, numbers) == 50
    assert list((tmp_path / "new").iterdir()) == []
    stats = tier.stats()
    assert (stats.num_stored, stats.num_loaded, stats.num_objects) == (50, 50, 50)
    assert stats.stored_bytes == stats.object_bytes == sum(map(size_of, numbers))
    assert sorted(tier.names()) == sorted(map(name_of, numbers))


def test_a_load_is_all_or_nothing(tier: FileTier) -> None:
    store(tier, [1, 2])
    assert load(tier, [1, 2, 3]) == {3: Cause.ABSENT}
    assert tier.stats().load_misses == {Cause.ABSENT: 1}


def test_another_process_finds_all_objects_in_order_of_last_use(tier: FileTier, tmp_path: Path) -> None:
    numbers = [5, 10, 15, 20]
    for number in numbers:
        store(tier, [number])
        os.utime(path_of(tmp_path, number), (number, number))
    os.utime(path_of(tmp_path, 5), (30, 30))
    second = FileTier(tmp_path, sum(map(size_of, numbers)) - 1)
    wait_until(lambda: second.stats().num_evicted and not path_of(tmp_path, 10).exists())
    assert load(second, [10]) == {10: Cause.ABSENT}
    assert load(second, [5, 15, 20]) == {}
    assert second.close()


def test_objects_of_another_engine_are_found(tier: FileTier, tmp_path: Path) -> None:
    second = FileTier(tmp_path, 2**30)
    assert known(second, [1]) == 0
    store(tier, [1, 2])
    wait_until(lambda: known(second, [1, 2]) == 2)
    assert load(second, [1, 2]) == {}
    tier.drop([name_of(1)])
    wait_until(lambda: not path_of(tmp_path, 1).exists())
    assert load(second, [1]) == {1: Cause.GONE}
    assert second.close()


def test_the_budget_evicts_the_least_recently_used(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, 3 * size_of(35))
    for number in (35, 70, 105):
        assert size_of(number) == size_of(35)
        store(tier, [number])
    load(tier, [35])
    store(tier, [140])
    assert load(tier, [70]) == {70: Cause.ABSENT}
    assert load(tier, [35, 105, 140]) == {}
    assert not path_of(tmp_path, 70).exists()
    assert tier.store(store_transfer(9, [4, 9, 14, 19])) is Cause.FULL
    assert tier.close()
    tier.check()


@pytest.mark.parametrize("policy", ["s3fifo", "arc", "lfu"])
def test_any_policy_of_the_library_evicts(tmp_path: Path, policy: str) -> None:
    tier = FileTier(tmp_path, 5000, policy)
    for number in range(200):
        store(tier, [5 * number, 5 * number + 1])
    assert 0 < tier.stats().object_bytes <= 5000
    assert len(list(tier.names())) == tier.stats().num_objects
    assert tier.close()
    tier.check()


# ---------------------------------------------------------------- damage


def test_every_flipped_bit_is_found_or_harmless(tier: FileTier, tmp_path: Path) -> None:
    """One bit flips at each byte position of a page and payload, the page's padding included."""
    store(tier, [1])
    whole = path_of(tmp_path, 1).read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path_of(tmp_path, 1).write_bytes(damaged)
        assert load(tier, [1])[1] in (Cause.DAMAGED, Cause.OTHER_VERSION), position
        wait_until(lambda: not path_of(tmp_path, 1).exists())


def test_every_truncation_is_found(tier: FileTier, tmp_path: Path) -> None:
    store(tier, [1])
    whole = path_of(tmp_path, 1).read_bytes()
    for length in [*range(len(whole)), len(whole) + 1, 2 * len(whole)]:
        path_of(tmp_path, 1).write_bytes((whole + whole)[:length])
        assert load(tier, [1])[1] in (Cause.TRUNCATED, Cause.DAMAGED), length
        wait_until(lambda: not path_of(tmp_path, 1).exists())
    path_of(tmp_path, 1).write_bytes(whole)
    assert load(tier, [1]) == {}


def test_zeros_are_not_an_object(tier: FileTier, tmp_path: Path) -> None:
    store(tier, [4])
    for size in (0, 1, PAGE_BYTES, PAGE_BYTES + size_of(4)):
        path_of(tmp_path, 4).write_bytes(bytes(size))
        assert load(tier, [4])[4] in (Cause.TRUNCATED, Cause.DAMAGED)
        wait_until(lambda: not path_of(tmp_path, 4).exists())


def test_swapped_files_are_foreign(tier: FileTier, tmp_path: Path) -> None:
    store(tier, [1, 36])
    first, second = path_of(tmp_path, 1), path_of(tmp_path, 36)
    kept = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(kept)
    assert load(tier, [1, 36]) == {1: Cause.FOREIGN, 36: Cause.FOREIGN}


def test_objects_of_another_model_have_another_layout(tier: FileTier) -> None:
    store(tier, [1], OTHER_LAYOUT)
    assert load(tier, [1]) == {1: Cause.ABSENT}
    transfer = Transfer(5, LAYOUT, [name_of(1, OTHER_LAYOUT)], [tokens_of(1)], [bytearray(size_of(1))])
    tier.load(transfer)
    assert wait_for(tier, 5).causes == {0: Cause.OTHER_LAYOUT}
    assert load(tier, [1], OTHER_LAYOUT) == {}


def test_other_tokens_and_other_lengths_are_misses(tier: FileTier) -> None:
    store(tier, [2])
    for tokens, size, cause in ((tokens_of(3), size_of(2), Cause.OTHER_TOKENS), (tokens_of(2), 7, Cause.OTHER_LENGTH)):
        tier.load(Transfer(5, LAYOUT, [name_of(2)], [tokens], [bytearray(size)]))
        assert wait_for(tier, 5).causes == {0: cause}
    assert load(tier, [2]) == {}


@pytest.mark.parametrize("part", ["", "objects"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_folder_swapped_during_use_is_a_backend_failure(tmp_path: Path, part: str, kind: str) -> None:
    """Nothing is read or written through the link, and the backend counts as failing, not its objects."""
    folder, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    tier = FileTier(folder, 2**30, clock=Clock())
    assert store(tier, [1, 2]).is_done
    (folder / part).rename(elsewhere)
    (folder / part).symlink_to(elsewhere) if kind == "link" else (folder / part).write_bytes(b"")
    before = sorted(elsewhere.rglob("*"))
    for _ in range(3):
        assert set(load(tier, [1, 2]).values()) == {Cause.UNREACHABLE}
    assert tier.load(load_transfer(2, [1])) is Cause.CIRCUIT_OPEN
    assert not store(tier, [3]).is_done
    assert tier.drop([name_of(1)]) is None
    wait_until(lambda: not tier._drops and not tier._busy)
    assert sorted(elsewhere.rglob("*")) == before
    (folder / part).unlink()
    elsewhere.rename(folder / part)
    assert tier.close()
    with contextlib.closing(FileTier(folder, 2**30)) as again:
        assert load(again, [1, 2]) == {}


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "dangling", "loop"])
def test_irregular_files_are_misses(tier: FileTier, tmp_path: Path, kind: str) -> None:
    store(tier, [1])
    path, elsewhere = path_of(tmp_path, 1), tmp_path / "elsewhere"
    path.rename(elsewhere)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": elsewhere, "dangling": tmp_path / "none", "loop": path}[kind])
    assert load(tier, [1]) == {1: Cause.DAMAGED}
    assert elsewhere.exists()


def test_pages_without_a_valid_length_are_damaged(tier: FileTier, tmp_path: Path) -> None:
    """A forged page is a miss of that object; the backend does not count as failing."""
    fields = {"name": name_of(1).hex(), "tokens": tokens_of(1).hex(), "layout": LAYOUT.hex(), "checksum": ""}
    for length in (float("inf"), float("nan"), -1, 2**80, None, [1], {}):
        page = pack("object", {**fields, "length": length, "version": VERSION}).ljust(PAGE_BYTES, b"\0")
        tier.put(name_of(1), page + payload_of(1))
        assert load(tier, [1]) == {1: Cause.DAMAGED}
        wait_until(lambda: not path_of(tmp_path, 1).exists())


def test_empty_buffers_are_skipped(tier: FileTier) -> None:
    """As many as the system takes in one call, and more."""
    names, tokens = [name_of(1)], [tokens_of(1)]
    assert tier.store(Transfer(1, LAYOUT, names, tokens, [[payload_of(1), *[b""] * 600]])) is None
    assert wait_for(tier, 1).is_done
    buffer = bytearray(size_of(1))
    assert (
        tier.load(Transfer(2, LAYOUT, names, tokens, [[bytearray(), buffer, *[bytearray() for _ in range(600)]]]))
        is None
    )
    assert wait_for(tier, 2).is_done
    assert buffer == payload_of(1)


def test_long_objects_are_read_and_verified_to_their_end(tier: FileTier, tmp_path: Path) -> None:
    """A load reads and checksums runs of 256 KiB, which begin and end in the middle of a buffer's pieces."""
    payload = random.Random(1).randbytes(2**20 + 12345)
    names, tokens = [name_of(1)], [tokens_of(1)]
    for cuts in ([], [2**18], [1, 2**18, 2**18 + 1], [2**19 + 7, 2**20], list(range(1000, 2**20, 1000))):
        ends = [*cuts, len(payload)]
        stored = [payload[first:end] for first, end in zip([0, *cuts], ends, strict=True)]
        assert tier.store(Transfer(1, LAYOUT, names, tokens, [stored])) is None
        assert wait_for(tier, 1).is_done
        loaded = [bytearray(len(piece)) for piece in stored]
        assert tier.load(Transfer(2, LAYOUT, names, tokens, [loaded])) is None
        assert wait_for(tier, 2).is_done
        assert b"".join(loaded) == payload
        for place in (0, 2**18, len(payload) - 1):
            with path_of(tmp_path, 1).open("r+b") as file:
                file.seek(PAGE_BYTES + place)
                file.write(bytes([payload[place] ^ 1]))
            assert tier.load(Transfer(3, LAYOUT, names, tokens, [loaded])) is None
            assert wait_for(tier, 3).causes == {0: Cause.DAMAGED}
            assert not any(map(any, loaded))
            wait_until(lambda: not path_of(tmp_path, 1).exists())
            assert tier.store(Transfer(4, LAYOUT, names, tokens, [payload])) is None
            assert wait_for(tier, 4).is_done
        tier.remove(names)
        tier.drop(names)
        wait_until(lambda: not path_of(tmp_path, 1).exists())


def test_a_linked_folder_is_not_followed(tmp_path: Path) -> None:
    made = FileTier(tmp_path / "a", 2**30)
    store(made, [1])
    assert made.close()
    folder = path_of(tmp_path / "a", 1).parent
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    made = FileTier(tmp_path / "a", 2**30)
    assert load(made, [1]) == {1: Cause.DAMAGED}
    assert not store(made, [1]).is_done
    assert made.close()


@pytest.mark.parametrize("name", ["objects", "new"])
def test_links_in_place_of_folders_are_refused(tier: FileTier, tmp_path: Path, name: str) -> None:
    """Files behind the link may have names like ours: none counts as an object, and none is removed."""
    others = tmp_path / "others"
    path = others / name_of(1).hex()[:2] / name_of(1).hex()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 5000)
    shutil.rmtree(tmp_path / name)
    (tmp_path / name).symlink_to(others)
    if name == "objects":
        assert known(tier, [1]) == 0
        assert load(tier, [1]) == {1: Cause.UNREACHABLE}
        with pytest.raises(BackendError):
            list(tier.names())
    assert tier.drop([name_of(1)]) is None
    assert not store(tier, [2]).is_done
    assert [each for each in others.rglob("*") if each.is_file()] == [path]
    with pytest.raises(InvalidArgument, match="cannot be used"):
        FileTier(tmp_path, 2**30)


def test_files_larger_than_any_object_evict_no_others(tmp_path: Path) -> None:
    first = FileTier(tmp_path, 2**30)
    store(first, list(range(20)))
    assert first.close()
    large = [path_of(tmp_path, 100), path_of(tmp_path, 101)]
    for path, size in zip(large, (PAGE_BYTES + 2**20, 2**40), strict=True):
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
    tier = FileTier(tmp_path, 2**19)
    wait_until(lambda: not any(path.exists() for path in large))
    assert known(tier, list(range(20))) == 20
    assert tier.close()
    tier.check()


def test_other_files_are_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "objects" / "ab"
    folder.mkdir(parents=True)
    for name in ("ab", "ab" + "0" * 31, "AB" + "0" * 30, "cd" + "0" * 30, "ab" + "g" * 30, "ab..", ".ab" + "0" * 29):
        (folder / name).write_bytes(b"x")
    tier = FileTier(tmp_path, 2**30)
    assert list(tier.names()) == []
    assert store(tier, [1]).is_done
    assert tier.stats().num_objects == 1
    assert tier.close()


# ---------------------------------------------------------------- faults


def test_a_removed_folder_is_created_again(tier: FileTier, tmp_path: Path) -> None:
    store(tier, [1, 2, 3])
    shutil.rmtree(tmp_path / "objects")
    assert load(tier, [1, 2]) == {1: Cause.GONE, 2: Cause.GONE}
    assert store(tier, [1]).is_done
    assert load(tier, [1]) == {}


def test_removed_folders_are_not_kept_open(tier: FileTier, tmp_path: Path) -> None:
    store(tier, [1])
    before = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        shutil.rmtree(tmp_path / "objects")
        store(tier, [number + 2])
        assert load(tier, [number + 2]) == {}
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_leftovers_of_killed_processes_are_removed_and_live_files_stay(tier: FileTier, tmp_path: Path) -> None:
    left = tmp_path / "new" / "left"
    left.write_bytes(b"half")
    with tier._folders() as folders:
        name, file = files._new_file(folders, [b"mine"])
        second = FileTier(tmp_path, 2**30)
        wait_until(lambda: not left.exists())
        assert (tmp_path / "new" / name).exists()
        files._end_files(folders, [(name, file)])
    assert second.close()


class Stuck(FileTier):
    """A folder that does not answer until a test releases it."""

    def __init__(self, folder: Path, **more: int | float) -> None:
        self.goes_on = threading.Event()
        super().__init__(folder, 2**30, **more)

    def _read(self, active: object, position: int) -> None:
        assert self.goes_on.wait(60)
        super()._read(active, position)  # type: ignore[arg-type]


def test_a_full_queue_refuses_and_a_hanging_backend_opens_the_breaker(tmp_path: Path) -> None:
    clock = Clock()
    tier = Stuck(tmp_path, max_transfers=4, num_threads=1, slow_seconds=0.05, clock=clock)
    store(tier, [1])
    transfers = [load_transfer(identity, [1]) for identity in range(10, 20)]
    answers = [tier.load(transfer) for transfer in transfers[:5]]
    assert answers == [None] * 4 + [Cause.QUEUE_FULL]
    wait_until(lambda: tier._running)
    clock.now += 1
    results = tier.take_results()
    assert all(set(each.causes.values()) == {Cause.CIRCUIT_OPEN} for each in results)
    assert [each.id for each in results] == [11, 12, 13]
    assert tier.stats().is_load_failing
    assert tier.load(transfers[5]) is Cause.CIRCUIT_OPEN
    assert not tier.close(0.01)
    tier.goes_on.set()
    assert wait_for(tier, 10).is_done
    assert tier.close()


def test_the_breaker_closes_after_a_trial(tmp_path: Path) -> None:
    clock = Clock()
    tier = FileTier(tmp_path, 2**30, clock=clock)
    (tmp_path / "new").rmdir()
    (tmp_path / "new").write_bytes(b"")
    for identity in range(3):
        tier.store(store_transfer(identity, [identity]))
        assert set(wait_for(tier, identity).causes.values()) == {Cause.UNREACHABLE}
    assert tier.store(store_transfer(7, [7])) is Cause.CIRCUIT_OPEN
    assert tier.load(load_transfer(8, [1])) is None
    (tmp_path / "new").unlink()
    clock.now += 1
    assert tier.store(store_transfer(9, [9])) is None
    assert wait_for(tier, 9).is_done
    assert not tier.stats().is_store_failing
    assert tier.close()


class Ill(FileTier):
    """A folder that answers no lookup for a while."""

    is_ill = True

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        if self.is_ill:
            raise BackendError(Cause.UNREACHABLE)
        return super()._sizes(names)


def test_lookups_resume_when_the_backend_recovers(tier: FileTier, tmp_path: Path) -> None:
    """It knows no object and loads none, so only its lookups show that the backend has recovered."""
    reader = Ill(tmp_path, 2**30, absent_seconds=0.01)
    store(tier, [1])
    assert [known(reader, [number]) for number in (5, 6, 7)] == [0, 0, 0]
    assert reader.stats().is_load_failing
    reader.is_ill = False
    wait_until(lambda: known(reader, [1]) == 1)
    wait_until(lambda: reader.load(load_transfer(3, [1])) is None)
    assert wait_for(reader, 3).is_done
    assert not reader.stats().is_load_failing
    assert reader.close()


def test_a_leftover_scan_that_wins_the_lock_does_no_harm(
    tier: FileTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine takes the file for a leftover: it holds the lock, and removes the file."""
    lock, others = fcntl.flock, []

    def lock_after_another(file: int, operation: int) -> None:
        if not others:
            (path,) = (tmp_path / "new").iterdir()
            others.append(os.open(path, os.O_RDONLY))
            lock(others[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        lock(file, operation)

    monkeypatch.setattr(files.fcntl, "flock", lock_after_another)
    assert store(tier, [1]).is_done
    os.close(others[0])
    assert load(tier, [1]) == {}


class Broken(FileTier):
    """A tier whose own code fails when all has been read."""

    def _read(self, active: object, position: int) -> None:
        super()._read(active, position)  # type: ignore[arg-type]
        raise RuntimeError("a fault of the tier's own")


def test_an_unexpected_error_zeroes_the_buffers(tier: FileTier, tmp_path: Path) -> None:
    store(tier, [1, 2])
    broken = Broken(tmp_path, 2**30)
    assert load(broken, [1, 2]) == {1: Cause.UNREACHABLE, 2: Cause.UNREACHABLE}
    assert broken.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_closed_tier_and_its_parent_continues(tmp_path: Path) -> None:
    """The child has no threads: a transfer that it queued would never end."""
    tier = Stuck(tmp_path, num_threads=1)
    store(tier, [1])
    assert tier.load(load_transfer(5, [1])) is tier.load(load_transfer(6, [1])) is None
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            tier.check()
            answers = [tier.store(store_transfer(5, [2])), tier.load(load_transfer(7, [1])), tier.drop([name_of(1)])]
            told = [[each.value if each else "" for each in answers], known(tier, [1]), len(tier.take_results())]
            os.write(write, json.dumps([*told, tier.close()]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert json.loads(pipe.read()) == [["closed"] * 3, 0, 0, True]
    assert os.waitpid(child, 0)[1] == 0
    tier.goes_on.set()
    assert wait_for(tier, 6).is_done
    assert tier.close()


def test_closing_fails_waiting_transfers(tmp_path: Path) -> None:
    tier = Stuck(tmp_path, num_threads=1)
    store(tier, [1])
    for identity in (5, 6):
        tier.load(load_transfer(identity, [1]))
    wait_until(lambda: tier.stats().longest_seconds)
    assert not tier.close(0.01)
    assert [each.causes for each in tier.take_results()] == [{0: Cause.CLOSED}]
    assert tier.load(load_transfer(7, [1])) is tier.drop([name_of(1)]) is Cause.CLOSED
    tier.goes_on.set()
    assert tier.close()


# ---------------------------------------------------------------- bad input


def test_bad_transfers_are_refused(tier: FileTier) -> None:
    name, buffer = name_of(1), bytearray(5)
    for names, tokens, buffers, said in (
        ([], [], [], "at least one"),
        ([name], [], [buffer], "equally many of each"),
        ([b"../../../../../a"[:15]], [name], [buffer], r"names\[0\]"),
        ([name.hex()], [name], [buffer], r"names\[0\]"),
        ([name], [b""], [buffer], r"digests\[0\]"),
        ([name, name], [name, name], [buffer, buffer], "twice"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            Transfer(1, LAYOUT, names, tokens, buffers)  # type: ignore[arg-type]
    for bad, said in ((b"", "0 bytes"), (5, "contiguous"), (memoryview(buffer)[::2], "contiguous"), ([], "0 bytes")):
        with pytest.raises(InvalidArgument, match=said):
            tier.store(Transfer(1, LAYOUT, [name], [name], [bad]))
    with pytest.raises(InvalidArgument, match="read-only"):
        tier.load(Transfer(1, LAYOUT, [name], [name], [b"abc"]))
    with pytest.raises(InvalidArgument, match="16 bytes"):
        tier.longest_prefix([b"../../etc/passwd/"])
    with pytest.raises(InvalidArgument, match="16 bytes"):
        tier.drop(["0" * 16])  # type: ignore[list-item]
    assert tier.stats().num_waiting == 0


def test_paths_that_are_not_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="cannot be used"):
        FileTier(tmp_path / "file", 1)
    with pytest.raises(InvalidArgument, match="max_bytes"):
        FileTier(tmp_path, 0)
    with pytest.raises(InvalidArgument, match="io is not an option of a file tier"):
        open_tier("--tier", f"file:{tmp_path},io=fast")


def test_extreme_file_times_only_change_the_order(tier: FileTier, tmp_path: Path) -> None:
    """Times of last use before 1677 or after 2262 are valid."""
    numbers = [1, 2, 4, 6]
    store(tier, numbers)
    for number, seconds in zip(numbers, (2**34, -(2**34), 0, 2 * 10**9), strict=True):
        os.utime(path_of(tmp_path, number), (seconds, seconds))
    room = sum(map(size_of, [1, 6]))
    with contextlib.closing(FileTier(tmp_path, room)) as other:
        wait_until(lambda: len(list(other.names())) == 2)
        assert load(other, [1, 6]) == {}
        assert set(load(other, [2, 4])) == {2, 4}
        other.check()


def test_names_that_are_not_unicode_are_escaped(tmp_path: Path) -> None:
    """A folder's name may be any bytes, but metrics and pages are UTF-8."""
    with contextlib.closing(FileTier(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), 2**20)) as tier:
        assert tier.name == f"file:{tmp_path}/\\udcff"
        assert store(tier, [1]).is_done


def test_a_lookup_that_fails_unexpectedly_is_answered(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[int]:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(tier, "_sizes", fail)
    wait_until(lambda: tier.longest_prefix([name_of(1)]).is_final)


# ---------------------------------------------------------------- names


def test_names_depend_on_layout_tokens_keys_and_position() -> None:
    prompt = list(range(40))
    base, digests = object_names(LAYOUT, prompt, 16)
    assert len(base) == len(digests) == 2
    others = [
        object_names(OTHER_LAYOUT, prompt, 16)[0],
        object_names(LAYOUT, prompt, 16, (CacheSalt("a"),))[0],
        object_names(LAYOUT, prompt, 16, (LoRA("a"),))[0],
        object_names(LAYOUT, [1, *prompt[1:]], 16)[0],
        object_names(LAYOUT, prompt[16:] + prompt[:16], 16)[0],
    ]
    names = [name for each in [base, *others] for name in each]
    assert len(set(names)) == len(names) == 12
    assert object_names(LAYOUT, prompt, 16) == (base, digests)
    assert object_names(LAYOUT, prompt[:16] + prompt[:16], 16)[1] == [digests[0]] * 2


def test_a_growing_chain_has_the_names_of_the_whole_prompt() -> None:
    prompt, keys = list(range(80)), (LoRA("a"), Span("cat", 20, 30))
    whole = object_names(LAYOUT, prompt, 16, keys)
    assert object_names(LAYOUT, np.array(prompt), 16, keys) == whole
    chain = NameChain(LAYOUT, 16, keys)
    for stop in (1, 1, 3):
        chain.extend(prompt, stop)
    other = chain.copy()
    other.extend(prompt)
    assert (other.names, other.digests) == whole
    assert (chain.names, chain.digests) == (whole[0][:3], whole[1][:3])


@pytest.mark.parametrize("tokens", [[0.5], [-1], [2**31], ["a"], np.array([2**40]), np.zeros((2, 2), int), np.ones(2)])
def test_invalid_tokens_are_refused(tokens: object) -> None:
    with pytest.raises(InvalidArgument, match="tokens must be integers from 0"):
        object_names(LAYOUT, tokens, 1)


def test_a_layout_depends_on_all_of_its_fields() -> None:
    fields = {"model": "m", "dtype": "f16", "rank": 0}
    assert layout_id(**fields) == layout_id(**dict(reversed(fields.items())))
    assert len({layout_id(**{**fields, "rank": rank}) for rank in range(4)}) == 4
    with pytest.raises(InvalidArgument, match="no fields"):
        layout_id()
    with pytest.raises(InvalidArgument, match="must be plain"):
        layout_id(model=object())


def test_a_header_survives_its_page() -> None:
    header = Header(name_of(1), tokens_of(1), LAYOUT, 5, bytes(16))
    assert Header.from_page(header.to_page()) == header
    assert len(header.to_page()) == PAGE_BYTES
    assert len(payload_of(1)) == size_of(1)


def test_concurrent_scans_count_each_object_once(tier: FileTier, tmp_path: Path) -> None:
    numbers = list(range(300))
    store(tier, numbers)
    (tmp_path / "objects" / "00").mkdir(exist_ok=True)
    for name in (name_of(number).hex() for number in numbers):  # all in one folder, so that listings meet
        os.rename(tmp_path / "objects" / name[:2] / name, tmp_path / "objects" / "00" / f"00{name[2:]}")
    wanted = sorted(b"\0" + name_of(number)[1:] for number in numbers)
    lists: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda: lists.extend(list(tier.names()) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(each) for each in lists] == [wanted] * 80


# ---------------------------------------------------------------- no room, no rights: in a process of their own

STORES = """
import sys
from pathlib import Path
from blockyard_tiers import FileTier
from tests.tiers.support import load, store
folder = Path(sys.argv[1])
tier = FileTier(folder, 2**30)
assert store(tier, [1]).is_done
{fault}
result = store(tier, [2, 4])
print(result.causes[0].name, list((folder / "new").iterdir()))
assert load(tier, [1]) == {{}}
assert set(load(tier, [2, 4])) == {{2, 4}}
{mended}
assert store(tier, [2, 4]).is_done
assert load(tier, [1, 2, 4]) == {{}}
assert tier.close()
"""
LARGEST = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, resource.RLIM_INFINITY))"
NOBODY = "import os; os.chmod(folder / 'new', 0o{mode}); os.getuid() or os.seteuid({user})"


def said_by(folder: Path, fault: str, mended: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", STORES.format(fault=fault, mended=mended), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=None, env=child_environment())
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_a_file_size_limit_is_full(tmp_path: Path) -> None:
    said = said_by(tmp_path, LARGEST.format(size=10_000), LARGEST.format(size=2**30))
    assert said == "FULL []"


def test_a_folder_that_became_unreadable_is_denied(tmp_path: Path) -> None:
    """Root may read everything, so the test runs as the user nobody."""
    os.chmod(tmp_path, 0o755)
    reachable = all(os.stat(path).st_mode & 0o5 == 0o5 for path in tmp_path.parents)
    if os.getuid() == 0 and not reachable:
        elsewhere = tempfile.mkdtemp(dir="/var/" + "tmp")
        os.chmod(elsewhere, 0o755)
        tmp_path = Path(elsewhere)
    try:
        said = said_by(
            tmp_path,
            NOBODY.format(mode=555, user=65534),
            "os.seteuid(os.getuid()); os.chmod(folder / 'new', 0o755)",
        )
    finally:
        shutil.rmtree(tmp_path)
    assert said == "DENIED []"


def test_a_full_disk_is_full(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        fault = "(folder / 'filler').write_bytes(bytes(48 * 1024))"
        assert said_by(tmp_path, fault, "(folder / 'filler').unlink()") == "FULL []"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
