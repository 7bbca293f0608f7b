"""One sampler for all who watch: at a bounded rate, at a bounded share of the cache's thread,while there is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .desk import Source
from .details import Texts
from .frames import Frame, event
from .prompts import Branch, PromptLog, branches_of, look_up, prompt_tree
from .snapshot import Snapshot, take_snapshot

#: Seconds between two frames at least, and the share of the time that copying may take in the cache's thread.
MIN_SECONDS = 0.1
MAX_SHARE = 0.005
#: Frames may cost this share of a processor besides.
_MAX_FRAME_SHARE = 0.1
#: Seconds after which a reader hears something, and is asked whether it is still there.
BEAT_SECONDS = 1.0
_TREE_SECONDS = 3.0
_POINT_SECONDS = 2.0
_NUM_POINTS = 300
_LABEL_TOKENS = 48


class Feed:
    """Frames of a cache for any number of readers. Lives in one event loop.

    source: the cache. prompts: what the tree is made of. texts: token ids to text, None where nobody may see it.
    is_ending: whether the host goes down and streams should end, asked at each event.
    A reader that does not keep up gets the latest frame, whole: nothing waits for it, and nothing piles up.
    """

    def __init__(
        self,
        source: Source,
        prompts: PromptLog,
        texts: Texts | None = None,
        shows_text: bool = True,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source = source
        self._is_ending = is_ending
        self._prompts = prompts
        self._texts = texts
        self._shows_text = shows_text
        self._num_readers = 0
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._snapshot: Snapshot | None = None
        self._trees_noted = -1
        self._tree_at = 0.0
        self._points: deque[dict[str, Any]] = deque(maxlen=_NUM_POINTS)
        self._is_over = False
        self.latest: Frame | None = None
        self._change = b""
        self.branches: list[Branch] = []
        self._tree = b""
        self._num_frames = 0

    @property
    def num_readers(self) -> int:
        """Streams that are open."""
        return self._num_readers

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """Of the latest frame, without the null block."""
        return np.empty(0, np.int32) if self._snapshot is None else self._snapshot.pool.ref_counts[1:]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one reader, until the source has ended; at least one each `BEAT_SECONDS`."""
        self._begin()
        known: Frame | None = None
        tree = b""
        try:
            yield event("past", list(self._points))
            while not (self._is_over or self._is_ending()):
                sent = self._for_reader(known, tree)
                known, tree = self.latest, self._tree
                yield sent or b": still here\n\n"
                if known is self.latest and tree is self._tree:
                    await self._wait()
        finally:
            self._end()

    def _for_reader(self, known: Frame | None, tree: bytes) -> bytes:
        latest = self.latest
        sent = b""
        if latest is not None and latest is not known:
            is_next = known is not None and known.number == latest.number - 1
            sent = self._change if is_next and self._change else latest.whole()
        return sent + (self._tree if self._tree is not tree else b"")

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_SECONDS):
                await self._news.wait()

    def _begin(self) -> None:
        self._num_readers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._sample())

    def _end(self) -> None:
        self._num_readers -= 1
        if self._num_readers == 0 and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _sample(self) -> None:
        """Take one snapshot after another, each later than the one before by what bounds the rate and the share."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                started = clock()
                snapshot = await asyncio.wrap_future(self._source.ask(take_snapshot))
                taken = clock()
                await self._take(snapshot)
                made = clock() - taken
                if taken - self._tree_at >= _TREE_SECONDS:
                    self._tree_at = taken
                    await self._make_tree(snapshot.block_size)
                await asyncio.sleep(max(started + seconds_between(snapshot.seconds, made) - clock(), 0.0))
        except Exception:  # the cache's thread has ended, and said so to whom it serves
            self._is_over = True
            self._tell()

    async def _take(self, snapshot: Snapshot) -> None:
        frame = await asyncio.to_thread(Frame.of, snapshot, self._num_frames + 1)
        if frame.is_like(self.latest):
            return
        before = self.latest
        self._change = b"" if before is None else await asyncio.to_thread(frame.since, before)
        self._num_frames += 1
        self.latest, self._snapshot = frame, snapshot
        if not self._points or frame.at - self._points[-1]["at"] >= _POINT_SECONDS:
            self._points.append({"at": round(frame.at, 3), "step": frame.step, "totals": frame.totals})
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _make_tree(self, block_size: int) -> None:
        """The tree as an event. What is cached can change without a prompt, so it is looked up each time."""
        if not self._shows_text:
            return
        tree = await asyncio.to_thread(prompt_tree, self._prompts.latest(), block_size)
        branches = branches_of(tree)
        leaves = [branch for branch in branches if not branch.below]
        ask = self._source.ask(partial(look_up, leaves, block_size))
        _note_cached(leaves, await asyncio.wrap_future(ask), tree)
        labels = await self._labels(branches, block_size)
        told = [_told(number, branch, labels[number]) for number, branch in enumerate(branches)]
        sent = event("tree", {"branches": told, "num_prompts": len(self._prompts.latest())})
        if sent != self._tree:
            self.branches, self._tree = branches, sent
            self._tell()

    async def _labels(self, branches: list[Branch], block_size: int) -> list[str]:
        first = [branch.prefix[branch.start * block_size :][:_LABEL_TOKENS].tolist() for branch in branches]
        if self._texts is None:
            return [" ".join(map(str, tokens[:8])) for tokens in first]
        return await self._texts(first) if first else []


def seconds_between(copying: float, making: float) -> float:
    """Seconds from one snapshot to the next, where one took so long in the cache's thread and its frame besides."""
    return max(MIN_SECONDS, copying / MAX_SHARE, making / _MAX_FRAME_SHARE)


def _note_cached(leaves: list[Branch], found: list[int], tree: list[Branch]) -> None:
    """A branch is cached as far as the best of the prompts through it is."""
    reach = {id(branch): number for branch, number in zip(leaves, found, strict=True)}

    def note(branch: Branch) -> int:
        reached = reach[id(branch)] if not branch.below else max(map(note, branch.below))
        branch.num_cached = min(max(reached - branch.start, 0), branch.end - branch.start)
        return reached

    for branch in tree:
        note(branch)


def _told(number: int, branch: Branch, label: str) -> dict[str, Any]:
    return {
        "id": number,
        "depth": branch.start,
        "blocks": branch.end - branch.start,
        "tenant": branch.tenant,
        "requests": branch.num_requests,
        "asked": branch.num_asked,
        "hit": branch.num_hit,
        "cached": branch.num_cached,
        "text": label,
        "below": len(branch.below),
    }
