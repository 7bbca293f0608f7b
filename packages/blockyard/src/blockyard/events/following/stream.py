"""Puts one publisher's messages in order, despite lost, repeated and replayed ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple
from zlib import crc32

import msgspec

from ..wire import AllBlocksCleared, Batch, Payload, decode_batch

#: Live messages kept while a replay is pending; with more, another replay is needed.
MOST_AHEAD = 4096
MOST_AHEAD_BYTES = 2**26
#: Latest messages whose checksums are kept, to tell a repeated message from one of a restarted publisher.
REMEMBERED = 1024


class Trust(Enum):
    """Reliability of the known contents of a publisher's cache."""

    #: All messages so far were received.
    LIVE = "live"
    #: Messages are missing and a replay is pending: the contents were correct at an earlier moment.
    CATCHING_UP = "catching up"
    #: Nothing is known yet, or the publisher restarted.
    UNTRUSTED = "untrusted"


class Message(NamedTuple):
    """A decoded message with its number."""

    number: int
    batch: Batch
    checksum: int
    payload: Payload

    @property
    def is_snapshot(self) -> bool:
        """Return whether the message clears all blocks, so that no message before it is needed."""
        return any(isinstance(event, AllBlocksCleared) for event in self.batch.events)

    def as_snapshot(self) -> Message:
        """Return this message preceded by a clear of all blocks, for a publisher that started with an empty cache."""
        return self._replace(batch=msgspec.structs.replace(self.batch, events=[AllBlocksCleared(), *self.batch.events]))

    def without_events(self) -> Message:
        """Return a copy to keep for later, without the decoded events, which may be 80 times as large."""
        return self._replace(batch=Batch(self.batch.ts, [], self.batch.data_parallel_rank, self.batch.epoch))

    def with_events(self) -> Message:
        """Return a copy with the payload decoded again."""
        return self._replace(batch=decode_batch(self.payload))

    @staticmethod
    def of(number: int, payload: Payload) -> Message:
        """Decode a payload. Raises `InvalidArgument` if it cannot be read."""
        return Message(number, decode_batch(payload), crc32(payload), payload)


class MessageOrder:
    """Decides whether a message is the next one, a repeated one, or shows a gap.

    Numbers increase by one. A repeated message is ignored. Another message under the same number, or another epoch,
    means that the publisher restarted. After a gap, later messages are kept, and `replay_from` is the number to request
    a replay from (0: the beginning). A replay has the messages from there, or a snapshot under any number. A replay
    from 0 that begins with number 0 is complete without a snapshot, because publishers number from 0 when their cache
    is empty. A replay that lacks a received message, or has a different one under its number, does not lead to LIVE. A
    publisher without snapshots (vLLM, SGLang) may no longer have the missing messages. Its replay then begins with a
    later number, and its contents are untrusted until it clears its cache or restarts.
    """

    def __init__(self) -> None:
        self.trust = Trust.UNTRUSTED
        self.last = -1
        self.num_gaps = 0
        self.num_restarts = 0
        self._epoch: int | None = None
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._ahead: dict[int, Message] = {}
        self._ahead_bytes = 0
        #: Highest number received since the last message that was applied.
        self._newest = -1
        #: Number of an unreadable message.
        self._unread = -1
        #: Time of the latest replayed message. Older live messages are only applied if the replay has them too.
        self._replayed_ts = 0.0
        #: Whether a replay and the live messages are from different lives of the publisher.
        self._is_contradicted = False
        #: Whether a replay is requested or running, and whether it has become invalid.
        self._is_replaying = False
        self.is_void = False
        self._num_replayed = 0
        #: Whether a snapshot was read whose replay has not ended. Messages after it may belong to it.
        self._is_in_snapshot = False

    @property
    def replay_from(self) -> int | None:
        """Return the number to request a replay from, 0 for all; None if no message is missing."""
        if self.trust is Trust.LIVE:
            return None
        return 0 if self.trust is Trust.UNTRUSTED or self._is_in_snapshot else self.last + 1

    def begin_replay(self) -> None:
        """Record that a replay is requested, on a connection that carries no messages of an earlier replay."""
        self._is_replaying = True
        self.is_void = self._is_contradicted = False
        self._num_replayed = 0

    def receive_live(self, message: Message) -> Message | None:
        """Process a live message; return it if it is the next one."""
        number = message.number
        if self.trust is Trust.UNTRUSTED:
            # The publisher restarted, or a replay will have the dropped messages.
            kept = self._ahead.get(number)
            is_kept = kept is not None and kept.checksum == message.checksum
            if number < max(self._newest, self._unread) and not is_kept:
                self._restart()
            self._keep(message)
        elif message.batch.epoch != self._epoch or self._is_another(message):
            self.num_restarts += 1
            self._restart()
            self._keep(message)
        elif self.trust is Trust.LIVE and number == self.last + 1:
            self._accept(message)
            return message
        elif number > self.last:
            if self.trust is Trust.LIVE:
                self.num_gaps += 1
                self._begin_catching_up()
            self._keep(message)
        return None

    def _is_another(self, message: Message) -> bool:
        """Return whether its number belongs to another message, or is too old to tell."""
        return message.number <= self.last and self._seen.get(message.number) != message.checksum

    def receive_replayed(self, message: Message) -> Message | None:
        """Process a message of a replay. Return the message to apply, if any.

        A snapshot replaces everything before it.
        """
        self._is_replaying = True
        if self.is_void:
            return None
        self._is_contradicted |= self._contradicts_live(message)
        if message.is_snapshot:
            self._begin_from(message)
            self._is_in_snapshot = True
        elif self.trust is Trust.UNTRUSTED and message.number == 0:
            self._begin_from(message)
            message = message.as_snapshot()
        elif self.trust is not Trust.CATCHING_UP or message.number != self.last + 1:
            self._newest = max(self._newest, message.number)
            return None
        elif message.batch.epoch != self._epoch:
            self.num_restarts += 1
            self.distrust()
            return None
        self._accept(message)
        self._replayed_ts = message.batch.ts
        self._num_replayed += 1
        return message

    def _begin_from(self, message: Message) -> None:
        """Restart the known contents from this message."""
        self._begin_catching_up()
        self._seen.clear()
        self._epoch = message.batch.epoch
        self._replayed_ts = message.batch.ts
        self._is_contradicted |= any(self._is_from_another_run(kept, message) for kept in self._ahead.values())
        self._newest = max(self._after_replay(), default=-1)

    def _contradicts_live(self, message: Message) -> bool:
        """Return whether another live message was received under the number of this replayed one.

        A snapshot has the number of another message (never 0), and empty messages may follow it in place of others;
        then the epochs are compared.
        """
        kept = self._ahead.get(message.number)
        if kept is None or kept.batch.epoch != message.batch.epoch:
            return kept is not None
        is_original = message.batch.epoch is None and (message.number == 0 or not message.is_snapshot)
        return is_original and kept.checksum != message.checksum

    def _is_from_another_run(self, kept: Message, message: Message) -> bool:
        """Return whether a live message and a snapshot come from different runs of the publisher.

        Epochs are compared, or times without epochs. If a clock went back this may be wrong; the only effect is another
        replay.
        """
        if kept.batch.epoch != message.batch.epoch:
            return True
        is_plain = message.is_snapshot and message.batch.epoch is None
        return is_plain and (kept.number - message.number) * (kept.batch.ts - message.batch.ts) < 0

    def _after_replay(self) -> list[int]:
        """Return the numbers of the kept live messages that are later than the replay."""
        return [number for number, kept in self._ahead.items() if self._is_after_replay(kept)]

    def _is_after_replay(self, kept: Message) -> bool:
        if kept.batch.epoch != self._epoch:
            return False
        return self._epoch is not None or kept.batch.ts >= self._replayed_ts

    def end_replay(self) -> Iterator[Message]:
        """Process the end of a replay. Yield those kept messages that come next.

        If messages are missing, `replay_from` is the next request. If the replay had none of them, the contents are
        untrusted, because only a replay from 0 helps.
        """
        is_contradicted = self._is_contradicted
        self._is_contradicted = self._is_replaying = self.is_void = False
        if self.trust is not Trust.CATCHING_UP:
            return
        self._is_in_snapshot = False
        while (message := self._ahead.get(self.last + 1)) is not None and self._is_after_replay(message):
            self._accept(message)
            self._num_replayed += 1
            yield message.with_events()
            if self.last < 0:  # it could not be applied, so nothing is trusted
                return
        if is_contradicted:
            self.distrust()
        elif max(self._newest, self._unread, *self._after_replay()) <= self.last and self.last + 1 not in self._ahead:
            self.trust = Trust.LIVE
            self._drop_ahead()
        elif not self._num_replayed:  # missing messages are lost, or kept ones are from an earlier life
            self.distrust()
        self._num_replayed = 0

    def distrust(self) -> None:
        """Mark the contents as untrusted, because the publisher restarted or a message could not be read."""
        self.trust = Trust.UNTRUSTED
        self.last = -1
        self._newest = self._unread = -1
        self._is_in_snapshot = self._is_contradicted = False
        self._seen.clear()
        self._drop_ahead()

    def _restart(self) -> None:
        """Mark the contents as untrusted after a restart. The rest of a replay may be from the earlier run."""
        self.distrust()
        self.is_void = self._is_replaying

    def note_unreadable_live(self, number: int) -> None:
        """Mark the contents as untrusted until a replay has reached this live message, which could not be read.

        The rest of a running replay may be from an earlier run of the publisher, so it is ignored.
        """
        unread = max(number, self._newest, self._unread, *self._ahead)
        self._restart()
        self._unread = unread

    def note_unreadable_replayed(self, number: int) -> None:
        """Mark the contents as untrusted until a replay has reached this message, which could not be read or applied.

        Kept live messages stay, and the rest of the replay is compared with them.
        """
        unread, is_contradicted = max(number, self._newest, self._unread, *self._ahead), self._is_contradicted
        ahead, num_bytes = self._ahead, self._ahead_bytes
        self._ahead = {}
        self.distrust()
        self._ahead, self._ahead_bytes = ahead, num_bytes
        self._unread, self._is_contradicted = unread, is_contradicted

    def _begin_catching_up(self) -> None:
        self.trust = Trust.CATCHING_UP
        self._num_replayed = 0

    def _accept(self, message: Message) -> None:
        self.last = message.number
        self._seen[message.number] = message.checksum
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def _keep(self, message: Message) -> None:
        if len(self._ahead) >= MOST_AHEAD or self._ahead_bytes + len(message.payload) > MOST_AHEAD_BYTES:
            self._drop_ahead()
        self._newest = max(self._newest, message.number)
        self._ahead[message.number] = message.without_events()
        self._ahead_bytes += len(message.payload)

    def _drop_ahead(self) -> None:
        self._ahead.clear()
        self._ahead_bytes = 0
