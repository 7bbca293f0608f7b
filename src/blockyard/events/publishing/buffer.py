"""Numbered messages: the latest ones for a replay, and a snapshot for consumers that need more than those."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ..wire import Payload


class ReplayBuffer:
    """The payloads of the latest `size` numbers, without gaps. Numbers go on where they began.

    A replay from a number that is kept gives the messages from there. From any other, and from 0, it gives one snapshot
    under the latest number, so a consumer that was away for long, or begins now, holds what the cache holds. With
    `pads`, for consumers that want all numbers from the one they asked for, the snapshot has that number and empty
    messages follow up to the latest.
    """

    def __init__(self, first: int, size: int, pads: bool) -> None:
        self.next_sequence = first
        self._payloads: deque[Payload] = deque(maxlen=size)
        self._first = first
        self._pads = pads
        self._num_lives = 1

    def add(self, payload: Payload) -> int:
        """Number a message."""
        self._payloads.append(payload)
        self.next_sequence += 1
        return self.next_sequence - 1

    def lose(self) -> None:
        """A message could not be made: its number is passed over, and no replay goes over the gap."""
        self._payloads.clear()
        self.next_sequence += 1

    def begin_anew(self) -> None:
        """Numbers begin where they began, and no message is kept."""
        self._payloads.clear()
        self.next_sequence = self._first
        self._num_lives += 1

    def replay(self, start: int, snapshot: Callable[[], Payload], empty: bytes) -> Iterator[tuple[int, Payload]]:
        """The numbered messages that bring a consumer up to date that has seen all before `start`.

        It may be read slowly, while messages are added. It ends early where one that it comes to is gone by then,
        or numbers have begun anew.
        """
        last = self.next_sequence - 1
        if self._first < start <= self.next_sequence and self._oldest <= start:
            while self._oldest <= start < self.next_sequence:
                yield start, self._payloads[start - self._oldest]
                start += 1
        elif self._first <= last and not self._pads:
            yield last, snapshot()
        elif self._first <= last:
            start, life = min(start, last), self._num_lives
            yield start, snapshot()
            for number in range(start + 1, last + 1):
                if self._num_lives != life:
                    return
                yield number, empty

    @property
    def _oldest(self) -> int:
        return self.next_sequence - len(self._payloads)
