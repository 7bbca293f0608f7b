"""A network that loses, doubles, delays and cuts, between a cache's feed and a mirror; no sockets."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from blockyard.events.following.mirror import Mirror
from blockyard.events.following.stream import Trust
from blockyard.events.publishing.feed import MOST_PADDED, Feed, replace_placeholders
from blockyard.events.publishing.publisher import merge_events
from blockyard.events.tables.content_table import ContentTable
from blockyard.events.tables.table_checks import check_contents, check_trie
from blockyard.events.wire import AllBlocksCleared, Batch, Event, Payload, decode_batch, encode_batch

UNREADABLE = b"\xc1"


class BriefFeed(Feed):
    """Its numbers from 0 begin anew after `most_padded`."""

    def __init__(self, most_padded: int, *options: Any) -> None:
        super().__init__(*options)
        self.most_padded = most_padded


class RingFeed:
    """A publisher as vLLM has it: numbers from 0, the latest messages for a replay, no snapshot, heartbeat or epoch.

    It says that all is cleared when its cache is reset, and at no other time.
    """

    def __init__(self, table: ContentTable, replayed: int, clock: Any) -> None:
        self._table = table
        self._clock = clock
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=replayed)
        self._next = 0

    def make_message(self, changes: Any) -> tuple[int, bytes] | None:
        events = self._table.apply(replace_placeholders(changes))
        return self._number(events) if events else None

    def heartbeat(self) -> tuple[int, bytes]:
        """Some message or other."""
        return self._number([])

    def _number(self, events: list[Event]) -> tuple[int, bytes]:
        self._ring.append((self._next, encode_batch(Batch(self._clock(), events, 0))))
        self._next += 1
        return self._ring[-1]

    def replay(self, start: int) -> Iterator[tuple[int, Payload]]:
        return iter([message for message in self._ring if message[0] >= start])

    def has_all(self) -> bool:
        """Whether a consumer that knows nothing can know all from the ring."""
        if self._ring[0][0] == 0:
            return True
        events = [event for _, payload in self._ring for event in decode_batch(payload).events]
        return any(isinstance(event, AllBlocksCleared) for event in events)


class Wire:
    """One publisher after another under one name, and a mirror that hears some of what they say."""

    def __init__(self, config: Any, seed: int, mirror: Mirror | None = None, name: str = "worker") -> None:
        self.draw = random.Random(seed)
        self.config = config
        self.mirror = mirror or Mirror(hash_seed=1)
        self.name = name
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        self.from_clock = self.draw.random() < 0.5
        self.replayed = self.draw.choice((1, 3, 20, 1000))
        self.is_listening = self.draw.random() < 0.7
        #: In some worlds numbers from 0 begin anew soon.
        self.most_padded = self.draw.choice((5, 40, MOST_PADDED))
        self.by_content = self.draw.random() < 0.5
        #: In some worlds the publisher is not ours.
        self.is_foreign = self.draw.random() < 0.25
        #: In some worlds it is often far behind, and what it gets is merged.
        self.patience = self.draw.choice((0.0, 0.0, 0.9))
        self.unsent: Any = None
        #: Whether more than some of its live messages cannot be read now.
        self.is_hard_to_read = False
        #: What is still to come of the replay that was asked for, with its end (None).
        self.answer: list[tuple[int, Payload] | None] = []
        self.late: list[tuple[int, Payload]] = []
        self.feed = self._new_feed()

    def _new_feed(self) -> Feed | RingFeed:
        self.unsent, self.born = None, self.now
        #: The highest number that was heard live of this life.
        self.heard = -1
        table = ContentTable(self.config, self.by_content)
        if self.is_foreign:
            return RingFeed(table, self.replayed, self._clock)
        bits = self.draw.getrandbits
        return BriefFeed(self.most_padded, table, self.from_clock, self.replayed, None, self._clock, bits)

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def restart(self, config: Any) -> None:
        """The publisher's process is another one; its cache is new and empty.

        Sometimes the clock went back, or stood still: then the first messages are those of the publisher before.
        """
        self.counts["restarts"] += 1
        self.config = config
        chance = self.draw.choice((5.0, 5.0, -3.0, 0.0))
        self.now = self.now + chance if chance else self.born
        if self.draw.random() < 0.5:
            self.leave_an_answer()
        self.feed = self._new_feed()
        if self.is_foreign:  # nothing tells its lives apart when first messages are lost, or the last ones come later
            self.now += 0.5 * self.counts["restarts"]  # no message is one of an earlier life, byte for byte
            self.late.clear()
            number, payload = self.feed.heartbeat()
            self.hear(number, UNREADABLE if self.draw.random() < 0.3 else payload)
        self.hear_answer(self.draw.choice((0, 1000)))

    def leave_an_answer(self) -> None:
        """The last messages are lost or cannot be read, and the answer to a replay is on its way when the process ends.

        Of it some more may arrive in its next life, the first messages of which may be unreadable.
        """
        self.feed.heartbeat()
        number, payload = self.feed.heartbeat()
        self.hear(number, UNREADABLE if self.draw.random() < 0.5 else payload)
        self.ask()
        self.hear_answer(self.draw.randrange(3))
        if self.draw.random() < 0.5:
            self.answer = self.answer[: self.draw.randrange(len(self.answer) + 1)]
        self.counts["answers of an earlier life"] += bool(self.answer)
        self.is_hard_to_read = self.draw.random() < 0.5

    def tell(self, changes: Any) -> None:
        """What a cache told, now or, where the publisher is behind, as one with what comes later."""
        if self.unsent is not None:
            changes = merge_events(self.unsent, changes)
            self.counts["merged"] += 1
        self.unsent = changes
        if self.draw.random() >= self.patience:
            self.drain()

    def drain(self) -> None:
        """The publisher has taken in all."""
        if self.unsent is None:
            return
        message = self.feed.make_message(self.unsent)
        self.unsent = None
        check_contents(self.feed._table)
        if message is not None:
            self._send(message)

    def _send(self, message: tuple[int, Payload]) -> None:
        chance = self.draw.random()
        if not self.is_listening:
            self.is_listening = self.draw.random() < 0.05
            self.counts["not heard"] += 1
        elif chance < 0.05:
            self.counts["lost"] += 1
        elif chance < 0.1:
            self.late.append(message)
        elif chance < (0.6 if self.is_hard_to_read else 0.12):
            self.is_hard_to_read = self.draw.random() < 0.8
            self.counts["unreadable"] += 1
            self.hear(message[0], UNREADABLE)
        else:
            self.hear(*message)
            if chance > 0.95:
                self.counts["doubled"] += 1
                self.hear(*message)
        if self.late and self.draw.random() < 0.3:
            self.counts["late"] += 1
            self.hear(*self.late.pop(self.draw.randrange(len(self.late))))
        if self.draw.random() < 0.02:
            self.is_listening = False
        if self.draw.random() < 0.2:
            self.ask()
        self.hear_answer(self.draw.choice((0, 0, 1, 2, 9)))

    def hear(self, number: int, payload: Payload) -> None:
        """A live message arrives."""
        self.heard = max(self.heard, number)
        self.mirror.receive_live(self.name, number, payload)
        self.check_life()

    def check_life(self) -> None:
        """Of a publisher without epochs, what a mirror believes is of the life of which something was heard."""
        order = self.mirror._workers[self.name].order
        if self.is_foreign and self.heard >= 0 and order.trust is Trust.LIVE:
            self.counts["lives told apart"] += 1
            ring = {number: crc32(payload) for number, payload in self.feed.replay(0)}
            assert self.heard <= order.last <= max(ring), "LIVE with an earlier life"
            assert ring.get(order.last) in (None, order._seen[order.last]), "LIVE with an earlier life"

    def ask(self) -> None:
        """Ask for a replay, if something is missing and none is on its way. It may break off in the middle."""
        if self.mirror.is_replay_void(self.name):
            self.counts["answers dropped"] += 1
            self.answer = []
        start = self.mirror.replay_from(self.name)
        if self.answer or start is None:
            return
        self.mirror.begin_replay(self.name)
        self.answer = [*self.feed.replay(start), None]
        where = self.draw.randrange(len(self.answer))
        chance = self.draw.random()
        if chance < 0.1:
            self.counts["replays cut"] += 1
            del self.answer[where:]
        elif chance < 0.25 and self.answer[where] is not None:
            self.counts["unreadable in a replay"] += 1
            self.answer[where] = (self.answer[where][0], UNREADABLE)

    def hear_answer(self, most: int) -> None:
        """At most so many messages of the answer that is on its way arrive, unless it is dropped."""
        while self.answer and most and not self.mirror.is_replay_void(self.name):
            most -= 1
            message = self.answer.pop(0)
            if message is None:
                self.mirror.end_replay(self.name)
            else:
                self.mirror.receive_replayed(self.name, *message)
            self.check_life()

    def beat(self) -> None:
        """A heartbeat that arrives, and replays until nothing is missing, or it is clear that something stays so."""
        self.drain()
        self.is_listening = True
        self.hear(*self.feed.heartbeat())
        for _ in range(200):
            if self.mirror.trust(self.name) is Trust.LIVE:
                self.counts["whole without a snapshot"] += self.is_foreign
                for trie in self.mirror._tries.values():
                    check_trie(trie)
                return
            if isinstance(self.feed, RingFeed) and not self.feed.has_all() and self.mirror.replay_from(self.name) == 0:
                self.counts["never whole"] += 1
                return
            self.ask()
            self.hear_answer(len(self.answer))
        raise AssertionError(f"still {self.mirror.trust(self.name)} after 200 replays")
