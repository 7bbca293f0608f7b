"""Observers of a pool: the CPU tier, the history, residency, the causes of misses, listeners."""

import warnings
from collections.abc import Callable

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..gate import Gate, Listener
from ..policies.stack import text_of


class PoolObserver:
    """Receives each change of a pool after it was made (`evicting`: before). It must not change the pool, nor raise."""

    def acting(self, actor: str) -> None:
        """Attribute the next changes to the call `actor`, which includes the name of the holder."""

    def acquired(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Note that `blocks[start:start + count]` were free and are held now."""

    def shared(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Note that `blocks[start:start + count]` are held once more; some were idle before."""

    def released(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Note that `blocks[start:start + count]` are held once less."""

    def evicting(self, block: i64) -> None:
        """Note that a cached block is about to be evicted."""

    def dropping(self, block: i64) -> None:
        """Note that a cached block is about to be uncached."""

    def unretained(self, block: i64, action: str) -> None:
        """Note that the retention of a block has ended, for the reason `action`."""

    def joined_by(self, other: "PoolObserver") -> "PoolObserver":
        """Return an observer that notifies this one and then `other`."""
        return Observers([self, other])


class Observers(PoolObserver):
    """Several observers, notified in order."""

    def __init__(self, members: list[PoolObserver]) -> None:
        self.members = members

    def joined_by(self, other: PoolObserver) -> PoolObserver:
        self.members.append(other)
        return self

    def acting(self, actor: str) -> None:
        for member in self.members:
            member.acting(actor)

    def acquired(self, blocks: vec[i32], start: i64, count: i64) -> None:
        for member in self.members:
            member.acquired(blocks, start, count)

    def shared(self, blocks: vec[i32], start: i64, count: i64) -> None:
        for member in self.members:
            member.shared(blocks, start, count)

    def released(self, blocks: vec[i32], start: i64, count: i64) -> None:
        for member in self.members:
            member.released(blocks, start, count)

    def evicting(self, block: i64) -> None:
        for member in self.members:
            member.evicting(block)

    def dropping(self, block: i64) -> None:
        for member in self.members:
            member.dropping(block)

    def unretained(self, block: i64, action: str) -> None:
        for member in self.members:
            member.unretained(block, action)


class Clock:
    """Logical time, set by the caller. The library reads no clock."""

    def __init__(self) -> None:
        self.now: float = 0.0


class Teller(Listener):
    """Calls a user's callback after a call has ended, so that the callback may call the pool.

    An exception of the callback becomes a RuntimeWarning, because the call itself has succeeded. An interruption is
    raised like one in a policy.

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


class ChangeTeller(Teller):
    """Calls `callback` after calls outside of steps that changed which content is cached."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate, "on_events")
        self.callback: Callable[[], object] | None = None

    def notify(self) -> bool:
        """Call the callback if something has changed; return whether it had."""
        has_changed = self._gate.has_changed
        self._gate.has_changed = False
        callback = self.callback
        if has_changed and callback is not None:
            try:
                callback()
            except BaseException as error:
                self._report(error)
        return has_changed


class LossTeller(Teller):
    """Calls `callback` with the blocks that lost their content. Evictions by the callback itself are reported next."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate, "on_evict")
        self.callback: Callable[[object], object] | None = None
        self._lost: list[int] = []

    def note(self, block: i64) -> None:
        if self.callback is not None:
            self._lost.append(int(block))
            self._gate.notify_later()

    def notify(self) -> bool:
        """Call the callback until no lost blocks are left; return whether there were any."""
        has_notified = False
        while self._lost:
            has_notified = True
            lost = self._lost
            self._lost = []
            callback = self.callback
            if callback is not None:
                try:
                    callback(np.array(lost, dtype=np.int32))
                except BaseException as error:
                    self._report(error)
        return has_notified


class LossListener(PoolObserver):
    """Collects blocks that lose their content for a `LossTeller`."""

    def __init__(self, teller: LossTeller) -> None:
        self._teller = teller

    def evicting(self, block: i64) -> None:
        self._teller.note(block)

    def dropping(self, block: i64) -> None:
        self._teller.note(block)
