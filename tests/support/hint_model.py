"""Hints around least recently used as lists and dicts: slow, obvious, and written without the core."""

from __future__ import annotations

from typing import Any

FAR = 8.0


class HintModel:
    """Blocks, whose they are, what was said, and what goes next.

    owner: block → (session, number of the sequence), None where it is shared; missing where nobody has used it.
    idle: blocks in the order in which they became idle, or were given back, as least recently used has them.
    kept: those that it would have evicted, were they not kept.
    order: when each became idle. old_since: and when its session held it no more.
    said: session → "over" or a time. since: when a session that is over came to have idle blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owner: dict[int, Any] = {}
        self.idle: list[int] = []
        self.kept: list[int] = []
        self.order: dict[int, int] = {}
        self.old_since: dict[int, int] = {}
        self.said: dict[str, Any] = {}
        self.since: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.now = 0.0
        self.turnover = float("inf")
        self.round_began = 0.0
        self.num_in_round = 0
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
            # What it holds no more was given back when its newest sequence began.
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

    def remove(self, block: int) -> None:
        (self.idle if block in self.idle else self.kept).remove(block)

    def evict(self) -> int:
        self.num_in_round += 1
        if self.num_in_round >= self.num_blocks:
            self.turnover, self.round_began, self.num_in_round = self.now - self.round_began, self.now, 0
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
        back = [block for block in everything if self.is_expected(block)]
        last = max(back, key=lambda block: self.said[self.of(block) or ""], default=0)
        turnover = max(self.turnover, self.now - self.round_began)
        if last and turnover > 0 and self.said[self.of(last) or ""] - self.now > FAR * turnover:
            return last
        while self.idle and self.is_expected(self.idle[0]):
            self.kept.append(self.idle.pop(0))
        return self.idle[0] if self.idle else last

    def is_expected(self, block: int) -> bool:
        return isinstance(self.said.get(self.of(block) or ""), float) and self.is_current(block)
