"""A network that loses, doubles, delays and cuts, between a cache's feed and a mirror; no sockets."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from blockyard.events.following.mirror import Mirror
from blockyard.events.following.stream import Trust
from blockyard.events.publishing.feed import MOST_PADDED, Feed
from blockyard.events.tables.checking import check_contents, check_trie
from blockyard.events.tables.content_table import ContentTable


class BriefFeed(Feed):
    """Its numbers from 0 begin anew after `most_padded`."""

    def __init__(self, most_padded: int, *options: Any) -> None:
        super().__init__(*options)
        self.most_padded = most_padded


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
        self.late: list[tuple[int, bytes]] = []
        self.feed = self._new_feed()

    def _new_feed(self) -> Feed:
        return BriefFeed(self.most_padded, ContentTable(self.config), self.from_clock, self.replayed, None, self._clock)

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def restart(self, config: Any) -> None:
        """The publisher's process is another one; its cache is new and empty. Sometimes the clock went back."""
        self.counts["restarts"] += 1
        self.config = config
        self.now += self.draw.choice((5.0, 5.0, -3.0))
        self.feed = self._new_feed()

    def tell(self, changes: Any) -> None:
        message = self.feed.changed(changes)
        check_contents(self.feed._table)
        if message is not None:
            self._send(message)

    def _send(self, message: tuple[int, bytes]) -> None:
        chance = self.draw.random()
        if not self.is_listening:
            self.is_listening = self.draw.random() < 0.05
            self.counts["not heard"] += 1
        elif chance < 0.05:
            self.counts["lost"] += 1
        elif chance < 0.1:
            self.late.append(message)
        else:
            self.mirror.live(self.name, *message)
            if chance < 0.15:
                self.counts["doubled"] += 1
                self.mirror.live(self.name, *message)
        if self.late and self.draw.random() < 0.3:
            self.counts["late"] += 1
            self.mirror.live(self.name, *self.late.pop(self.draw.randrange(len(self.late))))
        if self.draw.random() < 0.02:
            self.is_listening = False
        if self.draw.random() < 0.2:
            self.ask()

    def ask(self) -> None:
        """One replay, which may break off in the middle."""
        start = self.mirror.replay_from(self.name)
        if start is None:
            return
        for message in self.feed.replay(start):
            if self.draw.random() < 0.05:
                self.counts["replays cut"] += 1
                return
            self.mirror.replayed(self.name, *message)
        self.mirror.end_of_replay(self.name)

    def beat(self) -> None:
        """A heartbeat that arrives, and replays until nothing is missing."""
        self.is_listening = True
        self.mirror.live(self.name, *self.feed.beat())
        for _ in range(200):
            if self.mirror.trust(self.name) is Trust.LIVE:
                for trie in self.mirror._tries.values():
                    check_trie(trie)
                return
            self.ask()
        raise AssertionError(f"still {self.mirror.trust(self.name)} after 200 replays")
