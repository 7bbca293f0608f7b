"""The pool with leases, written to be obvious: lists and trees, no hash, no arrays. It imports nothing from the core.

What `tests.support.reference` is for the manager, with the same methods as `PoolSide`.
"""

from __future__ import annotations

from typing import Any

from .pool_sides import Outcome, outcome

Keys = tuple[Any, ...]


class Refused(Exception):
    """A call that the pool refuses, by the name of its error."""


class Node:
    """A content: the tokens and spans of a block after another content. Node() is a root."""

    def __init__(self, parent: Node | None = None, page: Any = None) -> None:
        self.parent, self.page = parent, page
        self.children: dict[Any, Node] = {}
        self.blocks: list[int] = []


class Lease:
    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        #: Leading blocks that it has cached, and those of them that it has not written into since.
        self.num_cached = self.num_sure = 0
        self.first_block = 0
        self.is_live = True
        #: What stands before the block at a position, where no held block tells.
        self.anchor: tuple[int, Node | None] = (0, None)


class Found:
    def __init__(self, blocks: list[int], nodes: list[Node]) -> None:
        self.blocks, self.nodes = blocks, nodes


class PoolModel:
    def __init__(self, num_blocks: int, block_size: int, retention_blocks: int = 0) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.retention_blocks = retention_blocks
        #: Idle cached blocks as they became idle, or got another priority: with a budget of retention, who goes next.
        self.idle: list[int] = []
        #: Priorities above 0, and when they end: in the order in which that was said.
        self.priority_of: dict[int, int] = {}
        self.end_of: dict[int, float] = {}
        self.now = 0.0
        self.queue = list(range(1, num_blocks))
        self.ref_counts = [0] * num_blocks
        self.roots: dict[Any, Node] = {}
        self.node_of: dict[int, Node] = {}
        #: The tokens that each block was last given.
        self.row_of: dict[int, tuple[int, ...]] = {}
        self.leases: list[Lease] = []
        self.found: list[Found] = []
        #: Blocks that lost their content otherwise than by a reset, in order.
        self.lost: list[int] = []
        #: Contents that can be hit as they were when events were last taken.
        self.told: set[Node] = set()
        self.was_cleared = False
        self.num_evicted = self.peak = self.num_allocated = self.num_freed = 0

    def call(self, name: str, *arguments: Any) -> Outcome:
        return outcome(lambda: getattr(self, name)(*arguments))

    # ------------------------------------------------------------------ blocks

    def _pop(self) -> int:
        block = self.queue.pop(0)
        self._evict(block)
        self.ref_counts[block] = 1
        self.num_allocated += 1
        return block

    def _evict(self, block: int) -> None:
        if block in self.node_of:
            self._lose(block)
            self.num_evicted += 1

    def _lose(self, block: int) -> None:
        self._withdraw(block)
        self._forget_priority(block)
        if block in self.idle:
            self.idle.remove(block)
        self.lost.append(block)

    def _forget_priority(self, block: int) -> None:
        self.priority_of.pop(block, None)
        self.end_of.pop(block, None)

    def _victims(self, count: int) -> list[int]:
        """The idle blocks that go next. Those of a priority go last, the lowest first."""
        if self.retention_blocks:
            return sorted(self.idle, key=lambda block: self.priority_of.get(block, 0))[:count]
        return [block for block in self.queue if block in self.node_of][:count]

    def _evict_ahead(self, count: int) -> None:
        """Where priorities decide, the queue's order does not: what has to go goes to its front before it is taken."""
        if not self.retention_blocks:
            return
        empty = [block in self.node_of for block in self.queue[:count]] + [True]
        for block in self._victims(max(count - empty.index(True), 0)):
            self._evict(block)
            self._to_front([block])

    def _to_front(self, blocks: list[int]) -> None:
        self.queue = blocks + [block for block in self.queue if block not in blocks]

    def _take(self, count: int) -> list[int]:
        if count < 0:
            raise Refused("InvalidArgument")
        if count > len(self.queue):
            raise Refused("OutOfBlocks")
        self._evict_ahead(count)
        blocks = [self._pop() for _ in range(count)]
        self._note_peak()
        return blocks

    def _share(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.ref_counts[block] == 0:
                self.queue.remove(block)
                self.idle.remove(block)
                self.num_allocated += 1
            self.ref_counts[block] += 1
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak = max(self.peak, sum(count > 0 for count in self.ref_counts))

    def _drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.num_freed += 1
                if block >= self.num_blocks:
                    self._evict(block)
                elif block in self.node_of:
                    self.queue.append(block)
                    self.idle.append(block)
                else:
                    self.queue.insert(0, block)

    # ------------------------------------------------------------------ contents

    def _pages(self, tokens: list[int], keys: Keys, first_block: int) -> list[Any]:
        """For each full block its tokens, and the spans over it as it sees them."""
        size = self.block_size
        first = first_block * size
        spans = sorted(key for key in keys if key[0] == "span")
        for index, token in enumerate(tokens):
            if token < 0 and not any(span[2] <= first + index < span[2] + span[3] for span in spans):
                raise Refused("InvalidArgument")
        pages = []
        for start in range(0, len(tokens) - size + 1, size):
            at = first + start
            over = tuple(
                (*span[:2], span[2] - at, span[3]) for span in spans if span[2] < at + size and span[2] + span[3] > at
            )
            pages.append((tuple(max(token, -1) for token in tokens[start : start + size]), over))
        return pages

    def _root(self, keys: Keys) -> Node:
        return self.roots.setdefault(self._plain(keys), Node())

    def _plain(self, keys: Keys) -> Keys:
        return tuple(sorted(key for key in keys if key[0] != "span"))

    def _look_up(self, tokens: list[int], keys: Keys) -> list[int]:
        node = self.roots.get(self._plain(keys))
        blocks = []
        for page in self._pages(tokens, keys, 0):
            node = node.children.get(page) if node is not None else None
            if node is None:
                break
            blocks.append(node.blocks[0])
        return blocks

    def _give(self, block: int, parent: Node, page: Any) -> Node:
        node = parent.children.setdefault(page, Node(parent, page))
        node.blocks.append(block)
        self.node_of[block] = node
        self.row_of[block] = page[0]
        return node

    def _withdraw(self, block: int) -> None:
        node = self.node_of.pop(block)
        node.blocks.remove(block)
        if not node.blocks and node.parent is not None and node.parent.children.get(node.page) is node:
            del node.parent.children[node.page]

    # ------------------------------------------------------------------ the calls

    def _add(self, lease: Lease) -> list[int]:
        self.leases.append(lease)
        return list(lease.blocks)

    def _live(self, number: int) -> Lease:
        lease = self.leases[number]
        if not lease.is_live:
            raise Refused("DoubleFree")
        return lease

    def get_new_blocks(self, count: int) -> list[int]:
        return self._add(Lease(self._take(count)))

    def extend(self, number: int, count: int) -> list[int]:
        if count < 0:
            raise Refused("InvalidArgument")
        lease = self._live(number)
        new = self._take(count)
        lease.blocks += new
        return new

    def find(self, tokens: list[int], keys: Keys) -> list[Any]:
        blocks = self._look_up(tokens, keys)
        self.found.append(Found(blocks, [self.node_of[block] for block in blocks]))
        return [blocks, len(blocks) * self.block_size, self._num_idle(blocks)]

    def _num_idle(self, blocks: list[int]) -> int:
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def hold(self, number: int, count: int | None, extend_by: int) -> list[int]:
        found = self.found[number]
        count = len(found.blocks) if count is None else count
        if not 0 <= count <= len(found.blocks) or extend_by < 0:
            raise Refused("InvalidArgument")
        blocks = found.blocks[:count]
        if [self.node_of.get(block) for block in blocks] != found.nodes[:count]:
            raise Refused("StaleBlocks")
        if extend_by > len(self.queue) - self._num_idle(blocks):
            raise Refused("OutOfBlocks")
        self._share(blocks)
        lease = Lease(blocks + self._take(extend_by))
        lease.num_cached = lease.num_sure = count
        return self._add(lease)

    def get_cached(self, tokens: list[int], keys: Keys) -> list[int]:
        lease = Lease(self._look_up(tokens, keys))
        self._share(lease.blocks)
        lease.num_cached = lease.num_sure = len(lease.blocks)
        return self._add(lease)

    def get_cached_last(self, tokens: list[int], keys: Keys) -> list[int] | None:
        blocks = self._look_up(tokens, keys)
        if not blocks or len(blocks) < len(tokens) // self.block_size:
            return None
        lease = Lease(blocks[-1:])
        self._share(lease.blocks)
        lease.num_cached = lease.num_sure = 1
        lease.first_block = len(blocks) - 1
        return self._add(lease)

    def cache_full(self, number: int, tokens: list[int], num_cached: int, keys: Keys) -> None:
        pages = self._pages(tokens, keys, 0)
        if not 0 <= num_cached <= len(pages):
            raise Refused("InvalidArgument")
        lease = self._live(number)
        if lease.first_block or len(pages) > len(lease.blocks):
            raise Refused("InvalidArgument")
        found = [self.node_of[block] for block in self._look_up(tokens, keys)]
        blocks = lease.blocks[: len(pages)]
        if [self.node_of.get(block) for block in blocks[:num_cached]] != found[:num_cached]:
            raise Refused("InvalidArgument")
        if any(block == 0 or block in self.node_of or self.ref_counts[block] > 1 for block in blocks[num_cached:]):
            raise Refused("InvalidArgument")
        still = self._still_cached(lease)
        node = self.node_of[blocks[num_cached - 1]] if num_cached else self._root(keys)
        for block, page in list(zip(blocks, pages, strict=True))[num_cached:]:
            node = self._give(block, node, page)
        lease.num_cached = lease.num_sure = max(still, len(pages))

    def _still_cached(self, lease: Lease) -> int:
        """Of the blocks that the lease has cached, those before the first that has lost its content."""
        for position, block in enumerate(lease.blocks[: lease.num_sure]):
            if block and block not in self.node_of:
                return position
        return lease.num_sure

    def cache_next(self, number: int, tokens: list[int], keys: Keys, num_cached: int | None) -> int:
        if num_cached is not None and num_cached < 0:
            raise Refused("InvalidArgument")
        lease = self._live(number)
        if not tokens:
            return lease.num_cached
        still = self._still_cached(lease)
        start = lease.num_cached if num_cached is None else num_cached
        if start > lease.num_cached:
            raise Refused("InvalidArgument")
        if start > still:
            raise Refused("StaleBlocks")
        pages = self._pages(tokens, keys, lease.first_block + start)
        blocks = lease.blocks[start : start + len(pages)]
        if len(blocks) < len(pages):
            raise Refused("InvalidArgument")
        is_root = lease.first_block + start == 0
        node = None if is_root else self._before(lease, start)
        if node is None and not is_root:
            raise Refused("InvalidArgument")
        nothing = (0,) * self.block_size
        for position, (block, page) in enumerate(zip(blocks, pages, strict=True), start):
            is_same = self.row_of.get(block, nothing) == page[0]
            if block == 0 or (block in self.node_of and not is_same):
                raise Refused("InvalidArgument")
            may_be_given = self.ref_counts[block] == 1 or (is_same and position < lease.num_cached)
            if block not in self.node_of and not may_be_given:
                raise Refused("InvalidArgument")
        self._give_anew(blocks, pages, node, keys)
        lease.num_cached = lease.num_sure = max(still, start + len(pages))
        return lease.num_cached

    def _before(self, lease: Lease, position: int) -> Node | None:
        """The content before the block at a position, if that is known."""
        block = lease.blocks[position - 1] if position else 0
        if block:
            return self.node_of.get(block)
        return lease.anchor[1] if lease.anchor[0] == position else None

    def _give_anew(self, blocks: list[int], pages: list[Any], node: Node | None, keys: Keys) -> None:
        """Leave the first blocks that have these contents already, and index all others anew."""
        same = 0
        parent = node if node is not None else self.roots.get(self._plain(keys))
        while same < len(blocks) and parent is not None:
            child = self.node_of.get(blocks[same])
            if child is None or child.parent is not parent or child.page != pages[same]:
                break
            parent = child
            same += 1
        if same == len(blocks):
            return
        for block in blocks[same:]:
            if block in self.node_of:
                self._withdraw(block)
        parent = parent if parent is not None else self._root(keys)
        for block, page in zip(blocks[same:], pages[same:], strict=True):
            parent = self._give(block, parent, page)

    def _part(self, lease: Lease, start: int, stop: int) -> Lease:
        part = Lease(lease.blocks[start:stop])
        part.first_block = lease.first_block + start
        part.num_cached = max(min(lease.num_cached - start, stop - start), 0)
        part.num_sure = max(min(lease.num_sure - start, stop - start), 0)
        if start and lease.blocks[start - 1] and start <= lease.num_sure:
            part.anchor = (0, self.node_of.get(lease.blocks[start - 1]))
        elif lease.anchor[0] >= start:
            part.anchor = (lease.anchor[0] - start, lease.anchor[1])
        return part

    def touch(self, number: int, start: int, stop: int | None) -> list[int]:
        if stop is not None and stop < start:
            raise Refused("InvalidArgument")
        lease = self._live(number)
        end = self._end(lease, start, stop)
        part = self._part(lease, start, end)
        self._share([block for block in part.blocks if block])
        return self._add(part)

    def copy_on_write(self, number: int, position: int) -> tuple[int, int] | None:
        lease = self._live(number)
        if not 0 <= position < len(lease.blocks) or lease.blocks[position] == 0:
            raise Refused("InvalidArgument")
        old = lease.blocks[position]
        if self.ref_counts[old] == 1:
            if old in self.node_of:
                self._lose(old)
            lease.num_sure = min(lease.num_sure, position)
            return None
        lease.blocks[position] = new = self._take(1)[0]
        lease.num_sure = min(lease.num_sure, position)
        self._drop([old])
        return old, new

    def free(self, number: int, last: bool) -> None:
        lease = self._live(number)
        lease.is_live = False
        held = [block for block in lease.blocks if block]
        self._drop(held)
        for block in reversed(held) if last else []:
            if block in self.queue:
                self.queue.remove(block)
                self.queue.append(block)

    def release(self, number: int, start: int, stop: int | None) -> int:
        if stop is not None and stop < start:
            raise Refused("InvalidArgument")
        lease = self._live(number)
        end = self._end(lease, start, stop)
        last = lease.num_cached
        if start < last <= end and lease.blocks[last - 1]:
            sure = last == lease.num_sure
            lease.anchor = (last, self.node_of.get(lease.blocks[last - 1]) if sure else None)
        held = [block for block in lease.blocks[start:end] if block]
        lease.blocks[start:end] = [0] * (end - start)
        self._drop(held)
        return len(held)

    def _end(self, lease: Lease, start: int, stop: int | None) -> int:
        end = len(lease.blocks) if stop is None else stop
        if not 0 <= start <= end <= len(lease.blocks):
            raise Refused("InvalidArgument")
        return end

    def split(self, number: int, at: int) -> list[int]:
        if at < 0:
            raise Refused("InvalidArgument")
        lease = self._live(number)
        self._end(lease, at, None)
        tail = self._part(lease, at, len(lease.blocks))
        del lease.blocks[at:]
        lease.num_cached = min(lease.num_cached, at)
        lease.num_sure = min(lease.num_sure, at)
        if lease.anchor[0] > at:
            lease.anchor = (0, None)
        return self._add(tail)

    def uncache(self, blocks: list[int]) -> int:
        if not all(0 < block < len(self.ref_counts) for block in blocks):
            raise Refused("InvalidArgument")
        count = 0
        for block in reversed(blocks):
            if block in self.node_of:
                self._lose(block)
                count += 1
                if self.ref_counts[block] == 0:
                    self._to_front([block])
        return count

    def adopt(self, blocks: list[int]) -> list[int]:
        if not all(0 < block < self.num_blocks and self.ref_counts[block] == 0 for block in blocks):
            raise Refused("InvalidArgument")
        if len(set(blocks)) < len(blocks):
            raise Refused("InvalidArgument")
        for block in blocks:
            self._evict(block)
            self.queue.remove(block)
            self.ref_counts[block] = 1
            self.num_allocated += 1
        self._note_peak()
        return self._add(Lease(list(blocks)))

    def evict(self, count: int) -> list[int]:
        if count < 0:
            raise Refused("InvalidArgument")
        victims = self._victims(count)
        if len(victims) < count:
            raise Refused("OutOfBlocks")
        for block in victims:
            self._evict(block)
        self._to_front(victims)
        return victims

    def retain(self, tokens: list[int], priority: int, expires_at: float | None, keys: Keys) -> int:
        blocks = self._look_up(tokens, keys)
        if not self.retention_blocks or priority < 0:
            raise Refused("InvalidArgument")
        if priority and len(set(blocks) | set(self.priority_of)) > self.retention_blocks:
            raise Refused("OverBudget")
        for block in reversed(blocks):  # as blocks are released: among equals the end of a prompt goes first
            self._prefer(block, priority, expires_at)
        return len(blocks)

    def _prefer(self, block: int, priority: int, expires_at: float | None) -> None:
        if block in self.idle and self.priority_of.get(block, 0) != priority:
            self.idle.remove(block)
            self.idle.append(block)
        self._forget_priority(block)
        if priority:
            self.priority_of[block] = priority
            if expires_at is not None:
                self.end_of[block] = expires_at

    def advance_time(self, now: float) -> int:
        if now < self.now:
            raise Refused("InvalidArgument")
        self.now = now
        over = [block for block, end in self.end_of.items() if end <= now]
        for block in sorted(over, key=self.end_of.__getitem__):
            self._prefer(block, 0, None)
        return len(self.priority_of)

    def resize(self, num_blocks: int) -> str:
        if num_blocks < 1:
            raise Refused("InvalidArgument")
        old, self.num_blocks = self.num_blocks, num_blocks
        self.ref_counts += [0] * (num_blocks - len(self.ref_counts))
        self._to_front([block for block in range(old, num_blocks) if self.ref_counts[block] == 0])
        for block in range(num_blocks, old):
            if self.ref_counts[block] == 0:
                self._evict(block)
                self.queue.remove(block)
        return "DEFERRED" if any(self.ref_counts[num_blocks:]) else "APPLIED"

    def reset(self) -> None:
        self.idle.clear()
        self.priority_of.clear()
        self.end_of.clear()
        self.roots.clear()
        self.node_of.clear()
        self.told.clear()
        self.was_cleared = True

    def take_events(self) -> list[Any]:
        now = set(self.node_of.values())
        came = sorted(list(node.page[0]) for node in now - self.told)
        answer = [self.was_cleared, came, len(self.told - now)]
        self.told, self.was_cleared = now, False
        return answer

    def state(self) -> dict[str, Any]:
        return {
            "free": list(self.queue),
            "ref_counts": list(self.ref_counts),
            "cached": [block in self.node_of for block in range(len(self.ref_counts))],
            "retained": len(self.priority_of),
            "retiring": sum(count > 0 for count in self.ref_counts[self.num_blocks :]),
            "evicted": self.num_evicted,
            "peak": self.peak,
            "allocated": self.num_allocated,
            "freed": self.num_freed,
            "leases": [
                (list(lease.blocks), lease.num_cached, lease.first_block) for lease in self.leases if lease.is_live
            ],
            "lost": list(self.lost),
            "idle": [self._num_idle(found.blocks) for found in self.found[-3:]],
        }
