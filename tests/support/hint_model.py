"""Hints around least recently used as lists and dicts: slow, obvious, and written without the core."""

from __future__ import annotations

from typing import Any


class HintModel:
    """Blocks, whose they are, what was said, and what goes next.

    owner: block → (session, number of the sequence), None where it is shared; missing where nobody has used it.
    idle: blocks in the order in which they became idle, or were released, as least recently used has them.
    kept: those that it would have evicted, were they not kept. chosen: the one of them that nobody is to come back for.
    order: when each became idle, idle_from: in logical time. old_since: and when its session held it no more.
    said: session → "over" or a time. since: when a session that is over came to have idle blocks.
    """

    def __init__(self) -> None:
        self.owner: dict[int, Any] = {}
        self.idle: list[int] = []
        self.kept: list[int] = []
        self.chosen = 0
        self.order: dict[int, int] = {}
        self.idle_from: dict[int, float] = {}
        self.old_since: dict[int, int] = {}
        self.said: dict[str, Any] = {}
        self.since: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.now = 0.0
        self.count = 0

    def tick(self) -> int:
        self.count += 1
        return self.count

    # Sessions.

    def begin(self, session: str) -> None:
        self.say(session, None)
        number = self.tick()
        held = [block for block in self.order if self.of(block) == session and self.is_current(block)]
        self.old_since |= dict.fromkeys(held, number)
        self.latest[session] = number

    def forget(self, session: str) -> None:
        self.say(session, None)
        del self.latest[session]
        for block, owner in list(self.owner.items()):
            if owner is not None and owner[0] == session:
                self.owner[block] = None

    def say(self, session: str, said: Any) -> None:
        self.said[session] = said
        if said is None:
            mine = [block for block in sorted(self.kept, key=lambda b: self.order[b]) if self.of(block) == session]
            mine = [block for block in mine if block != self.chosen]
            # What it holds no more was released when its newest sequence began.
            self.idle += mine
            self.kept = [block for block in self.kept if block not in mine]

    def advance(self, now: float) -> None:
        self.now = now
        late = [(said, s) for s, said in self.said.items() if isinstance(said, float) and said < now]
        for _, session in sorted(late, key=lambda item: item[0]):
            self.say(session, None)

    def of(self, block: int) -> str | None:
        owner = self.owner.get(block)
        return owner[0] if owner else None

    def is_current(self, block: int) -> bool:
        owner = self.owner.get(block)
        return bool(owner) and owner[1] == self.latest[owner[0]]

    # Blocks.

    def mark(self, block: int, session: str | None, sequence: int = 0) -> None:
        """A sequence ends that used `block`: the session's of that number, or one without a session."""
        owner = self.owner.get(block, ())
        if session is None or owner is None or (owner and owner[0] != session):
            self.owner[block] = None
        elif not owner or sequence > owner[1]:
            self.owner[block] = (session, sequence)

    def insert(self, block: int) -> None:
        self.idle.append(block)
        self.order[block] = self.tick()
        self.old_since[block] = self.order[block]
        self.idle_from[block] = self.now

    def remove(self, block: int) -> None:
        if block == self.chosen:
            self.chosen = 0
        (self.idle if block in self.idle else self.kept).remove(block)

    def evict(self) -> int:
        block = self.choose()
        self.remove(block)
        return block

    def choose(self) -> int:
        everything = sorted(self.idle + self.kept, key=lambda block: self.order[block])
        over = [block for block in everything if self.said.get(self.of(block) or "") == "over"]
        if over:
            first = min(over, key=lambda block: self.since[self.of(block) or ""])
            mine = [block for block in over if self.of(block) == self.of(first)]
            return min(mine, key=lambda block: (self.is_current(block), self.old_since[block], self.order[block]))
        if self.chosen and self.is_expected(self.chosen):
            self.chosen = 0
        while not self.chosen and self.idle:
            block = self.idle.pop(0)
            self.kept.append(block)
            self.chosen = 0 if self.is_expected(block) else block
        back = [block for block in everything if self.is_expected(block)]
        last = max(back, key=lambda block: self.said[self.of(block) or ""], default=0)
        if last and self.chosen:
            idle_for = self.now - self.idle_from[self.chosen]
            is_later = 0 < idle_for < self.said[self.of(last) or ""] - self.now
            return last if is_later else self.chosen
        return last or self.chosen

    def is_expected(self, block: int) -> bool:
        return isinstance(self.said.get(self.of(block) or ""), float) and self.is_current(block)
