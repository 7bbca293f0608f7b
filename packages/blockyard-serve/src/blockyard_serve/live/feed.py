"""One sampler for all readers.

It bounds its rate and its share of the cache's thread, and runs only while someone reads.
"""

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

from .call_queue import AnswerT, CacheSource, EngineStatus
from .details import Texts
from .frames import Frame, event
from .prompt_log import PromptLog
from .snapshot import Snapshot, take_snapshot
from .tree import (
    SLICE_BLOCKS,
    TreeBranch,
    add_tokens,
    blocks_to_read,
    cached_tree,
    count_prompts,
    read_identities,
    read_keys,
    read_tokens,
    tree_answer,
)

#: Minimum of seconds between two frames.
MIN_SECONDS = 0.1
#: Maximum fraction of the cache's thread that copying may take.
MAX_SHARE = 0.005
#: Maximum fraction of another core that making frames may take.
_MAX_FRAME_SHARE = 0.1
#: Seconds after which a reader gets a comment, which also detects that it left.
BEAT_SECONDS = 1.0
_TREE_SECONDS = 3.0
_POINT_SECONDS = 2.0
_NUM_POINTS = 300
#: Expected seconds to copy a slice of the tree's contents.
SLICE_SECONDS = 0.0005


class PageFeed:
    """The frames of a cache for any number of readers, on one event loop.

    A reader that does not keep up gets the latest whole frame: nothing waits for it, and nothing accumulates.

    Args:
        texts: decodes tokens; None if texts are not shown.
        shows_text: whether prompts may be shown.
        is_ending: returns whether streams should end, because the server is stopping.
    """

    def __init__(
        self,
        source: CacheSource,
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
        """Number of open streams."""
        return self._num_readers

    @property
    def ref_counts(self) -> NDArray[np.int32]:
        """Reference counts of the latest frame, without the null block's."""
        return np.empty(0, np.int32) if self._snapshot is None else self._snapshot.pool.ref_counts[1:]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one reader, at least one every `BEAT_SECONDS`, until the source ends."""
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
        """Take snapshots, with pauses that keep rate and share within their bounds."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                started = clock()
                try:
                    snapshot = await asyncio.wrap_future(self._source.call(take_snapshot))
                except queue.Full:  # other readers fill the queue: try again
                    await asyncio.sleep(MIN_SECONDS)
                    continue
                taken = clock()
                await self._add_frame(snapshot)
                made = clock() - taken
                self._begin_tree(snapshot.block_size, taken)
                await asyncio.sleep(max(started + seconds_between(snapshot.seconds, made) - clock(), 0.0))
        except Exception:  # the cache's thread has ended
            self._is_over = True
            self._notify()

    def _begin_tree(self, block_size: int, now: float) -> None:
        """Start making the next tree if it is due and the previous one is done. Raises the previous one's error."""
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

    async def _add_frame(self, snapshot: Snapshot) -> None:
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
        self._notify()

    def _add_point(self) -> None:
        """Add the latest frame to the chart, if it is not there."""
        point = None if self.latest is None else self.latest.point()
        if point is not None and (not self._points or self._points[-1]["at"] < point["at"]):
            self._points.append(point)

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _make_tree(self, block_size: int) -> None:
        """Make the tree event. The cache changes without prompts too, so it is read every time."""
        pairs, keys = await self._identities(), await self._call(read_keys)
        tree = await asyncio.to_thread(cached_tree, pairs, keys)
        branches = tree.branches()
        counts = blocks_to_read(branches, block_size)
        blocks = [each.blocks[:count] for each, count in zip(branches, counts, strict=True)]
        contents = [each.contents[:count] for each, count in zip(branches, counts, strict=True)]
        nothing = np.empty(0, np.int64)
        seen = partial(read_tokens, np.concatenate([nothing, *blocks]), np.concatenate([nothing, *contents]))
        add_tokens(tree, counts, *await self._call(seen), block_size)
        prompts = self._prompts.latest()
        await asyncio.to_thread(count_prompts, tree, prompts, block_size)
        sent = event("tree", tree_answer(tree, await self._labels(branches), len(prompts)))
        if sent != self._tree:
            self.branches, self._tree = branches, sent
            self._notify()

    async def _call(self, function: Callable[[KVCacheManager, EngineStatus], AnswerT]) -> AnswerT:
        return await asyncio.wrap_future(self._source.call(function))

    async def _identities(self) -> NDArray[np.int64]:
        """Return the contents of all blocks, copied in slices with pauses that keep the share within its bound."""
        slices: list[NDArray[np.int64]] = []
        first, num_blocks = 0, 1
        while first < num_blocks:
            if first:
                await asyncio.sleep(SLICE_SECONDS / MAX_SHARE)
            piece, num_blocks = await self._call(partial(read_identities, first))
            slices.append(piece)
            first += SLICE_BLOCKS
        return np.concatenate(slices)

    async def _labels(self, branches: list[TreeBranch]) -> list[str]:
        if self._texts is None:
            return [" ".join(map(str, branch.label[:8])) for branch in branches]
        return await self._texts([branch.label for branch in branches]) if branches else []


def seconds_between(copying: float, making: float) -> float:
    """Return the pause until the next snapshot, from the seconds that copying the last one and its frame took."""
    return max(MIN_SECONDS, copying / MAX_SHARE, making / _MAX_FRAME_SHARE)
