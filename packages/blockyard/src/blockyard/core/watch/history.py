"""The latest events of a pool's blocks, for debugging an engine."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import AllocationEvent
from ..blocks.free_queue import FreeQueue
from ..blocks.observer import Clock, PoolObserver


class Entry:
    """A recorded event."""

    def __init__(self, number: int, time: float, action: str, actor: str, blocks: vec[i32], num_free: int) -> None:
        self.number = number
        self.time = time
        self.action = action
        self.actor = actor
        self.blocks = blocks
        self.num_free = num_free

    def event(self) -> AllocationEvent:
        """Return the event as an `AllocationEvent`."""
        blocks = [int(block) for block in self.blocks]
        return AllocationEvent(self.number, self.time, self.action, self.actor, blocks, self.num_free)


class AllocationHistory(PoolObserver):
    """The latest `size` events of a pool, in a ring.

    An event costs a copy of its block ids, or nothing if size is 0.
    """

    def __init__(self, size: int, queue: FreeQueue, clock: Clock) -> None:
        self.size = size
        self.queue = queue
        self.clock = clock
        #: The running call and its holder.
        self.actor = ""
        self.num_events = 0
        #: Number of events not recorded because memory was short.
        self._num_lost = 0
        self._entries: list[Entry] = []

    def on_call(self, actor: str) -> None:
        """Attribute the following events to a call."""
        self.actor = actor

    def on_acquire(self, blocks: vec[i32], start: i64, count: i64) -> None:
        self._note("take", blocks, start, count)

    def on_share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        self._note("share", blocks, start, count)

    def on_release(self, blocks: vec[i32], start: i64, count: i64) -> None:
        self._note("release", blocks, start, count)

    def on_evict(self, block: i64) -> None:
        self._note("evict", vec[i32]([i32(block)]), 0, 1)

    def on_unretain(self, block: i64, action: str) -> None:
        self._note(action, vec[i32]([i32(block)]), 0, 1)

    def _note(self, action: str, blocks: vec[i32], start: i64, count: i64) -> None:
        if count == 0:
            return
        try:
            self._remember(action, blocks[start : start + count])
        except MemoryError:  # the call that is noted goes on; its number is missing
            self._num_lost += 1
        self.num_events += 1

    def _remember(self, action: str, blocks: vec[i32]) -> None:
        free = int(self.queue.num_free)
        entry = Entry(self.num_events, self.clock.now, action, self.actor, blocks, free)
        if len(self._entries) < self.size:
            self._entries.append(entry)
        else:
            self._entries[(self.num_events - self._num_lost) % self.size] = entry

    def events(self) -> list[AllocationEvent]:
        """Return the recorded events, oldest first. O(size)."""
        return [entry.event() for entry in sorted(self._entries, key=lambda entry: entry.number)]
