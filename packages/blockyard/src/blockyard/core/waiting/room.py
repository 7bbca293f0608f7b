"""The contexts that were in use a moment ago, and how many idle blocks they have."""

import heapq
from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError
from ..arrays import grown_i32, zeros_i32
from ..blocks.ledger import BlockLedger
from ..blocks.observer import PoolObserver
from .nodes import Ticket

_NO_BLOCKS: Final = zeros_i32(0)


class KeptBlocks(PoolObserver):
    """Counts the idle blocks of a pool that at least one kept context has, each once. O(1) per changed block."""

    def __init__(self, pool: BlockLedger) -> None:
        self.pool = pool
        #: Kept contexts that have the block, whether it is counted, and how often its content was lost.
        self._kept = zeros_i32(int(pool.capacity))
        self._counted = zeros_i32(int(pool.capacity))
        self.losses = zeros_i32(int(pool.capacity))
        self.num_idle: i64 = 0

    def make_room(self) -> None:
        """Grow with the pool."""
        size = int(self.pool.capacity)
        if size > len(self.losses):
            kept, counted = grown_i32(self._kept, size), grown_i32(self._counted, size)
            self.losses = grown_i32(self.losses, size)
            self._kept = kept
            self._counted = counted

    def is_idle(self, block: i64) -> bool:
        """Return whether the block is counted."""
        return block < i64(len(self._counted)) and self._counted[block] != 0

    def keep(self, block: i64, change: i64) -> None:
        """Note one more (1) or one less (-1) kept context that has the block."""
        self._kept[block] += i32(change)
        self._count(block)

    def _count(self, block: i64) -> None:
        counted: i64 = 1 if self._kept[block] > 0 and self.pool.ref_cnt[block] == 0 else 0
        self.num_idle += counted - i64(self._counted[block])
        self._counted[block] = i32(counted)

    def check(self, expected: vec[i32]) -> None:
        """Raise `InvariantError` unless so many kept contexts have each block. O(pool)."""
        num_idle: i64 = 0
        for block in range(i64(len(expected))):
            if expected[block] != self._kept[block]:
                raise InvariantError(
                    f"waiting: {expected[block]} kept contexts have block {block}, but {self._kept[block]} are counted"
                )
            num_idle += 1 if expected[block] > 0 and self.pool.ref_cnt[block] == 0 else 0
        if num_idle != self.num_idle:
            raise InvariantError(f"waiting: {num_idle} kept blocks are idle, but {self.num_idle} are counted")

    def on_share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        for position in range(start, start + count):
            block = i64(blocks[position])
            if block < i64(len(self._kept)) and self._kept[block] > 0:
                self._count(block)

    def on_acquire(self, blocks: vec[i32], start: i64, count: i64) -> None:
        self.on_share(blocks, start, count)

    def on_release(self, blocks: vec[i32], start: i64, count: i64) -> None:
        self.on_share(blocks, start, count)

    def on_evict(self, block: i64) -> None:
        if block < i64(len(self._kept)) and self._kept[block] > 0:
            self.losses[block] += 1
            self._kept[block] = 0
            self._count(block)

    def on_uncache(self, block: i64) -> None:
        self.on_evict(block)


class Context:
    """The context of a session that is running, or was a moment ago.

    Attributes:
        session: name of the session.
        num_running: requests of it that run.
        waiting: tickets of it that wait.
        blocks: blocks that its last turn has left.
        losses: `KeptBlocks.losses` of each when they were kept.
        idle_since: time at which its last turn ended.
        kept_until: time until which room is kept for it.
    """

    def __init__(self, session: str, waiting: dict[int, Ticket]) -> None:
        self.session = session
        self.num_running: i64 = 0
        self.waiting = waiting
        self.blocks = zeros_i32(0)
        self.losses = zeros_i32(0)
        self.idle_since = 0.0
        self.kept_until = 0.0

    def is_idle(self) -> bool:
        """Return whether it neither runs nor waits."""
        return self.num_running == 0 and not self.waiting


class Contexts:
    """The contexts that are *inside*: those that run, and those that ran at most `kept_until`, or wait since then.

    Args:
        pool: the pool, whose idle blocks of these contexts are counted.
    """

    def __init__(self, pool: BlockLedger) -> None:
        self.kept = KeptBlocks(pool)
        self.inside: dict[str, Context] = {}
        #: The waiting tickets of each session, inside or not.
        self._waiting: dict[str, dict[int, Ticket]] = {}
        #: (time, session) at which contexts may leave.
        self._ends: list[tuple[float, str]] = []
        pool.watch(self.kept)

    def add(self, ticket: Ticket) -> bool:
        """Add a ticket that begins to wait; return whether it is inside."""
        if ticket.session is None:
            return False
        self._waiting.setdefault(ticket.session, {})[int(ticket.number)] = ticket
        return ticket.session in self.inside

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket that no longer waits."""
        if ticket.session is None:
            return
        context = self.inside.get(ticket.session)
        if context is not None and context.num_running == 0:
            heapq.heappush(self._ends, (context.kept_until, context.session))
        waiting = self._waiting.get(ticket.session)
        if waiting is not None:
            waiting.pop(int(ticket.number), None)
            if not waiting and context is None:
                del self._waiting[ticket.session]

    def enter(self, session: str) -> Context:
        """Return the context of a session that begins to run; it is inside."""
        context = self.inside.get(session)
        if context is None:
            context = Context(session, self._waiting.setdefault(session, {}))
            self.inside[session] = context
        self._release(context)
        return context

    def keep(self, context: Context, blocks: vec[i32], now: float, seconds: float) -> None:
        """Keep room for the blocks that a turn leaves. O(blocks)."""
        self.kept.make_room()
        count = i64(len(blocks))
        losses = zeros_i32(int(count))
        heapq.heappush(self._ends, (now + seconds, context.session))
        self._release(context)
        for position in range(count):
            losses[position] = self.kept.losses[i64(blocks[position])]
            self.kept.keep(i64(blocks[position]), 1)
        context.blocks = blocks
        context.losses = losses
        context.idle_since = now
        context.kept_until = now + seconds

    def _release(self, context: Context) -> None:
        blocks, losses = context.blocks, context.losses
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if self.kept.losses[block] == losses[position]:
                self.kept.keep(block, -1)
        context.blocks = _NO_BLOCKS
        context.losses = _NO_BLOCKS

    def drop(self, context: Context) -> list[Ticket]:
        """Send a context outside; return its waiting tickets. Its blocks stay where they are."""
        waiting = list(context.waiting.values())
        self._release(context)
        self.inside.pop(context.session, None)
        if not waiting:
            self._waiting.pop(context.session, None)
        return waiting

    def check(self) -> None:
        """Raise `InvariantError` unless the kept blocks are those of the contexts inside. O(pool)."""
        expected = zeros_i32(len(self.kept.losses))
        for context in self.inside.values():
            for position in range(i64(len(context.blocks))):
                block = i64(context.blocks[position])
                if self.kept.losses[block] == context.losses[position]:
                    expected[block] += 1
        self.kept.check(expected)

    def next_end(self) -> float | None:
        """Return the time at which the next context leaves, or None."""
        while self._ends:
            end, session = self._ends[0]
            context = self.inside.get(session)
            if context is not None and context.is_idle() and context.kept_until == end:
                return end
            heapq.heappop(self._ends)
        return None

    def expired(self, now: float) -> Context | None:
        """Return an idle context whose time is over, or None."""
        end = self.next_end()
        if end is None or end > now:
            return None
        return self.inside[self._ends[0][1]]

    def longest_idle(self) -> Context | None:
        """Return the idle context whose last turn ended first, else the waiting one that came last. O(contexts)."""
        found: Context | None = None
        for context in self.inside.values():
            if context.num_running == 0 and (found is None or self._leaves_before(context, found)):
                found = context
        return found

    def _leaves_before(self, context: Context, other: Context) -> bool:
        if context.is_idle() != other.is_idle():
            return context.is_idle()
        if context.is_idle():
            return context.idle_since < other.idle_since
        return min(context.waiting) > min(other.waiting)
