"""Worlds in which all blocks of a depth have the same hash: the index agrees with a tree of tokens."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from blockyard import BlockLease, BlockPool
from blockyard.core.index.prefix_index import TILE_BLOCKS
from blockyard_testing.seeds import draws, lines, run_seed

Page = int


class Node:
    """A content: a page after another content, and the blocks that have it, oldest first."""

    def __init__(self, parent: Node | None = None, page: Page = 0) -> None:
        self.parent, self.page = parent, page
        self.children: dict[Page, Node] = {}
        self.blocks: list[int] = []

    def child(self, page: Page) -> Node:
        return self.children.setdefault(page, Node(self, page))


class World:
    """A pool whose hash keys are all zero, and the tree that it must agree with.

    A page is a block of tokens whose every second one is 0, so that its sum is 0 whatever the others are.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.block_size = draw.choice((2, 16))
        self.pool = BlockPool(draw.choice((24, 90, 300)), self.block_size)
        keys = self.pool._ledger.index._keys
        for place in range(len(keys)):
            keys[place] = 0
        self.pool.on_evict = self.forget
        self.root = Node()
        self.node_of: dict[int, Node] = {}
        self.leases: list[BlockLease] = []
        self.prompts: list[list[Page]] = [[0]]
        self.longest = 1
        self.counts: Counter[str] = Counter()
        self._scatter(draw.choice((0, 1, 2, 7)))

    def _scatter(self, run: int) -> None:
        """Let the free blocks lie in runs of so many, in any order; 0 leaves them in order."""
        pieces = []
        while run and self.pool.num_free_blocks:
            pieces.append(self.pool.get_new_blocks(min(run, self.pool.num_free_blocks)))
        self.draw.shuffle(pieces)
        for piece in pieces:
            self.pool.free_blocks(piece)

    def tokens(self, pages: list[Page]) -> npt.NDArray[np.int32]:
        rows = np.zeros((len(pages), self.block_size), np.int32)
        rows[:, ::2] = np.array(pages)[:, None]
        return rows.reshape(-1)

    def prompt(self, most: int) -> list[Page]:
        """The beginning of an earlier prompt, and pages of a small alphabet."""
        known = self.draw.choice(self.prompts)
        pages = known[: self.draw.randint(0, min(len(known), most))]
        return pages + [self.draw.randint(1, 3) for _ in range(self.draw.randint(len(pages) == 0, most - len(pages)))]

    def expected(self, pages: list[Page]) -> list[Node]:
        nodes: list[Node] = []
        node = self.root
        for page in pages:
            if page not in node.children:
                break
            node = node.children[page]
            nodes.append(node)
        return nodes

    def ask(self, pages: list[Page]) -> None:
        """Both ways to ask find the oldest block of each content, and nothing behind the first that is missing."""
        wanted = [node.blocks[0] for node in self.expected(pages)]
        if len(pages) > max(self.longest, int(TILE_BLOCKS)):
            self.counts["longest yet"] += 1
        self.longest = max(self.longest, len(pages))
        assert self.pool.find_cached_blocks(self.tokens(pages)).block_ids.tolist() == wanted
        assert self.pool.num_cached_tokens(self.tokens(pages)) == len(wanted) * self.block_size
        self.counts["blocks hit"] += len(wanted)

    def admit(self, pages: list[Page]) -> None:
        nodes = self.expected(pages)
        lease = self.pool.get_cached_blocks(self.tokens(pages))
        assert lease.block_ids.tolist() == [node.blocks[0] for node in nodes]
        missing = min(len(pages) - len(lease), self.pool.num_free_blocks)
        pages = pages[: len(lease) + missing]
        self.leases.append(lease)
        if missing > 0:
            self.pool.extend(lease, missing)
            self.pool.cache_full_blocks(lease, self.tokens(pages), num_cached_blocks=len(nodes))
        node = nodes[-1] if nodes else self.root
        for page, block in zip(pages[len(nodes) :], lease.block_ids.tolist()[len(nodes) :], strict=True):
            node = node.child(page)
            node.blocks.append(block)
            self.node_of[block] = node
        self.prompts.append(pages)

    def forget(self, blocks: npt.NDArray[np.int32]) -> None:
        """What the pool says that it evicts; a content without a block takes all behind it along."""
        for block in blocks.tolist():
            node = self.node_of.pop(block)
            node.blocks.remove(block)
            if not node.blocks and node.parent is not None and node.parent.children.get(node.page) is node:
                del node.parent.children[node.page]
            self.counts["evicted"] += 1

    def step(self) -> None:
        what = self.draw.random()
        if what < 0.1:
            self.ask(self.prompt(2 * self.longest + 1))
        elif what < 0.4:
            self.ask(self.prompt(self.longest))
        elif what < 0.7:
            self.admit(self.prompt(min(self.longest, self.pool.num_blocks)))
        elif what < 0.75 and self.node_of:
            self.pool.uncache([self.draw.choice(list(self.node_of))])
        elif self.leases:
            self.pool.free_blocks(self.leases.pop(self.draw.randrange(len(self.leases))))


@pytest.mark.parametrize("seed", [1, 2, None])
def test_a_tree_and_an_index_of_equal_hashes_agree(seed: int | None) -> None:
    draw = random.Random(run_seed() + 7 if seed is None else seed)
    counts: Counter[str] = Counter()
    for _ in range(draws(24, 2) if seed is None else 2):
        world = World(draw)
        world.ask(world.prompt(int(TILE_BLOCKS) + draw.randint(1, 40)))
        for _ in range(120):
            world.step()
            if draw.random() < 0.1:
                world.pool.check()
        world.pool.check()
        counts += world.counts
    lines.append(f"equal hashes: {dict(counts)}")
