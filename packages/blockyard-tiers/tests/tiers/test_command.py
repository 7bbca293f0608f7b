"""`blockyard tier` lists, verifies, counts, drops and copies exactly the objects in the place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from blockyard.cli.main import main
from blockyard_testing.tiers_servers import missing_for_redis, redis_server
from blockyard_tiers import FileTier

from .support import LAYOUT, OTHER_LAYOUT, load, name_of, size_of, store
from .test_files import path_of


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with three objects of one layout and two of another, one of which is cut short."""
    tier = FileTier(tmp_path / "a", 2**30)
    store(tier, [1, 2, 3])
    store(tier, [4, 5], OTHER_LAYOUT)
    assert tier.close()
    path = path_of(tmp_path / "a", 4, OTHER_LAYOUT)
    path.write_bytes(path.read_bytes()[:-1])
    return str(tmp_path / "a")


def test_list_and_stats_report_every_object(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "list", f"file:{folder}"]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    layouts = [*[(number, LAYOUT) for number in (1, 2, 3)], (4, OTHER_LAYOUT), (5, OTHER_LAYOUT)]
    rows = [[name_of(number, each).hex(), each.hex(), str(size_of(number))] for number, each in layouts]
    assert [line.split() for line in lines] == sorted(rows)
    assert main(["tier", "list", f"file:{folder}", "--layout", OTHER_LAYOUT.hex()]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["tier", "stats", f"file:{folder},bytes=1GiB"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert f"{LAYOUT.hex()}           3 objects  {size_of(1) + size_of(2) + size_of(3):>15} bytes" in told
    assert told[-1].split() == ["all", "5", "objects", str(sum(map(size_of, range(1, 6)))), "bytes"]


def test_verify_reports_and_deletes_bad_objects(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad = f"{name_of(4, OTHER_LAYOUT).hex()}  truncated"
    assert main(["tier", "verify", f"file:{folder}"]) == 1
    assert capsys.readouterr().out.splitlines() == [bad, "4 objects are valid, 1 are bad"]
    assert main(["tier", "verify", f"file:{folder}", "--drop"]) == 1
    assert main(["tier", "verify", f"file:{folder}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 objects are valid, 0 are bad"


def test_verify_opens_each_folder_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    open_, at = os.open, sorted({name_of(*each).hex()[:2] for each in ((1,), (2,), (3,), (4, OTHER_LAYOUT))})

    def counted(path: str, flags: int, *mode: int, **more: int) -> int:
        if threading.current_thread() is threading.main_thread() and flags & os.O_DIRECTORY:
            opened.append(path)
        return open_(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", counted)
    assert main(["tier", "verify", f"file:{folder}"]) == 1
    assert [opened.count(key) for key in at] == [1] * len(at)


def test_a_missing_folder_is_refused_and_not_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("list", "stats", "verify"):
        assert main(["tier", action, f"file:{tmp_path / 'nosuch'},bytes=1GiB"]) == 2
        assert "there is no such folder" in capsys.readouterr().err
    assert not (tmp_path / "nosuch").exists()


def test_drop_deletes_the_named_objects(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "drop", f"file:{folder}", name_of(1).hex()]) == 0
    assert main(["tier", "drop", f"file:{folder}", "--layout", OTHER_LAYOUT.hex()]) == 0
    assert capsys.readouterr().out.splitlines() == ["1 objects dropped", "2 objects dropped"]
    assert main(["tier", "drop", f"file:{folder}", "--all"]) == 0
    assert capsys.readouterr().out == "2 objects dropped\n"


def test_copy_skips_bad_objects(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "copy", f"file:{folder}", f"file:{tmp_path / 'b'}"]) == 1
    assert capsys.readouterr().out == "4 objects copied, 1 bad ones skipped\n"
    tier = FileTier(tmp_path / "b", 2**30)
    assert load(tier, [1, 2, 3]) == {}
    assert load(tier, [5], OTHER_LAYOUT) == {}
    assert tier.close()


@pytest.mark.skipif(bool(missing_for_redis()), reason=missing_for_redis())
def test_copy_writes_all_objects_to_redis(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with redis_server(tmp_path) as server:
        assert main(["tier", "copy", f"file:{folder}", server.url]) == 1
        assert main(["tier", "stats", server.url]) == 0
        assert capsys.readouterr().out.splitlines()[-1].split()[1] == "4"
    assert main(["tier", "stats", server.url]) == 2
    assert "unreachable" in capsys.readouterr().err


def test_tools_with_an_engines_options_delete_nothing(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert main(["tier", "stats", f"file:{folder},bytes=1KiB"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[1] == "5"


def test_a_file_larger_than_any_object_is_not_read(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileTier, "_scan_all", lambda _: None)  # that removes it, sooner or later
    os.truncate(path_of(Path(folder), 1), 2**40)
    assert main(["tier", "verify", f"file:{folder}"]) == 1
    assert f"{name_of(1).hex()}  truncated" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "ftp://x"], "must begin with"),
        (["list", "file:"], "a folder must follow"),
        (["list", "file:FOLDER,size=5GiB"], "size is not an option"),
        (["list", "file:FOLDER,bytes=many"], "bytes"),
        (["list", "file:FOLDER", "more"], "takes 0"),
        (["copy", "file:FOLDER"], "takes 1"),
        (["drop", "file:FOLDER"], "takes either names"),
        (["drop", "file:FOLDER", "--all", "--layout", "0" * 32], "takes either names"),
        (["drop", "file:FOLDER", "../../etc/passwd"], "32 lower-case hex digits"),
        (["list", "file:FOLDER", "--layout", "AB" * 16], "32 lower-case hex digits"),
    ],
)
def test_bad_command_lines_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["tier", *[word.replace("FOLDER", str(tmp_path)) for word in words]]) == 2
    assert said in capsys.readouterr().err
