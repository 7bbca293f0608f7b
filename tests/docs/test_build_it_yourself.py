"""The grader of docs/build-it-yourself.md passes a right pool, and finds what is wrong with each wrong one."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockyard_testing.places import ROOT

FOLDER = ROOT / "examples" / "build_it_yourself"
GRADER = runpy.run_path(str(FOLDER / "grade.py"))
SOLUTION = runpy.run_path(str(FOLDER / "solution.py"))
PAGE = (ROOT / "docs" / "build-it-yourself.md").read_text()
Queue: Any = SOLUTION["FreeQueue"]
Pool: Any = SOLUTION["BlockPool"]


def failed(queue: Any, pool: Any) -> set[str]:
    found: dict[str, str] = GRADER["grade"](queue, pool)
    return {name for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("given", [[], ["nosuch.py"]])
def test_without_a_file_the_grader_says_what_it_takes(given: list[str]) -> None:
    ran = subprocess.run([sys.executable, FOLDER / "grade.py", *given], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "FILE.py, a file that has your FreeQueue" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_solution_passes_every_check() -> None:
    assert failed(Queue, Pool) == set()


def test_an_empty_file_fails_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "my_pool.py"
    mine.write_text("")
    assert GRADER["main"](str(mine)) == 1
    checks = [check.__name__ for check in GRADER["CHECKS"]]
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("FAILED")] == checks
    assert printed.endswith(f"0 of {len(checks)} passed\n")
    assert printed.count("NameError: your file has no FreeQueue yet") == 3
    assert printed.count("NameError: your file has no BlockPool yet") == len(checks) - 3


def test_the_solution_passes_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert GRADER["main"](str(FOLDER / "solution.py")) == 0
    assert "FAILED" not in capsys.readouterr().out


# ---------------------------------------------------------------- wrong ones


class OneWayQueue(Queue):
    """Forgets the backward link, so the tail is lost when the last block leaves."""

    def remove(self, block: int) -> None:
        self.next[self.prev[block]] = self.next[block]
        self.num_free_blocks -= 1


class EndlessQueue(Queue):
    """Its last block links to itself."""

    def append(self, block: int) -> None:
        super().append(block)
        self.next[block] = block


class StackQueue(Queue):
    """Appends at the front: the block freed last is evicted first."""

    def append(self, block: int) -> None:
        first = self.next[0]
        self.prev[first], self.next[block] = block, first
        self.prev[block], self.next[0] = 0, block
        self.num_free_blocks += 1


class MiscountingQueue(Queue):
    """Does not count what leaves the middle."""

    def remove(self, block: int) -> None:
        before, after = self.prev[block], self.next[block]
        self.next[before], self.prev[after] = after, before


class FreesTwice(Pool):
    """Takes a double free without a word."""

    def free_blocks(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.counts[block] -= 1
            if self.counts[block] <= 0:
                self.counts[block] = 0
                self.queue.append(block)


class FreesFromTheHead(Pool):
    """Evicts a prefix before what stands behind it."""

    def free_blocks(self, blocks: list[int]) -> None:
        super().free_blocks(blocks[::-1])


class TakesWhatThereIs(Pool):
    """Takes some blocks before it finds that there are too few."""

    def get_new_blocks(self, n: int) -> list[int]:
        return [block for _ in range(n) for block in super(TakesWhatThereIs, self).get_new_blocks(1)]


class NeverEvicts(Pool):
    """Hands out a block that the index still has."""

    def evict(self, block: int) -> None:
        return


class HitsUnheld(Pool):
    """Returns a hit before it counts it."""

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.counts[block] += self.counts[block] > 0


class TouchesQueued(Pool):
    """Revives a block and leaves it in the free queue."""

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.counts[block] += 1


class TrustsHashes(Pool):
    """Finds a block by the hash of its tokens, and compares nothing."""

    def contents(self, tokens: list[int]) -> list[Any]:
        return [hash(content) for content in super().contents(tokens)]


class ForgetsParents(Pool):
    """Hashes the tokens of a block alone."""

    def contents(self, tokens: list[int]) -> list[Any]:
        return [tokens for _, tokens in super().contents(tokens)]


class CachesPartialBlocks(Pool):
    """Indexes a block that is partly filled."""

    def contents(self, tokens: list[int]) -> list[Any]:
        padding = [0] * (-len(tokens) % self.block_size)
        return super().contents([*tokens, *padding])  # type: ignore[no-any-return]

    def get_cached_blocks(self, tokens: list[int]) -> list[int]:
        hit = super().get_cached_blocks(tokens)
        return [*hit, *([3] if len(tokens) > 8 and hit else [])]


class KeepsOneOfEqual(Pool):
    """Knows one block for each content: evicting one of two equal blocks loses both."""

    def evict(self, block: int) -> None:
        content = self.content.pop(block, None)
        for each in self.blocks_of.pop(content, {}):
            self.content.pop(each, None)


WRONG: dict[str, tuple[Any, Any, str]] = {
    "a queue with links one way": (OneWayQueue, Pool, "check_queue_removes_from_the_middle"),
    "a queue that goes round in a circle": (EndlessQueue, Pool, "check_queue_removes_from_the_middle"),
    "a stack": (StackQueue, Pool, "check_queue_removes_from_the_middle"),
    "a queue that miscounts": (MiscountingQueue, Pool, "check_queue_starts_in_order"),
    "double frees": (Queue, FreesTwice, "check_pool_refuses_a_double_free"),
    "freed from the head": (Queue, FreesFromTheHead, "check_pool_evicts_suffixes_first"),
    "half an allocation": (Queue, TakesWhatThereIs, "check_pool_refuses_whole_calls"),
    "no eviction": (Queue, NeverEvicts, "check_pool_follows_counts"),
    "a hit that is not held": (Queue, HitsUnheld, "check_pool_revives"),
    "a revived block left in the queue": (Queue, TouchesQueued, "check_pool_revives"),
    "hashes instead of tokens": (Queue, TrustsHashes, "check_pool_compares_tokens"),
    "hashes without the parent": (Queue, ForgetsParents, "check_pool_hits_whole_prefixes"),
    "partial blocks": (Queue, CachesPartialBlocks, "check_pool_hits_full_blocks"),
    "one block a content": (Queue, KeepsOneOfEqual, "check_pool_keeps_equal_blocks_apart"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_one_fails(what: str) -> None:
    queue, pool, check = WRONG[what]
    found = failed(queue, pool)
    assert check in found
    part = "check_queue" if pool is Pool else "check_pool"
    assert all(name.startswith(part) for name in found)


def test_every_check_but_the_plainest_is_needed() -> None:
    """Each check is named by a wrong one above, or on the way to one that is."""
    named = {check for _, _, check in WRONG.values()}
    assert {check.__name__ for check in GRADER["CHECKS"]} - named == {"check_queue_follows_a_list", "check_pool_counts"}


# ---------------------------------------------------------------- the page


def test_the_page_names_every_check_in_order() -> None:
    checks: list[Callable[..., None]] = GRADER["CHECKS"]
    places = [PAGE.index(f"`{check.__name__}`") for check in checks]
    assert places == sorted(places)


def test_the_page_names_every_call_of_the_solution() -> None:
    calls = {"popleft", "popleft_n", "remove", "append", "get_all_free_blocks", "num_free_blocks"}
    calls |= {"get_new_blocks", "touch", "free_blocks", "cache_full_blocks", "get_cached_blocks", "free_block_ids"}
    assert all(f"`{call}" in PAGE for call in calls)
    assert all(hasattr(Queue(4), call) or hasattr(Pool(4, 4), call) for call in calls)


def test_the_grader_says_how_to_run_it() -> None:
    assert "python examples/build_it_yourself/grade.py my_pool.py" in PAGE
    assert "blockyard" not in (FOLDER / "grade.py").read_text().replace("examples/build_it_yourself", "")
