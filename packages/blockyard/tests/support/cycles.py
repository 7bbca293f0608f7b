"""Garbage cycles with finalisers, like an engine's request objects that free in `__del__`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Dying:
    """Does something when the collector finds it."""

    def __init__(self, last_act: Callable[[], object]) -> None:
        self.last_act = last_act
        self.itself = self

    def __del__(self) -> None:
        self.last_act()


def leave_to_die(last_act: Callable[[], object]) -> None:
    """A cycle that nothing refers to; `last_act` runs when the collector comes by. It must not raise."""
    Dying(last_act)


@contextmanager
def collector_off() -> Iterator[None]:
    """What is there now is left alone, and nothing is collected until somebody turns it on."""
    thresholds, was_on, was_frozen = gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not was_frozen:  # by the test session, which would have millions of objects walked again
            gc.unfreeze()
        if was_on:
            gc.enable()
        else:
            gc.disable()
        gc.collect()


@contextmanager
def collector_at(threshold: int) -> Iterator[None]:
    """The collector comes by at every `threshold`th allocation of an object it follows."""
    gc.set_threshold(threshold)
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
