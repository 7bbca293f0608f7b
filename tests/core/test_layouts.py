"""Lookups follow neighbours: in pools of any layout they find what a dictionary of contents says, block by block."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

import blockyard
from blockyard import BlockPool, OutOfBlocks

from ..support.seeds import draws, run_seed

NUM_POOLS = draws(900, 24)
LAYOUTS = ("in order", "reversed", "runs", "shuffled")


class Content:
    """A block's tokens under one very parent, and the blocks that hold them, oldest first."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.children: dict[tuple[int, ...], Content] = {}


class Shelf:
    """A pool whose free blocks were brought into a layout first, beside a dictionary of what is cached."""

    def __init__(self, layout: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice((1, 2, 3, 16))
        self.pool = BlockPool(self.random.choice((12, 40, 200)), self.block_size)
        self.root = Content()
        self.all: list[Content] = []
        self.leases: list[blockyard.BlockLease] = []
        self.num_followed = 0
        self.lay_out(layout)

    def lay_out(self, layout: str) -> None:
        length = {"in order": self.pool.num_blocks, "runs": self.random.randint(2, 30)}.get(layout, 1)
        pieces = []
        while self.pool.num_free_blocks:
            pieces.append(self.pool.get_new_blocks(min(length, self.pool.num_free_blocks)))
        if layout in ("runs", "shuffled"):
            self.random.shuffle(pieces)
        for lease in pieces if layout == "reversed" else reversed(pieces):
            self.pool.free_blocks(lease)

    def chunks(self, prompt: list[int]) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(prompt[at : at + size]) for at in range(0, len(prompt) - size + 1, size)]

    def cached(self, prompt: list[int]) -> list[int]:
        """The oldest block of each content on the way, as far as there are any."""
        content, blocks = self.root, []
        for chunk in self.chunks(prompt):
            following = content.children.get(chunk)
            if following is None or not following.blocks:
                break
            content = following
            blocks.append(content.blocks[0])
        return blocks

    def forget_lost(self) -> None:
        """A content without a block is gone for good, and nothing is found behind it any more."""
        mask = self.pool.cached_mask()
        for content in self.all:
            content.blocks = [block for block in content.blocks if mask[block]]
        for content in [self.root, *self.all]:
            content.children = {chunk: child for chunk, child in content.children.items() if child.blocks}
        self.all = [content for content in self.all if content.blocks]

    def prompt(self) -> list[int]:
        """Of few tokens, so that prompts begin alike, part, and meet again in equal blocks."""
        length = self.random.randint(1, self.block_size * self.random.choice((3, 12, 60)))
        start = self.random.choice((0, 0, 0, 7))
        tokens = [start + position % 5 for position in range(length)]
        for _ in range(self.random.choice((0, 0, 1, 2))):
            tokens[self.random.randrange(length)] = 99
        return tokens

    def serve(self) -> None:
        """Hold what is cached, or nothing of it, take blocks for the rest, and cache them."""
        prompt = self.prompt()
        expected, chunks = self.cached(prompt), self.chunks(prompt)
        lease = self.pool.get_cached_blocks(prompt)
        assert list(lease) == expected
        self.num_followed += sum(abs(a - b) == 1 for a, b in pairwise(expected))
        if self.random.random() < 0.3:
            self.pool.free_blocks(lease)
            lease = self.pool.get_new_blocks(0)
        num_hit = len(lease)
        try:
            self.pool.extend(lease, len(chunks) - len(lease))
        except OutOfBlocks:
            self.pool.free_blocks(lease)
            return
        self.forget_lost()
        self.pool.cache_full_blocks(lease, prompt, num_hit)
        self.leases.append(lease)
        content = self.root
        for chunk, block in zip(chunks, lease, strict=True):
            if chunk not in content.children:
                content.children[chunk] = Content()
                self.all.append(content.children[chunk])
            content = content.children[chunk]
            if block not in content.blocks:
                content.blocks.append(block)

    def free(self) -> None:
        if self.leases:
            self.pool.free_blocks(self.leases.pop(self.random.randrange(len(self.leases))))

    def uncache(self) -> None:
        cached = self.pool.cached_mask().nonzero()[0].tolist()
        self.pool.uncache(self.random.sample(cached, min(len(cached), 2)))
        self.forget_lost()

    def step(self) -> None:
        self.random.choices((self.serve, self.free, self.uncache), (10, 7, 1))[0]()
        self.pool.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lookups_find_what_is_cached_in_any_layout(layout: str) -> None:
    num_followed = 0
    for number in range(NUM_POOLS):
        shelf = Shelf(layout, run_seed() + number)
        for _ in range(60):
            shelf.step()
        num_followed += shelf.num_followed
    assert num_followed > 10
