"""The tree of cached prefixes compared with the cache's own index; hits of the latest prompts; its cost."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest

from blockyard import CacheConfig, CacheSalt, KVCacheManager, LoRA, Span
from blockyard.config import cache_config
from blockyard_serve.live import CallQueue, EngineStatus
from blockyard_serve.live import feed as feeds
from blockyard_serve.live import tree as trees
from blockyard_serve.live.feed import PageFeed
from blockyard_serve.live.prompt_log import MAX_TOKENS, PromptLog
from blockyard_serve.live.tree import (
    NONE,
    Tree,
    TreeBranch,
    add_tokens,
    blocks_to_read,
    branches_of,
    cached_tree,
    count_prompts,
    forest_of,
    heaviest,
    read_tokens,
)
from blockyard_testing.patience import PATIENCE_SECONDS
from blockyard_testing.seeds import run_seed

SIZE = 4
AROUND = EngineStatus()
KEYS: tuple[tuple[Any, ...], ...] = ((), (CacheSalt("a"),), (LoRA("poet"),), (Span("image", 5, 3),))


def make_cache(num_blocks: int = 200, **settings: Any) -> KVCacheManager:
    return KVCacheManager(cache_config(num_blocks, SIZE, max_model_len=400, watermark=0.0, **settings))


def compute(cache: KVCacheManager, tokens: list[int], keys: tuple[Any, ...] = ()) -> None:
    seq = cache.allocate(tokens, extra_keys=keys)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    cache.free(seq)


def read(cache: KVCacheManager) -> Tree:
    """The tree as a feed makes it."""
    contents = cache.contents
    tree = cached_tree(contents.identities(0, contents.num_blocks), contents.keys(1000))
    fill(tree, cache)
    return tree


def fill(tree: Tree, cache: KVCacheManager) -> None:
    """Labels and prefixes, from what the blocks hold now."""
    branches = tree.branches()
    counts = blocks_to_read(branches, SIZE)
    if branches:
        blocks = np.concatenate([each.blocks[:n] for each, n in zip(branches, counts, strict=True)])
        names = np.concatenate([each.contents[:n] for each, n in zip(branches, counts, strict=True)])
        add_tokens(tree, counts, *read_tokens(blocks, names, cache, AROUND), SIZE)


def random_prompts(draw: random.Random) -> list[tuple[list[int], tuple[Any, ...]]]:
    prompts = [([draw.randrange(2) for _ in range(draw.randint(1, 60))], draw.choice(KEYS)) for _ in range(30)]
    return [(tokens, keys if len(tokens) > 8 else ()) for tokens, keys in prompts]


def test_tree_equals_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_BRANCHES", 10_000)
    draw = random.Random(run_seed())
    for _ in range(10):
        cache = make_cache(draw.choice([30, 80, 200]))
        prompts = random_prompts(draw)
        for tokens, keys in prompts:
            compute(cache, tokens, keys)
        tree = read(cache)
        for branch in tree.branches():
            assert branch.num_rest == branch.num_rest_branches == 0
            assert branch.num_below == sum(each.end - each.start for each in branches_of(branch.below))
            assert len(branch.blocks) == branch.end - branch.start > 0
            for below in branch.below:
                assert (below.start, below.tenant, below.keys) == (branch.end, branch.tenant, branch.keys)
        held = set(np.concatenate([branch.blocks for branch in tree.branches()]).tolist())
        cached = {block for block in range(1, cache.pool.num_blocks) if cache.block(block).is_cached}
        assert held <= cached
        assert len(held) == tree.num_cached == len({tuple(cache.contents.identities(b, b + 1)[0]) for b in cached})
        for tokens, keys in prompts:
            if not any(isinstance(key, Span) for key in keys):
                assert depth_of(tree, tokens, keys) == cache.num_cached_tokens([*tokens, 9], extra_keys=keys) // SIZE


def depth_of(tree: Tree, tokens: list[int], keys: tuple[Any, ...]) -> int:
    """How many leading blocks of a prompt the tree has."""
    found = 0
    plain = tuple(("salt", key.value) if isinstance(key, CacheSalt) else ("lora", key.name, key.path) for key in keys)
    at: list[TreeBranch] = [branch for branch in tree.top if branch.keys == plain]
    while at:
        through = [each for each in at if each.prefix[: (found + 1) * SIZE].tolist() == tokens[: (found + 1) * SIZE]]
        through = [
            each for each in through if not each.is_marked and len(each.prefix) >= (found + 1) * SIZE <= len(tokens)
        ]
        if not through:
            return found
        branch = through[0]
        while found < branch.end and branch.prefix[: (found + 1) * SIZE].tolist() == tokens[: (found + 1) * SIZE]:
            found += 1
        if found < branch.end:
            return found
        at = branch.below
    return found


def test_the_heaviest_branches_are_shown_and_the_rest_is_summed() -> None:
    draw = random.Random(run_seed())
    cache = make_cache(4000)
    for number in range(60):
        compute(cache, [1] * 8 + [number] * SIZE * draw.randint(1, 20))
    for number in range(40):
        compute(cache, [1000 + number] * SIZE * draw.randint(1, 20), (CacheSalt(str(number)),))
    tree = read(cache)
    shown = tree.branches()
    assert len(shown) == trees.MAX_BRANCHES
    everywhere = sum(branch.end - branch.start + branch.num_rest for branch in shown) + tree.num_rest
    assert everywhere == tree.num_cached == cache.num_cached_blocks
    (common,) = [branch for branch in tree.top if branch.keys == ()]
    assert len(common.below) + common.num_rest_branches == 60
    assert len(tree.top) + tree.num_rest_branches == 41
    forest = forest_of(cache.contents.identities(0, 4000), cache.contents.keys(1000))
    left_out = set(range(len(forest.size))) - set(heaviest(forest, trees.MAX_BRANCHES))
    kept = [branch.end - branch.start + branch.num_below for branch in shown]
    assert max(int(forest.weight[branch]) for branch in left_out) <= min(kept)
    assert [branch.tenant for branch in tree.top] == sorted(branch.tenant for branch in tree.top)


def test_branch_counts_the_latest_prompts_that_reached_it() -> None:
    draw = random.Random(run_seed())
    cache, log, kept = make_cache(300), PromptLog(), []
    for _ in range(80):
        tokens = [draw.randrange(2) for _ in range(draw.randint(4, 40))]
        keys = (CacheSalt(str(draw.randrange(2))),) if draw.random() < 0.5 else ()
        hit = cache.num_cached_tokens(tokens, extra_keys=keys)
        compute(cache, tokens, keys)
        log.note(tokens, hit, keys)
        kept.append((tokens, hit, keys))
    tree = read(cache)
    count_prompts(tree, log.latest(), SIZE)
    for branch in tree.branches():
        asked = hits = requests = 0
        for tokens, hit, keys in kept:
            plain = tuple(("salt", key.value) for key in keys)
            common = 0
            limit = min(len(tokens), len(branch.prefix)) // SIZE * SIZE
            while common < limit and tokens[: common + SIZE] == branch.prefix[: common + SIZE].tolist():
                common += SIZE
            if plain == branch.keys and common > branch.start * SIZE:
                requests += 1
                asked += common - branch.start * SIZE
                hits += min(max(hit - branch.start * SIZE, 0), common - branch.start * SIZE)
        assert (branch.num_requests, branch.num_asked, branch.num_hit) == (requests, asked, hits)


def test_blocks_evicted_during_a_read_are_only_missing() -> None:
    """Slices of different moments, and blocks that cache something else when their tokens are read."""
    draw = random.Random(run_seed())
    for _ in range(20):
        cache = make_cache(60)
        slices = []
        for first in range(0, 60, 20):
            for _ in range(4):
                compute(cache, [draw.randrange(2) for _ in range(draw.randint(4, 60))])
            slices.append(cache.contents.identities(first, first + 20))
            if draw.random() < 0.2:
                cache.reset_prefix_cache()
        keys = cache.contents.keys(1000)
        compute(cache, [draw.randrange(2) for _ in range(60)])
        tree = cached_tree(np.concatenate(slices), keys)
        fill(tree, cache)
        for branch in tree.branches():
            lit = trees.read_branch(branch, cache, AROUND)
            assert set(lit) <= set(branch.blocks.tolist())
            assert all(cache.block(block).is_cached for block in lit)
            assert len(branch.label) <= trees.LABEL_TOKENS


def test_an_empty_cache_has_an_empty_tree() -> None:
    assert read(make_cache()) == Tree([], 0, 0, 0)
    assert heaviest(forest_of(np.zeros((0, 2), np.int64), {}), 5) == []


def test_deep_tree_needs_no_loop_over_its_depth() -> None:
    """A branch at every block, 20,000 deep: sums by steps that double."""
    depth = 20_000
    pairs = np.zeros((2 * depth + 1, 2), np.int64)
    for level in range(depth):
        pairs[2 * level + 1] = 10 + 2 * level, 10 + 2 * level - 2 if level else 1
        pairs[2 * level + 2] = 11 + 2 * level, 10 + 2 * level - 2 if level else 1
    forest = forest_of(pairs, {1: ()})
    assert len(forest.size) == 2 * depth
    top = forest.children(NONE)
    assert sorted(forest.weight[top].tolist()) == [1, 2 * depth - 1]
    assert int(forest.start.max()) == depth - 1
    assert set(forest.root.tolist()) == {1}


@pytest.mark.parametrize("slice_blocks", [7, 1000])
def test_feed_sends_the_tree(slice_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "SLICE_BLOCKS", slice_blocks)
    monkeypatch.setattr(trees, "SLICE_BLOCKS", slice_blocks)
    monkeypatch.setattr(feeds, "SLICE_SECONDS", 0.0)
    cache = make_cache(60)
    compute(cache, [5] * 40)
    compute(cache, [5] * 20 + [6] * 20, ())
    calls, log = CallQueue(cache), PromptLog()
    log.note([5] * 40, 20)
    told = asyncio.run(first_tree(PageFeed(calls, log), calls))
    assert told["cached"] == 15
    assert [(branch["depth"], branch["blocks"], branch["behind"]) for branch in told["branches"]] == [
        (0, 5, 10),
        (5, 5, 0),
        (5, 5, 0),
    ]
    assert (told["branches"][0]["asked"], told["branches"][0]["hit"]) == (20, 20)
    assert told["branches"][0]["text"] == " ".join(["5"] * 8)


def test_feed_sends_an_empty_tree() -> None:
    calls = CallQueue(make_cache())
    told = asyncio.run(first_tree(PageFeed(calls, PromptLog()), calls))
    assert (told["branches"], told["cached"], told["num_prompts"]) == ([], 0, 0)


async def first_tree(feed: PageFeed, calls: CallQueue) -> Any:
    async def answer() -> None:
        while True:
            calls.run()
            await asyncio.sleep(0.001)

    answering = asyncio.ensure_future(answer())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for sent in feed.events():
                for part in sent.decode().split("\n\n"):
                    if part.startswith("event: tree\ndata: "):
                        return json.loads(part.partition("data: ")[2])
    finally:
        answering.cancel()


def test_prefixes_are_known_up_to_the_prompts_limit() -> None:
    cache = KVCacheManager(CacheConfig(200, 16, max_model_len=4000))
    seq = cache.allocate(list(range(2000)))
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    contents = cache.contents
    tree = cached_tree(contents.identities(0, 200), contents.keys(10))
    counts = blocks_to_read(tree.branches(), 16)
    (branch,) = tree.top
    assert (counts, branch.end) == ([MAX_TOKENS // 16], 125)
    add_tokens(tree, counts, *read_tokens(branch.blocks[:64], branch.contents[:64], cache, AROUND), 16)
    assert branch.prefix.tolist() == list(range(MAX_TOKENS))
    assert trees.read_branch(branch, cache, AROUND) == cache.block_ids(seq)[:125].tolist()
