"""One publisher's messages in the right order, whatever the network did to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple
from zlib import crc32

import msgspec

from ..wire import AllBlocksCleared, Batch, Payload, decode_batch

#: Live messages that are kept while a replay is awaited; with more, another replay is needed.
MOST_AHEAD = 4096
MOST_AHEAD_BYTES = 2**26
#: A checksum is kept of this many latest messages, to tell one that came twice from one of a publisher that began anew.
REMEMBERED = 1024


class Trust(Enum):
    """Whether what is known of a publisher's cache can be relied on."""

    #: All messages so far are there.
    LIVE = "live"
    #: Some are missing, and a replay is awaited: what is known was right at some moment.
    CATCHING_UP = "catching up"
    #: Nothing is known yet, or the publisher began anew.
    UNTRUSTED = "untrusted"


class Message(NamedTuple):
    """A numbered message, decoded."""

    number: int
    batch: Batch
    checksum: int
    payload: Payload

    @property
    def is_snapshot(self) -> bool:
        """Returns whether it needs none before it: on the way it says that nothing is cached any more."""
        return any(isinstance(event, AllBlocksCleared) for event in self.batch.events)

    def as_snapshot(self) -> Message:
        """Returns the message of a publisher whose cache was empty before it."""
        return self._replace(batch=msgspec.structs.replace(self.batch, events=[AllBlocksCleared(), *self.batch.events]))

    def without_events(self) -> Message:
        """Drops the events of a message that has to wait: decoded they may take 80 times its bytes."""
        return self._replace(batch=Batch(self.batch.ts, [], self.batch.data_parallel_rank, self.batch.epoch))

    def with_events(self) -> Message:
        """Decodes it again."""
        return self._replace(batch=decode_batch(self.payload))

    @staticmethod
    def of(number: int, payload: Payload) -> Message:
        """Raises `InvalidArgument` for a payload that cannot be read."""
        return Message(number, decode_batch(payload), crc32(payload), payload)


class MessageOrder:
    """Decides for each message whether it is next, came before, or shows that some are missing.

    Numbers go up by one. A message that was seen is passed over; one with the number of another, or with another epoch,
    is of a publisher that began anew. After a gap `replay_from` says from where a replay is needed (0: from the
    beginning), and what comes meanwhile is kept. A replay answers from there, or with a snapshot under any number. One
    from 0 that begins with number 0 is complete without a snapshot: publishers number from 0 when their cache is empty.
    A replay that lacks a message that was heard, or has another one under its number, does not make it LIVE.
    A publisher that keeps some messages and makes no snapshots (vLLM, SGLang) may have none of those that are missing;
    its answer then begins with a later number, and nothing is trusted until it clears its cache or starts again.
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
        #: The highest number that is known to have been sent, by any message since the last one that was applied.
        self._newest = -1
        #: The number of a message that was heard and could not be read.
        self._unread = -1
        #: When the latest replayed message was made; what came live and is older is applied where a replay has it too.
        self._replayed_ts = 0.0
        #: Whether a replay is of another life than what was heard: one of the two is over.
        self._is_contradicted = False
        #: Whether a replay was asked for or has begun, and has not ended; and whether nothing of it counts any more.
        self._is_replaying = False
        self.is_void = False
        self._num_replayed = 0
        #: Whether a snapshot was read, and not yet the end of its replay: messages behind it may stand for it too.
        self._is_in_snapshot = False

    @property
    def replay_from(self) -> int | None:
        """Return the first number that is missing, 0 for all; None while nothing is."""
        if self.trust is Trust.LIVE:
            return None
        return 0 if self.trust is Trust.UNTRUSTED or self._is_in_snapshot else self.last + 1

    def begin_replay(self) -> None:
        """Forgets what is left of an earlier answer: another replay is asked for, where nothing of that one arrives."""
        self._is_replaying = True
        self.is_void = self._is_contradicted = False
        self._num_replayed = 0

    def live(self, message: Message) -> Message | None:
        """Takes a live message, and returns it if it is the next one."""
        number = message.number
        if self.trust is Trust.UNTRUSTED:
            # It began anew, or a replay has what is dropped.
            if number < max(self._newest, self._unread) and not self._is_kept(message):
                self._begin_anew()
            self._keep(message)
        elif message.batch.epoch != self._epoch or self._is_another(message):
            self.num_restarts += 1
            self._begin_anew()
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
        """Return whether its number was another message's, or is too old to say."""
        return message.number <= self.last and self._seen.get(message.number) != message.checksum

    def replayed(self, message: Message) -> Message | None:
        """Takes a message of a replay, and returns what is to be applied. A snapshot stands for all before it."""
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
        """Begin all that is known with this message."""
        self._begin_catching_up()
        self._seen.clear()
        self._epoch = message.batch.epoch
        self._replayed_ts = message.batch.ts
        self._is_contradicted |= any(self._is_of_another_life(kept, message) for kept in self._ahead.values())
        self._newest = max(self._after_replay(), default=-1)

    def _was_heard_otherwise(self, message: Message) -> bool:
        """Returns whether another message has come live under the number of a replayed one.

        A snapshot has the number of a message that it is not, though never 0, and may be followed by empty messages in
        place of others; there the epoch tells.
        """
        kept = self._ahead.get(message.number)
        if kept is None or kept.batch.epoch != message.batch.epoch:
            return kept is not None
        is_original = message.batch.epoch is None and (message.number == 0 or not message.is_snapshot)
        return is_original and kept.checksum != message.checksum

    def _is_of_another_life(self, kept: Message, message: Message) -> bool:
        """Returns whether what came live may be of another life than a snapshot, by epochs or else by times.

        Where a clock went back it may look so for one life; then another replay is needed, and no more.
        """
        if kept.batch.epoch != message.batch.epoch:
            return True
        is_plain = message.is_snapshot and message.batch.epoch is None
        return is_plain and (kept.number - message.number) * (kept.batch.ts - message.batch.ts) < 0

    def _after_replay(self) -> list[int]:
        """Returns the numbers of what came live and is younger than the replay."""
        return [number for number, kept in self._ahead.items() if self._is_after_replay(kept)]

    def _is_after_replay(self, kept: Message) -> bool:
        if kept.batch.epoch != self._epoch:
            return False
        return self._epoch is not None or kept.batch.ts >= self._replayed_ts

    def end_of_replay(self) -> Iterator[Message]:
        """The replay is whole: what came meanwhile and is next now. Where more is missing, `replay_from` says so.

        Where messages are missing and the replay gave none of them, nothing is trusted: only one from 0 helps.
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
            if self.last < 0:  # it could not be applied, and nothing is trusted
                return
        if is_contradicted:
            self.distrust()
        elif max(self._newest, self._unread, *self._after_replay()) <= self.last and self.last + 1 not in self._ahead:
            self.trust = Trust.LIVE
            self._drop_ahead()
        elif not self._num_replayed:  # what is missing is gone, or what is kept is of an earlier life of the publisher
            self.distrust()
        self._num_replayed = 0

    def distrust(self) -> None:
        """Trust nothing that is known: the publisher began anew, or a message could not be read."""
        self.trust = Trust.UNTRUSTED
        self.last = -1
        self._newest = self._unread = -1
        self._is_in_snapshot = self._is_contradicted = False
        self._seen.clear()
        self._drop_ahead()

    def _begin_anew(self) -> None:
        """Forgets what is known, as the publisher began anew: the rest of a replay may be of its earlier life."""
        self.distrust()
        self.is_void = self._is_replaying

    def miss_live(self, number: int) -> None:
        """Drops all trust until a replay has come to this message, which was heard and could not be read.

        What is left of an answer that is on its way may be of an earlier life than the message, and does not count.
        """
        unread = max(number, self._newest, self._unread, *self._ahead)
        self._begin_anew()
        self._unread = unread

    def miss_replayed(self, number: int) -> None:
        """Drops all trust until a replay has come to this message, which could not be read or applied.

        What came live stays in mind: the rest of the answer is judged by it.
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

    def _is_kept(self, message: Message) -> bool:
        kept = self._ahead.get(message.number)
        return kept is not None and kept.checksum == message.checksum

    def _keep(self, message: Message) -> None:
        if len(self._ahead) >= MOST_AHEAD or self._ahead_bytes + len(message.payload) > MOST_AHEAD_BYTES:
            self._drop_ahead()
        self._newest = max(self._newest, message.number)
        self._ahead[message.number] = message.without_events()
        self._ahead_bytes += len(message.payload)

    def _drop_ahead(self) -> None:
        self._ahead.clear()
        self._ahead_bytes = 0
