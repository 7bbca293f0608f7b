"""A block pool in plain Python that passes every check of grade.py. Try it yourself before you read it."""

from __future__ import annotations

from collections import Counter

#: What a block caches: the content of the block before it, and its own tokens. Compared whole, so a hit is exact.
Content = tuple["Content | None", tuple[int, ...]]


class FreeQueue:
    """A doubly linked list of block ids. Block 0 is both of its ends, so no block needs special handling."""

    def __init__(self, num_blocks: int) -> None:
        self.next = [(block + 1) % num_blocks for block in range(num_blocks)]
        self.prev = [(block - 1) % num_blocks for block in range(num_blocks)]
        self.num_free_blocks = num_blocks - 1

    def popleft(self) -> int:
        block = self.next[0]
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[int]:
        return [self.popleft() for _ in range(n)]

    def remove(self, block: int) -> None:
        before, after = self.prev[block], self.next[block]
        self.next[before], self.prev[after] = after, before
        self.num_free_blocks -= 1

    def append(self, block: int) -> None:
        last = self.prev[0]
        self.next[last], self.prev[block] = block, last
        self.next[block], self.prev[0] = 0, block
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[int]:
        blocks, block = [], self.next[0]
        while block != 0:
            blocks.append(block)
            block = self.next[block]
        return blocks


class BlockPool:
    """Blocks with reference counts, and an index of what the full ones hold."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.queue = FreeQueue(num_blocks)
        self.counts = [0] * num_blocks
        self.content: dict[int, Content] = {}
        self.blocks_of: dict[Content, dict[int, None]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.queue.num_free_blocks

    def free_block_ids(self) -> list[int]:
        return self.queue.get_all_free_blocks()

    def ref_cnt(self, block: int) -> int:
        return self.counts[block]

    def get_new_blocks(self, n: int) -> list[int]:
        if n > self.num_free_blocks:
            raise ValueError(f"n is {n}; only {self.num_free_blocks} blocks are free")
        blocks = self.queue.popleft_n(n)
        for block in blocks:
            self.evict(block)
            self.counts[block] = 1
        return blocks

    def evict(self, block: int) -> None:
        content = self.content.pop(block, None)
        if content is not None:
            del self.blocks_of[content][block]
            if not self.blocks_of[content]:
                del self.blocks_of[content]

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.counts[block] == 0:
                self.queue.remove(block)
            self.counts[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        for block, times in Counter(blocks).items():
            if times > self.counts[block]:
                raise ValueError(f"block {block} is freed {times} times; it is held {self.counts[block]} times")
        for block in reversed(blocks):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.queue.append(block)

    def contents(self, tokens: list[int]) -> list[Content]:
        found: list[Content] = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            found.append((found[-1] if found else None, tuple(tokens[start : start + self.block_size])))
        return found

    def cache_full_blocks(self, blocks: list[int], tokens: list[int], num_cached: int = 0) -> None:
        for block, content in list(zip(blocks, self.contents(tokens), strict=False))[num_cached:]:
            self.content[block] = content
            self.blocks_of.setdefault(content, {})[block] = None

    def get_cached_blocks(self, tokens: list[int]) -> list[int]:
        blocks = []
        for content in self.contents(tokens):
            if content not in self.blocks_of:
                break
            blocks.append(next(iter(self.blocks_of[content])))
        self.touch(blocks)
        return blocks
