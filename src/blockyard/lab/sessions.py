"""Which requests of a trace are turns of one session: as the trace says, or as their prompts tell."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", str, int)

#: Sessions that are remembered while a trace is read; the one that was used longest ago is forgotten first.
MAX_SESSIONS = 2**20


class SessionTeller:
    """Gives each request the number of its session, in the order of the trace.

    Where a request names its session, that is it. Else it is told from the prompts: a request whose prompt begins with
    all full blocks of the newest prompt of a session is its next turn (where several are, of the longest of these), and
    so is one that repeats it. A prompt without a full block is a session of its own, and so is one that branches off
    from an older turn: a session has one newest state.

    O(blocks) a request. Remembers `max_sessions` of either kind; a turn of a forgotten one begins a new session.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._num_sessions = 0
        self._by_name: dict[str, int] = {}
        #: The last full block of a session's newest prompt, which names all that is before it too.
        self._by_end: dict[int, int] = {}

    def number(self, name: str, block_ids: NDArray[np.int64], num_full_blocks: int) -> int:
        """The session of the next request: from 0, in the order in which they began.

        name: as the trace has it, "" for none. block_ids: (n,) of its prompt. num_full_blocks: how many of these are
        full.
        """
        if name:
            return self._put(self._by_name, name, self._by_name.pop(name, None))
        full = block_ids[:num_full_blocks].tolist()
        if not full:
            return self._new()
        end = next((block for block in reversed(full) if block in self._by_end), None)
        return self._put(self._by_end, full[-1], None if end is None else self._by_end.pop(end))

    def _put(self, sessions: dict[Key, int], key: Key, number: int | None) -> int:
        """Remember a session, as the latest one used; a new one for None."""
        found = self._new() if number is None else number
        sessions[key] = found
        if len(sessions) > self._max_sessions:
            del sessions[next(iter(sessions))]
        return found

    def _new(self) -> int:
        self._num_sessions += 1
        return self._num_sessions - 1
