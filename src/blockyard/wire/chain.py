"""Messages that follow one another: each has a number, and the digest of the message before it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DivergedRank
from .message import _BEHIND_DIGEST, _DIGEST_AT, DIGEST_BYTES, NO_DIGEST, Message, pack


class Chain:
    """The messages so far, at one of its ends. start: what both ends agreed on before.

    A digest covers the digest of the message before, so it is that of all messages: equal digests, equal histories.
    """

    def __init__(self, start: bytes = b"") -> None:
        #: The number of the latest message and its digest, set as one: an interrupt finds both or none.
        self.place = (0, blake2b(start, digest_size=DIGEST_BYTES).digest() if start else NO_DIGEST)

    @property
    def number(self) -> int:
        """Count the messages. O(1)."""
        return self.place[0]

    @property
    def digest(self) -> bytes:
        """Return the digest of all messages. O(1)."""
        return self.place[1]

    def next(self, kind: str, fields: dict[str, Any], arrays: Sequence[npt.NDArray[np.integer[Any]]]) -> bytes:
        """Make the next message. O(bytes)."""
        data = pack(kind, fields, arrays, self.number + 1, self.digest)
        self.place = (self.number + 1, data[_DIGEST_AT:_BEHIND_DIGEST])
        return data

    def require_next(self, message: Message, name: str) -> None:
        """Raise `DivergedRank` unless a message is the next one. name: what the error calls this end. O(1)."""
        if (message.number, message.before) != (self.number + 1, self.digest):
            raise DivergedRank(
                f"{name} is at step {self.number} with digest {self.digest.hex()}; the plan is step {message.number} "
                f"and continues step {message.number - 1} with digest {message.before.hex()}"
            )

    def take(self, message: Message) -> None:
        """Count a message as read."""
        self.place = (message.number, message.digest)
