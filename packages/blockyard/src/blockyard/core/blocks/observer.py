"""Observers of a pool: the CPU tier, the history, residency, the causes of misses, listeners."""

import warnings
from collections.abc import Callable

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..gate import Gate, Listener
from ..policies.stack import text_of


class PoolObserver:
    """Receives each change of a pool after it was made (`on_evict`: before). It must not raise or change the pool."""

    def on_call(self, actor: str) -> None:
        """Attribute the following changes to a call; `actor` is its name and its holder."""

    def on_acquire(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Record that `blocks[start:start + count]`, which were free, are held now."""

    def on_share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Record that `blocks[start:start + count]` have one more holder; some were idle before."""

    def on_release(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Record that `blocks[start:start + count]` have one holder less."""

    def on_evict(self, block: i64) -> None:
        """Record that a cached block is about to be evicted."""

    def on_uncache(self, block: i64) -> None:
        """Record that a cached block is about to be uncached."""

    def on_unretain(self, block: i64, action: str) -> None:
        """Record that the retention of a block has ended. `action` is the reason."""

    def combine(self, other: "PoolObserver") -> "PoolObserver":
        """Return an observer that notifies this one first and then `other`."""
        return Observers([self, other])


class Observers(PoolObserver):
    """Several observers, notified in order."""

    def __init__(self, members: list[PoolObserver]) -> None:
        self.members = members

    def combine(self, other: PoolObserver) -> PoolObserver:
        self.members.append(other)
        return self

    def on_call(self, actor: str) -> None:
        for member in self.members:
            member.on_call(actor)

    def on_acquire(self, blocks: vec[i32], start: i64, count: i64) -> None:
        for member in self.members:
            member.on_acquire(blocks, start, count)

    def on_share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        for member in self.members:
            member.on_share(blocks, start, count)

    def on_release(self, blocks: vec[i32], start: i64, count: i64) -> None:
        for member in self.members:
            member.on_release(blocks, start, count)

    def on_evict(self, block: i64) -> None:
        for member in self.members:
            member.on_evict(block)

    def on_uncache(self, block: i64) -> None:
        for member in self.members:
            member.on_uncache(block)

    def on_unretain(self, block: i64, action: str) -> None:
        for member in self.members:
            member.on_unretain(block, action)


class Clock:
    """Logical time, set by the caller. The library reads no clock."""

    def __init__(self) -> None:
        self.now: float = 0.0


class Notifier(Listener):
    """Calls a user's callback after a call has ended, so that the callback may call the pool.

    If the callback raises, a RuntimeWarning is issued, because the call itself has succeeded. An interruption such as
    Ctrl-C is raised later (`Gate`).

    Args:
        gate: the gate of the pool.
        name: name of the attribute that holds the callback.
    """

    def __init__(self, gate: Gate, name: str) -> None:
        self._gate = gate
        self._name = name

    def _report(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            self._gate.interruption.note(error)
            return
        text = text_of(error, self._gate.interruption)
        try:
            warnings.warn(f"{self._name} raised {type(error).__name__}: {text}", RuntimeWarning, 2)
        except Warning as raised:
            self._gate.interruption.note(raised)


class ChangeNotifier(Notifier):
    """Calls `callback` after calls between steps that changed the cached contents."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate, "on_events")
        self.callback: Callable[[], object] | None = None

    def notify(self) -> bool:
        """Call the callback if the contents have changed. Return whether they had."""
        has_changed = self._gate.has_changed
        self._gate.has_changed = False
        callback = self.callback
        if has_changed and callback is not None:
            try:
                callback()
            except BaseException as error:
                self._report(error)
        return has_changed


class LossNotifier(Notifier):
    """Calls `callback` with the blocks that lost their content. If the callback evicts blocks, it is called again."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate, "on_evict")
        self.callback: Callable[[object], object] | None = None
        #: Times that the callback raised or could not be called.
        self.num_failures: i64 = 0
        self._lost: list[int] = []

    def note(self, block: i64) -> None:
        if self.callback is not None:
            try:
                self._lost.append(int(block))
            except MemoryError:
                self.num_failures += 1  # the block is lost all the same
            self._gate.notify_later()

    def notify(self) -> bool:
        """Call the callback until it causes no further losses. Return whether there were any."""
        has_notified = False
        while self._lost:
            has_notified = True
            callback = self.callback
            try:
                lost = np.array(self._lost, dtype=np.int32)
                self._lost.clear()
                if callback is not None:
                    callback(lost)
            except BaseException as error:
                # A later call would be too late: the blocks may be overwritten then.
                self._lost.clear()
                self.num_failures += 1
                self._report(error)
        return has_notified


class LossCollector(PoolObserver):
    """Passes the blocks that lose their content to a `LossNotifier`."""

    def __init__(self, notifier: LossNotifier) -> None:
        self._losses = notifier

    def on_evict(self, block: i64) -> None:
        self._losses.note(block)

    def on_uncache(self, block: i64) -> None:
        self._losses.note(block)
