"""Layer groups over one pool: windows that slide, hits that all groups have in common, and what admission asks for."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
from librt.vecs import vec
from mypy_extensions import i32, i64

import blockyard
from blockyard import Admission, CacheConfig, InvariantError, LayerGroup
from blockyard.core.index.prompt import make_prompt
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.world import World

from ..support.checked import Checked, prompt

FULL = LayerGroup(4, name="full")


def grouped(*groups: LayerGroup, num_blocks: int = 40, **settings: Any) -> Checked:
    return Checked(num_blocks, groups=groups, **settings)


def row(cache: Checked, seq: int, group: int) -> list[int]:
    return cache.block_ids(seq, group).tolist()


# ---------------------------------------------------------------- the sliding window


def test_the_window_leaves_null_blocks_behind_it_after_each_commit() -> None:
    """Window 6, blocks of 4: token n attends to n - 5 and later; block 0 goes after 9 tokens, block 1 after 13."""
    cache = grouped(FULL, LayerGroup(4, 6))
    seq = cache.allocate([7])
    rows = []
    for number in range(1, 15):
        assert cache.reserve([seq], 1).all_fit
        cache.commit([seq], 1, [7])
        full, window = row(cache, seq, 0), row(cache, seq, 1)
        assert 0 not in full
        assert len(full) == len(window) == math.ceil(number / 4)
        rows.append([block != 0 for block in window])
    held, null = True, False
    assert rows[7] == [held, held]  # 8 computed: token 8 attends to 3
    assert rows[8] == [null, held, held]  # 9 computed: token 9 attends to 4
    assert rows[11] == [null, held, held]  # 12 computed: token 12 attends to 7
    assert rows[12] == [null, null, held, held]  # 13 computed: token 13 attends to 8
    for number, places in enumerate(rows, start=1):
        assert places.index(held) == max(number - 5, 0) // 4


def test_check_finds_a_late_window_and_a_wrong_last_block() -> None:
    cache = grouped(FULL, LayerGroup(4, 6))
    seq = cache.prefilled(prompt(1, 11))
    store = cache.cache._parts.grouped
    store._slides_at[0] = 14
    with pytest.raises(InvariantError, match=r"^I2: row 0 slides in group 1 at 13 computed tokens; it is looked at"):
        cache.cache.check()
    store._slides_at[0] = 13
    cache.cache.check()
    store.groups[0].tail[0] += 1
    with pytest.raises(InvariantError, match=rf"^I2: sequence {seq}, group 0 has block"):
        cache.cache.check()


LAYOUTS = ("up", "down", "runs", "shuffled")


def laid_out(cache: Checked, layout: str, choose: random.Random) -> None:
    """Let the free blocks come in this order."""
    size = 3 if layout == "runs" else 1
    pieces = [cache.pool.get_new_blocks(size) for _ in range(cache.pool.num_free_blocks // size)]
    if layout in ("runs", "shuffled"):
        choose.shuffle(pieces)
    elif layout == "up":
        pieces.reverse()
    for lease in pieces:
        cache.pool.free_blocks(lease)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [(FULL, LayerGroup(4, 6)), (FULL, LayerGroup(8, 20), LayerGroup(8))])
def test_runs_of_blocks_are_found_like_single_blocks(layout: str, groups: tuple[LayerGroup, ...]) -> None:
    """Neighbours are compared before anything is hashed.

    Equal prompts that are computed together leave duplicates, of which the oldest is to be found; some lose their
    content, some are evicted.
    """
    choose = random.Random(f"{run_seed()} {layout} {len(groups)}")
    found = beside = 0
    for _ in range(draws(45, 3)):
        cache = Checked(90, groups=groups, max_num_seqs=6)
        laid_out(cache, layout, choose)
        trunks = [prompt(number, 40) for number in (1, 2)]
        running: list[int] = []
        for _ in range(25):
            tokens = choose.choice(trunks)[: choose.randrange(1, 41)] + [choose.randrange(9)] * choose.randrange(8)
            if choose.random() < 0.6 and cache.can_allocate(tokens) is Admission.OK:
                running.append(cache.allocate(tokens))
            elif running and choose.random() < 0.5:
                for seq in running:
                    cache.try_compute(seq)
            elif running:
                cache.free(running.pop(choose.randrange(len(running))))
            counts = found_as_one_by_one(cache, choose.choice(trunks))
            found, beside = found + counts[0], beside + counts[1]
    assert found > 100
    assert layout == "shuffled" or beside > found // 4


def found_as_one_by_one(cache: Checked, tokens: list[int]) -> tuple[int, int]:
    """Look a prompt up, and each of its blocks by itself; how many were found, and lay beside the one before."""
    parts = cache.cache._parts
    index = parts.token_blocks.index
    made = make_prompt(tokens, (), 4)
    token_blocks = index.find_prompt(made, made.num_tokens // 4)
    found = beside = 0
    for group in parts.grouped.groups:
        span = int(group.span)
        last = len(token_blocks) // span
        contents = [int(index.content_of(token_blocks[place * span + span - 1])) for place in range(last)]
        expected = [int(parts.grouped.pool.find_content(content, group.number)) for content in contents]
        for stride in (1, -1):
            order = list(range(last))[::stride]
            gone = next((place for place in order if not expected[place]), last if stride == 1 else -1)
            places = vec[i64]([0] * last)
            start, end = (0, last) if stride == 1 else (last - 1, -1)
            pool = parts.grouped.pool
            assert pool.find_run(index, token_blocks, span, group.number, places, start, end, stride) == gone
            reached = order[: order.index(gone)] if gone in order else order
            assert [places[place] for place in reached] == [expected[place] for place in reached]
            found += len(reached)
            beside += sum(abs(expected[one] - expected[two]) == 1 for one, two in pairwise(reached))
    return found, beside


def test_a_window_of_one_holds_no_block_but_the_one_it_writes() -> None:
    cache = grouped(LayerGroup(2, 1), num_blocks=3)
    seq = cache.allocate(prompt(1, 9))
    for computed in range(1, 10):
        assert cache.reserve([seq], 1).all_fit
        cache.commit([seq], 1)
        held = [place for place, block in enumerate(row(cache, seq, 0)) if block]
        # A block stays until the token after its last one is due.
        assert held == ([computed // 2] if computed % 2 else [])


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", range(1, 10))
def test_the_smallest_pool_a_window_runs_in(block_size: int, window: int) -> None:
    """`LayerGroup.num_blocks` token by token is the truth: that many blocks are OK and enough, one less is NEVER."""
    group = LayerGroup(block_size, window)
    most = max(group.num_blocks(computed + 1, computed) for computed in range(20))
    cache = grouped(group, num_blocks=1 + most)
    assert cache.can_allocate(prompt(1, 20)) is Admission.OK
    seq = cache.allocate(prompt(1, 20))
    for _ in range(20):
        assert cache.reserve([seq], 1).all_fit
        cache.commit([seq], 1)
    if most > 1:
        assert grouped(group, num_blocks=most).can_allocate(prompt(1, 20)) is Admission.NEVER


@pytest.mark.parametrize("window", range(1, 10))
def test_a_pool_full_of_its_own_hits_still_admits(window: int) -> None:
    """With nothing running all blocks are idle, so LATER would wait forever: a hit needs no more blocks than a miss."""
    group = LayerGroup(4, window)
    most = max(group.num_blocks(computed + 1, computed) for computed in range(40))
    for length in range(1, 30):
        cache = grouped(group, num_blocks=1 + most)
        seq = cache.allocate(prompt(1, length))
        for _ in range(length):
            cache.compute_some(seq, 1)
        cache.free(seq)
        for longer in range(1, 30):
            assert cache.can_allocate(prompt(1, longer)) is Admission.OK


def test_a_cut_must_leave_the_window() -> None:
    """Window 4: after 12 computed tokens block 0 and 1 are gone; a cut to 11 has its window, one to 10 not."""
    cache = grouped(LayerGroup(4, 4))
    seq = cache.prefilled(prompt(1, 12))
    assert row(cache, seq, 0)[:2] == [0, 0]
    with pytest.raises(blockyard.InvalidArgument, match="at least 11"):
        cache.truncate(seq, 10)
    cache.truncate(seq, 11)
    assert cache.state(seq) == (11, 11)


# ---------------------------------------------------------------- hits


def test_a_hit_needs_only_the_window() -> None:
    """The blocks before the window are evicted, but not those in it: the hit keeps its length."""
    cache = grouped(LayerGroup(4, 4), num_blocks=7)
    seq = cache.allocate(prompt(1, 17))
    for count in (4, 4, 4, 4, 1):
        cache.compute_some(seq, count)
    assert [block != 0 for block in row(cache, seq, 0)] == [False, False, False, True, True]
    window = row(cache, seq, 0)[3]
    lease = cache.pool.get_new_blocks(cache.num_free_blocks)  # evicts blocks 0 to 2 of the prompt
    assert cache.num_cached_blocks == 1
    cache.pool.free_blocks(lease)
    other = cache.allocate([*prompt(1, 16), 5, 5])
    assert cache.num_computed_tokens(other) == 16
    assert row(cache, other, 0) == [0, 0, 0, window]


def test_hit_needs_its_whole_window() -> None:
    """Window 8 needs two blocks before the end of a hit. Only block 2 is left, so neither 16 nor 12 nor 8 is a hit."""
    cache = grouped(LayerGroup(4, 8), num_blocks=7)
    seq = cache.prefilled(prompt(1, 16))
    blocks = row(cache, seq, 0)
    assert blocks[:2] == [0, 0]  # 16 - 8 + 1 = 9: block 2 is the first that is needed
    cache.free(seq)
    # Freed last block first, behind what slid away before: the order of eviction is 0, 1, 3, 2.
    cached = [block for block in cache.free_order() if cache.pool.cached_mask()[block]]
    assert cached[2:] == [blocks[3], blocks[2]]
    lease = cache.pool.get_new_blocks(cache.num_free_blocks - 1)  # all but block 2
    assert cache.num_cached_blocks == 1
    cache.pool.free_blocks(lease)
    assert cache.num_computed_tokens(cache.allocate([*prompt(1, 16), 5])) == 0


@pytest.mark.parametrize("sizes", [(2, 3), (4, 6), (1, 5), (2, 4, 8), (3, 3)])
def test_a_hit_ends_where_blocks_of_all_groups_end(sizes: tuple[int, ...]) -> None:
    """A hit is a multiple of the least common multiple of the block sizes, and leaves the last token to compute."""
    alignment = math.lcm(*sizes)
    cache = grouped(*(LayerGroup(size) for size in sizes), num_blocks=200)
    tokens = prompt(1, 30)
    cache.prefilled(tokens)
    for common in range(1, 31):
        for tail in ([], [5, 5, 5]):
            seq = cache.allocate(tokens[:common] + tail)
            usable = common - 1 if not tail else common
            assert cache.num_computed_tokens(seq) == usable // alignment * alignment, (common, tail)
            cache.free(seq)


def test_single_group_of_full_attention_is_not_mapped() -> None:
    """MLA has one latent vector a token for all heads: one group, one block size, the same tables as without groups."""
    mla = Checked(20, groups=(LayerGroup(8, name="mla"),))
    plain = Checked(20, 8)
    assert not mla.config.is_mapped
    for cache in (mla, plain):
        first = cache.prefilled(prompt(1, 20), [3])
        cache.fork(first)
        cache.allocate(prompt(1, 17))
    assert mla.block_table.tolist() == plain.block_table.tolist()
    assert mla.stats() == plain.stats()
    assert mla.block_size == 8


def test_groups_do_not_evict_each_others_hits() -> None:
    """Six blocks: two of each group idle and hit, then one of each, younger.

    The first group's new block is not the second group's oldest hit, because all hits are held before anything new is
    taken.
    """
    cache = grouped(FULL, FULL, num_blocks=7)
    old = cache.prefilled(prompt(1, 8))
    rows = [row(cache, old, group) for group in range(2)]
    cache.free(old)
    young = cache.prefilled(prompt(2, 4))
    taken = [row(cache, young, group)[0] for group in range(2)]
    cache.free(young)
    assert cache.free_order() == [*rows[0][::-1], *rows[1][::-1], *taken]
    seq = cache.allocate(prompt(1, 12))
    assert cache.num_computed_tokens(seq) == 8
    assert [row(cache, seq, group) for group in range(2)] == [[*rows[group], taken[group]] for group in range(2)]


def test_groups_never_share_a_block() -> None:
    """Even with equal windows, sizes and tokens each group has separate blocks, because they hold other layers."""
    cache = grouped(FULL, FULL, LayerGroup(4, 100))
    first = cache.prefilled(prompt(1, 12))
    second = cache.allocate([*prompt(1, 12), 5])
    assert [row(cache, second, group)[:3] for group in range(3)] == [row(cache, first, group) for group in range(3)]
    held = [block for group in range(3) for block in row(cache, first, group)]
    assert len(set(held)) == 9


def test_each_group_copies_what_forks_share() -> None:
    """Six tokens: the second block of 4 is shared and partial, the blocks of 2 and 3 are full.

    One fork copies it; the other owns the old one then. A group says which layers' blocks are meant.
    """
    cache = grouped(LayerGroup(2), LayerGroup(4), LayerGroup(3))
    first = cache.prefilled(prompt(1, 6))
    (second,) = cache.fork(first)
    old = row(cache, first, 1)[1]
    cache.append([first, second], [5, 6])
    plan = cache.reserve([first, second], 1)
    assert plan.copies.tolist() == [[old, row(cache, first, 1)[1]]]
    assert plan.copy_groups.tolist() == [1]
    assert row(cache, second, 1)[1] == old
    for group in range(3):
        mine, theirs = row(cache, first, group), row(cache, second, group)
        size = cache.config.groups[group].block_size
        assert [a == b for a, b in zip(mine, theirs, strict=True)] == [place < 6 // size for place in range(len(mine))]
    assert cache.stats().num_copied_blocks == 1


#: Seeds of worlds with a hit or more that a group cuts short: only one world in twelve has one.
CUTTING = (57, 20, 8)


class HitWorld(World):
    """Before each allocation the longest common hit is looked for the slow way, in what the pools say they cache."""

    def keys(self, earlier: Any) -> tuple[Any, ...]:
        return ()

    def spans(self, tokens: list[int], earlier: Any) -> tuple[Any, ...]:
        return ()

    def more_config(self, groups: tuple[Any, ...], size: int) -> dict[str, Any]:
        return {**super().more_config(groups, size), "partial_hits": False}

    def allocate(self) -> int:
        state = self.random.getstate()
        tokens = self.prompt(self.earlier())
        self.random.setstate(state)
        expected = self.longest_hit(tokens) if self.config.is_mapped else None
        hit = super().allocate()
        if expected is not None:
            assert hit == expected, f"seed {self.seed}: {tokens}"
            self.counts["hits compared"] += 1
            self.counts["hits above 0"] += hit > 0
            self.counts["cut hits"] += 0 < hit < self.in_pages(tokens)
        return hit

    def prefixes(self) -> dict[int, tuple[int, ...]]:
        """All tokens up to the end of a page, by the page's content."""
        pages, index = self.cache._parts.token_blocks, self.cache._parts.token_blocks.index
        parents = {index.identity[2 * p]: (index.identity[2 * p + 1], p) for p in range(1, pages.num_blocks)}
        parents.pop(0, None)
        root = index.known_root(())

        def walk(content: int) -> tuple[int, ...] | None:
            if content == root:
                return ()
            if content not in parents:
                return None
            parent, page = parents[content]
            before = walk(parent)
            tokens = pages.block_tokens(vec[i32]([page]), pages.block_size).tolist()
            return None if before is None else before + tuple(tokens)

        found = {content: walk(content) for content in parents}
        return {content: tokens for content, tokens in found.items() if tokens is not None}

    def in_pages(self, tokens: list[int]) -> int:
        known = set(self.prefixes().values())
        size = self.config.hash_block_size
        length = 0
        while length + size < len(tokens) and tuple(tokens[: length + size]) in known:
            length += size
        return length

    def longest_hit(self, tokens: list[int]) -> int:
        prefixes = self.prefixes()
        stored = set()
        for pool in (self.cache._parts.kv_pool, self.cache._parts.grouped.cpu):
            for block in range(1, int(pool.capacity) if pool else 1):
                if pool.is_cached(block) and pool.content_of(block) in prefixes:
                    stored.add((pool.group_of(block), prefixes[pool.content_of(block)]))
        length = self.in_pages(tokens)
        while length > 0:
            if length % self.config.hit_alignment == 0 and all(
                (number, tuple(tokens[: (place + 1) * group.block_size])) in stored
                for number, group in enumerate(self.config.layer_groups)
                for place in range(group.first_needed_block(length), length // group.block_size)
            ):
                return length
            length -= 1
        return 0


def test_the_longest_common_hit_against_brute_force() -> None:
    seeds = [*CUTTING, *(run_seed() + number for number in range(draws(180, 40)))]
    worlds = [HitWorld(blockyard, seed) for seed in seeds]
    for world in worlds:
        world.run(120)
    counts = sum((world.counts for world in worlds), worlds[0].counts.__class__())
    assert counts["hits compared"] > 50
    assert counts["hits above 0"] > 10
    assert counts["cut hits"] > 3


# ---------------------------------------------------------------- limits


def test_unsupported_configs_are_refused() -> None:
    for groups in ([FULL], (FULL, 4), FULL, (FULL,) * 65, None):
        with pytest.raises(blockyard.InvalidArgument, match="groups"):
            CacheConfig(10, groups=groups)  # type: ignore[arg-type]


def test_unknown_group_is_refused() -> None:
    cache = grouped(FULL, LayerGroup(4, 6))
    seq = cache.allocate([1])
    for number in (2, -1, True, 0.0, "0", None, 2**70):
        with pytest.raises(blockyard.InvalidArgument, match="group"):
            cache.block_ids(seq, number)
        with pytest.raises(blockyard.InvalidArgument, match="group"):
            cache.group_table(number)
