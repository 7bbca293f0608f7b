"""The last things that happened to a pool's blocks, for whoever debugs an engine."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..answers import AllocationEvent
from .free_queue import FreeKVCacheBlockQueue
from .observer import Clock, PoolObserver

#: One remembered event: number, time, action, actor, blocks, free blocks left.
Entry = tuple[int, float, str, str, vec[i32], int]


class AllocationHistory(PoolObserver):
    """The latest `size` events of a pool, in a ring. An event costs a copy of its block ids, and nothing when off."""

    def __init__(self, size: int, queue: FreeKVCacheBlockQueue, clock: Clock) -> None:
        self.size = size
        self.queue = queue
        self.clock = clock
        #: What the manager is doing, and for whom.
        self.actor = ""
        self.num_events = 0
        self._entries: list[Entry] = []

    def acquired(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Note that blocks were taken."""
        self._note("take", blocks, start, count)

    def shared(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Note that blocks are held once more."""
        self._note("share", blocks, start, count)

    def released(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Note that blocks are held once less."""
        self._note("give back", blocks, start, count)

    def evicting(self, block: i64) -> None:
        """Note that a cached block is taken for something else."""
        self._note("evict", vec[i32]([i32(block)]), 0, 1)

    def _note(self, action: str, blocks: vec[i32], start: i64, count: i64) -> None:
        if count == 0:
            return
        free = int(self.queue.num_free)
        entry = (self.num_events, self.clock.now, action, self.actor, blocks[start : start + count], free)
        if len(self._entries) < self.size:
            self._entries.append(entry)
        else:
            self._entries[self.num_events % self.size] = entry
        self.num_events += 1

    def events(self) -> list[AllocationEvent]:
        """What is remembered, oldest first. O(size)."""
        ordered = sorted(self._entries, key=lambda entry: entry[0])
        return [make_event(entry) for entry in ordered]


def make_event(entry: Entry) -> AllocationEvent:
    """One remembered event as people see it."""
    number, time, action, actor, blocks, free = entry
    return AllocationEvent(number, time, action, actor, [int(block) for block in blocks], free)
