"""The end of a sequence that one side of a hand-over holds, whatever interrupts it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ..core.manager import KVCacheManager
from ..errors import UnknownSequence


def end_sequence(cache: KVCacheManager, seq: int, forget: Callable[[], object]) -> None:
    """Free a sequence and forget what was known of it. An interrupt is raised when both are done. O(blocks)."""
    try:
        cache.free(seq)
        forget()
    except BaseException:
        forget()
        free_at_last(cache, seq)
        raise


def free_at_last(cache: KVCacheManager, seq: int) -> None:
    """Free a sequence after an error or an interrupt, unless that came when it was free already."""
    with contextlib.suppress(UnknownSequence):
        cache.free(seq)
