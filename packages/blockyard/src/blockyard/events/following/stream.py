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
    """Whether the known contents of a publisher's cache are reliable."""

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
        """Return whether it needs no message before it, because it clears all blocks."""
        return any(isinstance(event, AllBlocksCleared) for event in self.batch.events)

    def as_snapshot(self) -> Message:
        """Return the message of a publisher whose cache was empty before it."""
        return self._replace(batch=msgspec.structs.replace(self.batch, events=[AllBlocksCleared(), *self.batch.events]))

    def without_events(self) -> Message:
        """Return it without decoded events, which may take 80 times the bytes, to keep it for later."""
        return self._replace(batch=Batch(self.batch.ts, [], self.batch.data_parallel_rank, self.batch.epoch))

    def with_events(self) -> Message:
        """Return it decoded again."""
        return self._replace(batch=decode_batch(self.payload))

    @staticmethod
    def of(number: int, payload: Payload) -> Message:
        """Decode a payload. Raises `InvalidArgument` if it cannot be read."""
        return Message(number, decode_batch(payload), crc32(payload), payload)


class MessageOrder:
    """Decides whether a message is the next one, a repeated one, or shows a gap.

    Numbers increase by one. A repeated message is ignored; another message under the same number, or another epoch,
    means that the publisher restarted. After a gap `replay_from` is the number to request a replay from (0: the
    beginning), and later messages are kept. A replay has the messages from there, or a snapshot under any number. A
    replay from 0 that begins with number 0 is complete without a snapshot, because publishers number from 0 when their
    cache is empty. A replay that lacks a received message, or has a different one under its number, does not make it
    LIVE. A publisher without snapshots (vLLM, SGLang) may no longer have the missing messages; its replay then begins
    with a later number, and nothing is trusted until it clears its cache or restarts.
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
        """Return the first missing number, 0 for all; None if none is missing."""
        if self.trust is Trust.LIVE:
            return None
        return 0 if self.trust is Trust.UNTRUSTED or self._is_in_snapshot else self.last + 1

    def begin_replay(self) -> None:
        """Record that another replay is requested, on a connection without messages of an earlier one."""
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
        """Process a message of a replay; return the message to apply, if any. A snapshot replaces all before it."""
        self._is_replaying = True
        if self.is_void:
            return None
        self._is_contradicted |= self._was_heard_otherwise(message)
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
        self._is_contradicted |= any(self._is_of_another_life(kept, message) for kept in self._ahead.values())
        self._newest = max(self._after_replay(), default=-1)

    def _was_heard_otherwise(self, message: Message) -> bool:
        """Return whether another live message was received under the number of a replayed one.

        A snapshot has the number of a message that it is not (never 0), and empty messages may follow it in place of
        others; then the epoch decides.
        """
        kept = self._ahead.get(message.number)
        if kept is None or kept.batch.epoch != message.batch.epoch:
            return kept is not None
        is_original = message.batch.epoch is None and (message.number == 0 or not message.is_snapshot)
        return is_original and kept.checksum != message.checksum

    def _is_of_another_life(self, kept: Message, message: Message) -> bool:
        """Return whether a live message may be from another life than a snapshot, by epochs or else by times.

        If a clock went back this may be wrong; the only effect is another replay.
        """
        if kept.batch.epoch != message.batch.epoch:
            return True
        is_plain = message.is_snapshot and message.batch.epoch is None
        return is_plain and (kept.number - message.number) * (kept.batch.ts - message.batch.ts) < 0

    def _after_replay(self) -> list[int]:
        """Return the numbers of live messages that are later than the replay."""
        return [number for number, kept in self._ahead.items() if self._is_after_replay(kept)]

    def _is_after_replay(self, kept: Message) -> bool:
        if kept.batch.epoch != self._epoch:
            return False
        return self._epoch is not None or kept.batch.ts >= self._replayed_ts

    def end_replay(self) -> Iterator[Message]:
        """Process the end of a replay; yield the kept messages that are next.

        `replay_from` tells if others are missing.

        If messages are missing and the replay had none of them, nothing is trusted: only a replay from 0 helps.
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
        """Drop all trust: the publisher restarted, or a message could not be read."""
        self.trust = Trust.UNTRUSTED
        self.last = -1
        self._newest = self._unread = -1
        self._is_in_snapshot = self._is_contradicted = False
        self._seen.clear()
        self._drop_ahead()

    def _restart(self) -> None:
        """Drop all trust because the publisher restarted: the rest of a replay may be from its earlier life."""
        self.distrust()
        self.is_void = self._is_replaying

    def miss_live(self, number: int) -> None:
        """Drop all trust until a replay has reached this unreadable live message.

        The rest of a running replay may be from an earlier life than the message, so it is ignored.
        """
        unread = max(number, self._newest, self._unread, *self._ahead)
        self._restart()
        self._unread = unread

    def miss_replayed(self, number: int) -> None:
        """Drop all trust until a replay has reached this message, which could not be read or applied.

        Kept live messages stay, and the rest of the replay is checked against them.
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
