"""A callable of the user's that is told, once a call is over, which blocks have lost their content in it."""

import warnings
from collections.abc import Callable

import numpy as np
from mypy_extensions import i64

from ..gate import Gate, Told
from ..policies.stack import text_of
from .observer import PoolObserver


class LossTeller(Told):
    """Tells `callback` of lost blocks when the gate is open again.

    The callback may call the pool; what that evicts is told next. An exception of its becomes a RuntimeWarning, because
    the call that it follows is done; an interruption is raised as one of a policy's is.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.callback: Callable[[object], object] | None = None
        self._lost: list[int] = []

    def note(self, block: i64) -> None:
        """This block is one of them."""
        if self.callback is not None:
            self._lost.append(int(block))
            self._gate.tell_later()

    def tell(self) -> bool:
        """Call the callback with what was lost, until nothing more is."""
        has_told = False
        while self._lost:
            has_told = True
            lost = self._lost
            self._lost = []
            callback = self.callback
            if callback is not None:
                try:
                    callback(np.array(lost, dtype=np.int32))
                except Exception as error:
                    self._warn(error)
                except BaseException as error:
                    self._gate.interruption.note(error)
        return has_told

    def _warn(self, error: Exception) -> None:
        text = text_of(error, self._gate.interruption)
        try:
            warnings.warn(f"on_evict raised {type(error).__name__}: {text}", RuntimeWarning, 2)
        except Warning as raised:
            self._gate.interruption.note(raised)


class LossListener(PoolObserver):
    """Notes blocks that lose their content for a `LossTeller`."""

    def __init__(self, teller: LossTeller) -> None:
        self._teller = teller

    def evicting(self, block: i64) -> None:
        """Note it."""
        self._teller.note(block)

    def dropping(self, block: i64) -> None:
        """Note it."""
        self._teller.note(block)
