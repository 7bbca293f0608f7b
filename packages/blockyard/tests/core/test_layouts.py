"""Neighbouring blocks lead to one another: in pools of any layout, lookups agree with a dictionary."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

import blockyard
from blockyard import (
    BlockPool,
    CacheConfig,
    InvalidArgument,
    InvariantError,
    KVCacheManager,
    OutOfBlocks,
    Span,
    StaleBlocks,
)
from blockyard.core.index.checking import check_index
from blockyard.core.index.rows import FOLLOWS
from blockyard_testing.seeds import draws, run_seed

from ..support.hash_chains import Block, Chains, random_block, random_blocks, twin_of

NUM_POOLS = draws(600, 24)
LAYOUTS = ("in order", "reversed", "runs", "shuffled")


class Content:
    """A block's tokens under one very parent, and the blocks that hold them, oldest first."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.children: dict[tuple[int, ...], Content] = {}


class Held:
    """A lease, the contents that its blocks cache, and the content before them with its depth."""

    def __init__(self, lease: blockyard.BlockLease, contents: list[Content], before: Content, depth: int) -> None:
        self.lease = lease
        self.contents = contents
        self.before = before
        self.depth = depth

    def last(self) -> Content:
        return self.contents[-1] if self.contents else self.before


class Shelf:
    """A pool whose free blocks were brought into a layout, and a dictionary of its cached contents."""

    def __init__(self, layout: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice((1, 2, 3, 16))
        self.pool = BlockPool(self.random.choice((12, 40, 200)), self.block_size)
        self.root = Content()
        self.all: list[Content] = []
        self.held: list[Held] = []
        self.num_followed = self.num_gone_on = self.num_refused = 0
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

    def prompt(self, depth: int = 0) -> list[int]:
        """Of few tokens, so that prompts begin alike, part, and meet again in equal blocks: what is behind `depth`."""
        length = self.random.randint(1, self.block_size * self.random.choice((3, 12, 60)))
        start = self.random.choice((0, 0, 0, 7))
        first = depth * self.block_size
        tokens = [start + position % 5 for position in range(first, first + length)]
        for _ in range(self.random.choice((0, 0, 1, 2))):
            tokens[self.random.randrange(length)] = 99
        return tokens

    def serve(self) -> None:
        """Hold what is cached, or nothing of it, take blocks for the rest, and cache them."""
        prompt = self.prompt()
        asked = prompt[: self.random.choice((len(prompt), len(prompt), self.random.randint(1, len(prompt))))]
        expected, chunks = self.cached(asked), self.chunks(prompt)
        lease = self.pool.get_cached_blocks(asked)
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
        self.pool.cache_full_blocks(lease, prompt, num_cached_blocks=num_hit)
        self.held.append(Held(lease, self.cache(self.root, chunks, list(lease)), self.root, 0))

    def cache(self, content: Content, chunks: list[tuple[int, ...]], blocks: list[int]) -> list[Content]:
        """What blocks cache now behind a content."""
        contents = []
        for chunk, block in zip(chunks, blocks, strict=True):
            if chunk not in content.children:
                content.children[chunk] = Content()
                self.all.append(content.children[chunk])
            content = content.children[chunk]
            contents.append(content)
            if block not in content.blocks:
                content.blocks.append(block)
        return contents

    def draw_held(self) -> Held | None:
        return self.held.pop(self.random.randrange(len(self.held))) if self.held else None

    def free(self) -> None:
        held = self.draw_held()
        if held is not None:
            self.pool.free_blocks(held.lease)

    def go_on(self) -> None:
        """More blocks right behind those of a lease, which may know what is before them by its number alone."""
        held = self.draw_held()
        if held is None:
            return
        tokens = self.prompt(held.depth + len(held.contents))
        chunks = self.chunks(tokens)
        try:
            new = self.pool.extend(held.lease, len(chunks))
            self.forget_lost()
            if chunks:
                self.pool.cache_next_blocks(
                    held.lease, tokens[: len(chunks) * self.block_size], held.lease.num_cached_blocks
                )
        except (OutOfBlocks, StaleBlocks, InvalidArgument):
            self.pool.free_blocks(held.lease)
            self.num_refused += 1
            return
        held.contents += self.cache(held.last(), chunks, new.tolist())
        self.held.append(held)
        self.num_gone_on += 1

    def part(self) -> None:
        """Cut a lease in two, and free or keep the first part; or let it release the end of what it holds."""
        held = self.draw_held()
        if held is None:
            return
        self.held.append(held)
        at = self.random.randint(0, len(held.contents))
        if self.random.random() < 0.4:
            self.pool.release(held.lease, at)
            return
        tail = self.pool.split(held.lease, at)
        before = held.contents[at - 1] if at else held.before
        self.held.append(Held(tail, held.contents[at:], before, held.depth + at))
        held.contents = held.contents[:at]

    def uncache(self) -> None:
        cached = self.pool.cached_mask().nonzero()[0].tolist()
        self.pool.uncache(self.random.sample(cached, min(len(cached), 2)))

    def resize(self) -> None:
        """Grow, or shrink by what is free at the end and loses its content."""
        self.pool.resize(max(12, self.pool.num_blocks + self.random.randint(-4, 8)))

    def step(self) -> None:
        calls = (self.serve, self.free, self.go_on, self.part, self.uncache, self.resize)
        self.random.choices(calls, (20, 18, 6, 6, 2, 1))[0]()
        self.forget_lost()
        self.pool.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lookups_find_cached_blocks_in_any_layout(layout: str) -> None:
    num_followed = num_gone_on = 0
    for number in range(NUM_POOLS):
        shelf = Shelf(layout, run_seed() + number)
        for _ in range(60):
            shelf.step()
        num_followed += shelf.num_followed
        num_gone_on += shelf.num_gone_on
    assert num_followed > 10
    assert num_gone_on > 10


# ---------------------------------------------------------------- what leads to a block, state by state


class Runs(Chains):
    """Chains whose blocks are given ids by the test, and checked after each change."""

    def listed(self) -> list[int]:
        """The blocks that have a slot."""
        return sorted(block for block in self.slots() if block)

    def publish(self, prompt: list[Block], blocks: list[int]) -> None:
        super().publish(prompt, blocks)
        check_index(self.index)

    def remove(self, block: int) -> None:
        self.index.remove(block)
        check_index(self.index)


@pytest.fixture
def runs() -> Runs:
    return Runs()


A, B, C, D, E = random_blocks(random.Random(21), 5)


@pytest.mark.parametrize("ids", [[5, 6, 7, 8], [8, 7, 6, 5], [5, 6, 9, 8]])
def test_only_the_first_block_of_a_run_has_a_slot(runs: Runs, ids: list[int]) -> None:
    runs.publish([A, B, C, D], ids)
    heads = [block for before, block in pairwise([0, *ids]) if abs(block - before) != 1]
    assert runs.listed() == sorted(heads)
    assert runs.find([A, B, C, D, E]) == ids
    assert runs.find([A, B, D]) == ids[:2]
    for block in reversed(ids):
        runs.remove(block)
    assert runs.listed() == []


def test_a_duplicate_gives_the_block_that_follows_a_slot(runs: Runs) -> None:
    runs.publish([A, B, C], [5, 6, 7])
    runs.publish([A, B, C], [15, 16, 17])
    assert runs.listed() == [5, 6, 7]
    assert runs.find([A, B, C]) == [5, 6, 7]
    runs.remove(6)
    assert runs.find([A, B, C]) == [5, 16, 7]
    runs.remove(5)
    runs.remove(7)
    assert runs.find([A, B, C]) == [15, 16, 17]


def test_follower_gets_a_slot_when_a_duplicate_takes_over(runs: Runs) -> None:
    runs.publish([A, B], [5, 6])
    runs.publish([A], [9])
    assert runs.listed() == [5]
    runs.remove(5)
    assert runs.listed() == [6, 9]
    assert runs.find([A, B]) == [9, 6]


def test_follower_of_a_removed_content_needs_no_slot(runs: Runs) -> None:
    """It cannot be found any longer, because content ids are never reused."""
    runs.publish([A, B, C], [5, 6, 7])
    runs.remove(5)
    assert runs.listed() == []
    runs.publish([A], [5])
    assert runs.find([A, B, C]) == [5]
    runs.publish([A, B], [8])
    assert runs.find([A, B, C]) == [5, 8]
    runs.remove(6)
    runs.remove(7)
    assert runs.listed() == [5, 8]


def test_a_block_may_have_children_on_both_sides(runs: Runs) -> None:
    runs.publish([A, B], [6, 5])
    runs.publish([A, C], [7])
    assert runs.listed() == [6, 7]
    assert runs.find([A, B]) == [6, 5]
    assert runs.find([A, C]) == [6, 7]
    runs.publish([A, B], [9])
    assert runs.listed() == [5, 6, 7]
    assert runs.find([A, B]) == [6, 5]


def test_block_published_after_a_follower_finds_its_equal(runs: Runs) -> None:
    """The block before may be a duplicate itself: the one that stands for it has the neighbours."""
    runs.publish([A, B, C, D], [5, 6, 7, 8])
    runs.publish([A, B, C], [20])
    runs.publish([A, B, C, D], [22])
    assert runs.listed() == [5, 7, 8]
    assert runs.find([A, B, C, D]) == [5, 6, 7, 8]
    runs.remove(8)
    assert runs.find([A, B, C, D]) == [5, 6, 7, 22]


def test_a_neighbour_with_the_hash_of_another_is_not_taken_for_it(runs: Runs) -> None:
    """Blocks of one hash, the first of which leads to others by its side."""
    draw = random.Random(23)
    first = random_block(draw)
    alike = [first, *(twin_of(first, runs.keys, draw) for _ in range(3))]
    for number, block in enumerate(alike):
        runs.publish([block, B, block], [4 + 4 * number, 5 + 4 * number, 6 + 4 * number])
    assert runs.listed() == [4, 8, 12, 16]
    for number, block in enumerate(alike):
        found = [4 + 4 * number, 5 + 4 * number, 6 + 4 * number]
        assert runs.find([block, B, block]) == found
        assert runs.find([block, B, alike[number - 1]]) == found[:2]


def test_check_finds_a_block_that_nothing_leads_to(runs: Runs) -> None:
    runs.publish([A, B, C], [5, 6, 9])
    index = runs.index
    index.rings.next_equal[6] = 0
    with pytest.raises(InvariantError, match="index: the blocks that the table, neighbours and rings lead to"):
        check_index(index)
    index.rings.next_equal[6] = FOLLOWS
    check_index(index)
    index._slots[runs.slots().index(9)] = 0
    index.rings.next_equal[9] = FOLLOWS
    with pytest.raises(InvariantError, match="I5: a lookup of block 9's tokens does not find block"):
        check_index(index)


def test_check_finds_a_block_that_two_ways_lead_to(runs: Runs) -> None:
    runs.publish([A, B], [5, 6])
    runs.index.rings.next_equal[5] = FOLLOWS
    with pytest.raises(InvariantError, match="index: the blocks that the table, neighbours and rings lead to"):
        check_index(runs.index)


@pytest.mark.parametrize("parts", [False, True])
def test_lease_continues_after_a_following_block_it_does_not_hold(parts: bool) -> None:
    """It knows the content before by its number and hash alone. What follows that content is found all the same."""
    pool = BlockPool(40, 2)
    tokens = list(range(1, 9))
    whole = pool.get_new_blocks(4)
    pool.cache_full_blocks(whole, tokens)
    lease = pool.get_cached_blocks(tokens[:4])
    if parts:
        tail = pool.split(lease, 2)
        pool.free_blocks(lease)
        lease = tail
    else:
        pool.release(lease, 0)
    new = pool.extend(lease, 2).tolist()
    pool.cache_next_blocks(lease, tokens[4:], lease.num_cached_blocks)
    pool.check()
    assert pool.cached_block_ids(tokens) == [list(whole)[3], new[1]]


@pytest.mark.parametrize("parts", [False, True])
def test_leases_that_continue_a_removed_content_share_blocks(parts: bool) -> None:
    """Both know it by its number and hash alone, and what followed it side by side has one content with its equal."""
    pool = BlockPool(40, 2, enable_kv_cache_events=True)
    tokens = list(range(1, 9))
    whole = pool.get_new_blocks(4)
    pool.cache_full_blocks(whole, tokens)
    lease = pool.get_cached_blocks(tokens[:4])
    if parts:
        tail = pool.split(lease, 2)
        pool.free_blocks(lease)
        lease = tail
    else:
        pool.release(lease, 0)
    pool.uncache([whole[1]])
    pool.take_events()
    pool.extend(lease, 1)
    pool.cache_next_blocks(lease, tokens[4:6], lease.num_cached_blocks)
    pool.check()
    pool.split(whole, 3)
    pool.check()
    assert len(pool.take_events().contents) == 0


def test_span_separates_equal_tokens() -> None:
    pool = BlockPool(40, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    plain = pool.get_new_blocks(3)
    pool.cache_full_blocks(plain, tokens)
    image = (Span("image", 2, 2),)
    lease = pool.get_cached_blocks(tokens, extra_keys=image)
    assert list(lease) == list(plain)[:1]
    pool.extend(lease, 2)
    pool.cache_full_blocks(lease, tokens, num_cached_blocks=1, extra_keys=image)
    pool.check()
    assert list(pool.get_cached_blocks(tokens, extra_keys=image)) == list(lease)
    assert list(pool.get_cached_blocks(tokens)) == list(plain)


@pytest.mark.parametrize("tokens_a_step", [1, 9])
def test_sampled_block_finds_a_following_block(tokens_a_step: int) -> None:
    """Blocks of a sequence fill one by one, or several in a step, and equal those of an earlier prompt."""
    cache = KVCacheManager(CacheConfig(40, block_size=4, max_num_seqs=2, max_model_len=64))
    tokens = list(range(1, 24))
    seq = cache.allocate(tokens)
    blocks = cache.block_ids(seq).tolist()
    cache.reserve(seq)
    cache.commit(seq, len(tokens))
    seq = cache.allocate(tokens[:9])
    cache.reserve(seq)
    cache.commit(seq, 1, tokens[9])
    for at in range(10, 19, tokens_a_step):
        cache.reserve(seq, tokens_a_step)
        cache.commit(seq, tokens_a_step, [tokens[at : at + tokens_a_step]])
        cache.check()
    pool = cache.pool
    ring = cache.contents.equal_to(tokens[:16])
    assert ring == [blocks[3], cache.block_ids(seq).tolist()[3]]
    assert pool.num_cached_blocks == 7
