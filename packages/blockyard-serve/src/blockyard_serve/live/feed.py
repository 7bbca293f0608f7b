"""One sampler for all who watch: at a bounded rate, at a bounded share of the cache's thread, while there is one."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager

from .desk import AnswerT, Source, Surroundings
from .details import Texts
from .frames import Frame, event
from .prompts import PromptLog
from .snapshot import Snapshot, take_snapshot
from .tree import (
    SLICE_BLOCKS,
    TreeBranch,
    cached_tree,
    count_prompts,
    note_tokens,
    see_identities,
    see_keys,
    see_tokens,
    told,
    wanted,
)

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
#: What copying a slice of what is cached may take.
SLICE_SECONDS = 0.0005


class PageFeed:
    """Frames of a cache for any number of readers. Lives in one event loop.

    source: the cache. prompts: what the tree is made of. texts: token ids to text, None where they are not to be shown.
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
        self._tree_at = 0.0
        self._tree_pause = 0.0
        self._tree_task: asyncio.Task[None] | None = None
        self._points: deque[dict[str, Any]] = deque(maxlen=_NUM_POINTS)
        self._is_over = False
        self.latest: Frame | None = None
        self._change = b""
        self.branches: list[TreeBranch] = []
        self._tree = b""
        self._num_frames = 0
        self._is_after_gap = False

    @property
    def num_readers(self) -> int:
        """Streams that are open."""
        return self._num_readers

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """Return those of the latest frame, without the null block."""
        return np.empty(0, np.int32) if self._snapshot is None else self._snapshot.pool.ref_counts[1:]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one reader, until the source has ended; at least one each `BEAT_SECONDS`."""
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
            self._is_after_gap = self.latest is not None
            self._task = asyncio.ensure_future(self._sample())

    def _end(self) -> None:
        self._num_readers -= 1
        if self._num_readers == 0 and self._task is not None:
            self._task.cancel()
            self._task = None
            self._add_point()
            if self._tree_task is not None:
                self._tree_task.cancel()
                self._tree_task = None

    async def _sample(self) -> None:
        """Take one snapshot after another, each later than the one before by what bounds the rate and the share."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                started = clock()
                try:
                    snapshot = await asyncio.wrap_future(self._source.ask(take_snapshot))
                except queue.Full:  # others ask so much: that is no end
                    await asyncio.sleep(MIN_SECONDS)
                    continue
                taken = clock()
                await self._take(snapshot)
                made = clock() - taken
                self._begin_tree(snapshot.block_size, taken)
                await asyncio.sleep(max(started + seconds_between(snapshot.seconds, made) - clock(), 0.0))
        except Exception:  # the cache's thread has ended, and said so to whom it serves
            self._is_over = True
            self._tell()

    def _begin_tree(self, block_size: int, now: float) -> None:
        """Make the tree beside the frames, if it is time and the one before is made. What it raised is raised here."""
        if self._tree_task is not None and self._tree_task.done():
            task, self._tree_task = self._tree_task, None
            task.result()
        if self._shows_text and self._tree_task is None and now - self._tree_at >= self._tree_pause:
            self._tree_at = now
            self._tree_task = asyncio.ensure_future(self._timed_tree(block_size))

    async def _timed_tree(self, block_size: int) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        with contextlib.suppress(queue.Full):
            await self._make_tree(block_size)
        self._tree_pause = max(_TREE_SECONDS, (clock() - began) / _MAX_FRAME_SHARE)

    async def _take(self, snapshot: Snapshot) -> None:
        frame = await asyncio.to_thread(Frame.of, snapshot, self._num_frames + 1, self._is_after_gap)
        self._is_after_gap = False
        if frame.is_like(self.latest):
            return
        before = self.latest
        self._change = b"" if before is None else await asyncio.to_thread(frame.since, before)
        self._num_frames += 1
        self.latest, self._snapshot = frame, snapshot
        if frame.is_after_gap or not self._points or frame.at - self._points[-1]["at"] >= _POINT_SECONDS:
            self._add_point()
        self._tell()

    def _add_point(self) -> None:
        """Keep the latest frame for the chart, if it is not there."""
        point = None if self.latest is None else self.latest.point()
        if point is not None and (not self._points or self._points[-1]["at"] < point["at"]):
            self._points.append(point)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _make_tree(self, block_size: int) -> None:
        """The tree as an event. What is cached changes without a prompt too, so it is read each time."""
        pairs, keys = await self._identities(), await self._ask(see_keys)
        tree = await asyncio.to_thread(cached_tree, pairs, keys)
        branches = tree.branches()
        counts = wanted(branches, block_size)
        blocks = [each.blocks[:count] for each, count in zip(branches, counts, strict=True)]
        contents = [each.contents[:count] for each, count in zip(branches, counts, strict=True)]
        nothing = np.empty(0, np.int64)
        seen = partial(see_tokens, np.concatenate([nothing, *blocks]), np.concatenate([nothing, *contents]))
        note_tokens(tree, counts, *await self._ask(seen), block_size)
        prompts = self._prompts.latest()
        await asyncio.to_thread(count_prompts, tree, prompts, block_size)
        sent = event("tree", told(tree, await self._labels(branches), len(prompts)))
        if sent != self._tree:
            self.branches, self._tree = branches, sent
            self._tell()

    async def _ask(self, question: Callable[[KVCacheManager, Surroundings], AnswerT]) -> AnswerT:
        return await asyncio.wrap_future(self._source.ask(question))

    async def _identities(self) -> NDArray[np.int64]:
        """What all blocks cache, copied a slice at a time, each as long after the one before as its share allows."""
        slices: list[NDArray[np.int64]] = []
        first, num_blocks = 0, 1
        while first < num_blocks:
            if first:
                await asyncio.sleep(SLICE_SECONDS / MAX_SHARE)
            piece, num_blocks = await self._ask(partial(see_identities, first))
            slices.append(piece)
            first += SLICE_BLOCKS
        return np.concatenate(slices)

    async def _labels(self, branches: list[TreeBranch]) -> list[str]:
        if self._texts is None:
            return [" ".join(map(str, branch.label[:8])) for branch in branches]
        return await self._texts([branch.label for branch in branches]) if branches else []


def seconds_between(copying: float, making: float) -> float:
    """Seconds from one snapshot to the next, where one took so long in the cache's thread and its frame besides."""
    return max(MIN_SECONDS, copying / MAX_SHARE, making / _MAX_FRAME_SHARE)
