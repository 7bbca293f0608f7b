"""Each eviction policy once more, slow and obvious: lists, dicts and `min`. None of it imports the core.

A model is told what a policy is told and names the block it would evict. Where a policy keeps a heap or linked lists,
its model looks at all idle blocks.
"""

from __future__ import annotations

Block = int
Key = int


class Model:
    """Idle blocks in the order in which they became idle; the first is evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.idle: list[Block] = []
        self.content: dict[Block, Key] = {}

    def insert(self, block: Block, key: Key, depth: int) -> None:
        self.content[block] = key
        self.idle.append(block)

    def hit(self, block: Block, key: Key) -> None:
        pass

    def uncache(self, block: Block) -> None:
        pass

    def remove(self, block: Block) -> None:
        self.idle.remove(block)

    def victim(self) -> Block:
        return self.idle[0]

    def evict(self) -> Block:
        block = self.victim()
        self.idle.remove(block)
        del self.content[block]
        return block

    def clear(self) -> None:
        self.idle = []
        self.content = {}

    def grow(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks


class FIFOModel(Model):
    """Evicts the content that first became idle the longest ago."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.arrivals: list[tuple[Block, Key]] = []

    def insert(self, block: Block, key: Key, depth: int) -> None:
        if self.content.get(block) != key:
            self.arrivals.append((block, key))
        super().insert(block, key, depth)

    def victim(self) -> Block:
        latest = {pair: place for place, pair in enumerate(self.arrivals)}
        return min(self.idle, key=lambda block: latest[block, self.content[block]])


class LFUModel(Model):
    """A list of all requests; a block's count is taken when it becomes idle, and `min` takes the first of equals.

    Where two blocks hold the same content, requests that the other one serves do not save this one.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.requests: list[Key] = []
        self.count: dict[Block, int] = {}

    def insert(self, block: Block, key: Key, depth: int) -> None:
        if self.content.get(block) != key:
            self.requests.append(key)
        self.count[block] = self.requests.count(key)
        super().insert(block, key, depth)

    def hit(self, block: Block, key: Key) -> None:
        self.requests.append(key)

    def victim(self) -> Block:
        return min(self.idle, key=lambda block: self.count[block])

    def clear(self) -> None:
        super().clear()
        self.requests = []


class ScoreModel(Model):
    """The time at which a block became idle, later by a credit for each hit, earlier by its depth."""

    def __init__(self, num_blocks: int, hit_credit: int = 0, depth_cost: int = 0) -> None:
        super().__init__(num_blocks)
        self.hit_credit = hit_credit or max(num_blocks // 4, 1)
        self.depth_cost = depth_cost
        self.time = 0
        self.hits: dict[Block, int] = {}
        self.score: dict[Block, int] = {}

    def _meet(self, block: Block, key: Key) -> None:
        self.time += 1
        if self.content.get(block) != key:
            self.content[block] = key
            self.hits[block] = 0

    def hit(self, block: Block, key: Key) -> None:
        self._meet(block, key)
        self.hits[block] += 1

    def insert(self, block: Block, key: Key, depth: int) -> None:
        self._meet(block, key)
        credit = min(self.hits[block], 64) * self.hit_credit
        self.score[block] = self.time + credit - depth * self.depth_cost
        super().insert(block, key, depth)

    def victim(self) -> Block:
        return min(self.idle, key=lambda block: self.score[block])


class Memory:
    """The keys of the latest `size` evicted contents."""

    def __init__(self) -> None:
        self.keys: list[Key] = []

    def remember(self, key: Key, size: int) -> None:
        self.keys = [*(other for other in self.keys if other != key), key][-size:]

    def take(self, key: Key) -> bool:
        known = key in self.keys
        self.keys = [other for other in self.keys if other != key]
        return known


class S3FIFOModel(Model):
    """Two queues as lists of blocks. Blocks in use are in neither, and their queue and hits are remembered."""

    def __init__(self, num_blocks: int, small_percent: int = 30) -> None:
        super().__init__(num_blocks)
        self.small_percent = small_percent
        self.queues: dict[str, list[Block]] = {"small": [], "main": []}
        self.home: dict[Block, str] = {}
        self.hits: dict[Block, int] = {}
        self.memory = Memory()

    def _meet(self, block: Block, key: Key) -> None:
        if self.content.get(block) != key:
            self.content[block] = key
            self.hits[block] = 0
            self.home[block] = "main" if self.memory.take(key) else "small"

    def insert(self, block: Block, key: Key, depth: int) -> None:
        self._meet(block, key)
        self.queues[self.home[block]].append(block)

    def hit(self, block: Block, key: Key) -> None:
        self._meet(block, key)
        self.hits[block] = min(self.hits[block] + 1, 3)

    def remove(self, block: Block) -> None:
        self.queues[self.home[block]].remove(block)

    def evict(self) -> Block:
        small, main = self.queues["small"], self.queues["main"]
        while True:
            is_large = len(small) > (len(small) + len(main)) * self.small_percent / 100
            queue = small if not main or (small and is_large) else main
            block = queue.pop(0)
            if self.hits[block] == 0:
                key = self.content.pop(block)
                if queue is small:
                    self.memory.remember(key, self.num_blocks)
                return block
            self.hits[block] = 0 if queue is small else self.hits[block] - 1
            self.home[block] = "main"
            main.append(block)

    def clear(self) -> None:
        super().clear()
        self.queues = {"small": [], "main": []}
        self.memory = Memory()


class ARCModel(Model):
    """Two lists, two memories of what left them, and a target for the first list that the memories move."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.lists: dict[str, list[Block]] = {"once": [], "often": []}
        self.memories = {"once": Memory(), "often": Memory()}
        self.kind: dict[Block, str] = {}
        self.target = 0

    def _meet(self, block: Block, key: Key) -> None:
        if self.content.get(block) == key:
            return
        self.content[block] = key
        once, often = (len(self.memories[kind].keys) for kind in ("once", "often"))
        self.kind[block] = "often"
        if self.memories["once"].take(key):
            self.target = min(self.target + max(often // once, 1), self.num_blocks)
        elif self.memories["often"].take(key):
            self.target = max(self.target - max(once // often, 1), 0)
        else:
            self.kind[block] = "once"

    def insert(self, block: Block, key: Key, depth: int) -> None:
        self._meet(block, key)
        self.lists[self.kind[block]].append(block)

    def hit(self, block: Block, key: Key) -> None:
        self._meet(block, key)
        self.kind[block] = "often"

    def remove(self, block: Block) -> None:
        (self.lists["once"] if block in self.lists["once"] else self.lists["often"]).remove(block)

    def evict(self) -> Block:
        once = len(self.lists["once"])
        kind = "once" if once and (once > self.target or not self.lists["often"]) else "often"
        block = self.lists[kind].pop(0)
        self.memories[kind].remember(self.content.pop(block), self.num_blocks)
        return block

    def clear(self) -> None:
        super().clear()
        self.lists = {"once": [], "often": []}
        self.memories = {"once": Memory(), "often": Memory()}
        self.target = 0


class RetentionModel(Model):
    """Retention requests by block: (content, priority, expiry). Blocks without one belong to the inner model."""

    def __init__(self, num_blocks: int, inner: Model) -> None:
        super().__init__(num_blocks)
        self.inner = inner
        self.depth: dict[Block, int] = {}
        self.wishes: dict[Block, tuple[Key, int, float | None]] = {}
        #: Of each idle block, whether it is the inner model's.
        self.is_inner: dict[Block, bool] = {}
        #: How wishes ended: evicted, expired, released, dropped.
        self.ends = [0, 0, 0, 0]

    def wish(self, block: Block, key: Key, priority: int, expires_at: float | None) -> None:
        before = self.wishes[block][1] if block in self.wishes else 0
        idle = block in self.is_inner and priority != before
        if idle:
            self.remove(block)
        if self.wishes.pop(block, None) and priority == 0:
            self.ends[2] += 1
        if priority > 0:
            self.wishes[block] = (key, priority, expires_at)
        if idle:
            self._put(block, key)

    def advance(self, now: float) -> None:
        ended = [(end, block) for block, (_, _, end) in self.wishes.items() if end is not None and end <= now]
        for _, block in sorted(ended, key=lambda pair: pair[0]):  # those of one time in the order of the wishes
            self.wish(block, self.wishes[block][0], 0, None)
            self.ends[2] -= 1
            self.ends[1] += 1

    def insert(self, block: Block, key: Key, depth: int) -> None:
        self.depth[block] = depth
        self._put(block, key)

    def _put(self, block: Block, key: Key) -> None:
        self.content[block] = key
        if block in self.wishes:
            self.is_inner[block] = False
            self.idle.append(block)
        else:
            self.is_inner[block] = True
            self.inner.insert(block, key, self.depth[block])

    def uncache(self, block: Block) -> None:
        self.ends[3] += 1 if self.wishes.pop(block, None) else 0

    def hit(self, block: Block, key: Key) -> None:
        self.inner.hit(block, key)

    def remove(self, block: Block) -> None:
        if self.is_inner.pop(block):
            self.inner.remove(block)
        else:
            self.idle.remove(block)

    def evict(self) -> Block:
        if any(self.is_inner.values()):
            block = self.inner.evict()
        else:
            block = min(self.idle, key=lambda block: self.wishes[block][1])
            self.idle.remove(block)
            del self.wishes[block]
            self.ends[0] += 1
        del self.is_inner[block]
        return block

    def clear(self) -> None:
        super().clear()
        self.inner.clear()
        self.is_inner = {}
        self.ends[3] += len(self.wishes)
        self.wishes = {}

    def grow(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.inner.grow(num_blocks)


MODELS: dict[str, type[Model]] = {
    "lru": Model,
    "fifo": FIFOModel,
    "lfu": LFUModel,
    "s3fifo": S3FIFOModel,
    "arc": ARCModel,
    "score": ScoreModel,
}
