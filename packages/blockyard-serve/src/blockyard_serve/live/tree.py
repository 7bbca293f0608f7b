"""The tree of what is cached, as the page shows it: the heaviest branches, what of them hit, the rest summed.

The forest of branches comes from who follows whom, for each block, with no loop over blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.keys import plain_keys, spans_of

from .desk import Surroundings
from .prompts import MAX_TOKENS, AskedPrompt

Ints = NDArray[np.int64]
NONE = -1


@dataclass(frozen=True, slots=True)
class Forest:
    """Branches: contents one behind another, up to where several follow one. A branch comes after the one before it.

    contents: int64 (n,), ids in rising order. blocks: int64 (n,), a block that caches each. branch: int64 (n,), which
    branch it is of. The rest is by branch: size: its contents. weight: those of it and of all behind it. parent: the
    branch before it, -1 for none. start: contents before its first one. root: the id of what stands at the very
    beginning. is_marked: whether something besides text stands in its first content (an image).
    """

    contents: Ints
    blocks: Ints
    branch: Ints
    size: Ints
    weight: Ints
    parent: Ints
    start: Ints
    root: Ints
    is_marked: NDArray[np.bool_]

    def children(self, branch: int) -> Ints:
        """Return the branches right behind one, or behind none (-1). O(branches)."""
        return np.flatnonzero(self.parent == branch)

    def members(self, branch: int) -> Ints:
        """Return the places of a branch's contents, in order. O(contents)."""
        return np.flatnonzero(self.branch == branch)


def forest_of(pairs: Ints, keys: Mapping[int, tuple[object, ...]]) -> Forest:
    """Return the forest of what blocks cache. O(n log n) for n blocks, in numpy.

    pairs: int64 (blocks, 2), what each block caches, 0 for nothing, and what is before that. keys: of roots, by id; one
    that stands in the middle of a prompt has (what is before it, ...). A content whose parent has gone begins anew.
    """
    cached = np.flatnonzero(pairs[:, 0])
    contents, first = np.unique(pairs[cached, 0], return_index=True)
    blocks = cached[first]
    inner = {root: each[0] for root, each in keys.items() if each and isinstance(each[0], int)}
    is_marked = np.isin(pairs[blocks, 1], list(inner))
    before = _past_roots(pairs[blocks, 1], inner)
    parent = _places(contents, before)
    num_children = np.bincount(parent[parent >= 0], minlength=len(contents))
    is_first = (parent < 0) | (num_children[parent] != 1) | is_marked
    heads = np.flatnonzero(is_first)
    branch = np.searchsorted(heads, _last_of(np.where(is_first, NONE, parent)))
    size = np.bincount(branch, minlength=len(heads))
    above = np.where(parent[heads] < 0, NONE, branch[parent[heads]])
    weight, start = _sums(above, size)
    root = before[heads][_last_of(above)]
    return Forest(contents, blocks, branch, size, weight, above, start, root, is_marked[heads])


def _past_roots(before: Ints, inner: Mapping[int, int]) -> Ints:
    """Return the same, with what stands before a root in the middle of a prompt in its place."""
    if not inner:
        return before
    seen, inverse = np.unique(before, return_inverse=True)
    for place in np.flatnonzero(np.isin(seen, list(inner))):
        while int(seen[place]) in inner:
            seen[place] = inner[int(seen[place])]
    return seen[inverse]


def _places(contents: Ints, names: Ints) -> Ints:
    """Return where names stand among sorted contents, -1 for those that do not."""
    if len(contents) == 0:
        return np.zeros(0, np.int64)
    places = np.minimum(np.searchsorted(contents, names), len(contents) - 1)
    return np.where(contents[places] == names, places, NONE)


def _last_of(above: Ints) -> Ints:
    """Return the end of each one's way up. O(n log longest way), by steps that double."""
    ends = np.where(above < 0, np.arange(len(above)), above)
    while True:
        further = ends[ends]
        if np.array_equal(further, ends):
            return ends
        ends = further


def _sums(above: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Sum for each node of a forest the sizes of it and all below, and those of all above it. O(n log depth).

    After k steps the sums reach 2**k levels.
    """
    below, over = size.astype(np.float64), np.where(above < 0, 0, size[above])
    while (moving := np.flatnonzero(above >= 0)).size:
        higher = above[moving]
        below = below + np.bincount(higher, below[moving], minlength=len(size))
        over[moving] += over[higher]
        above = np.where(above < 0, NONE, above[above])
    return below.astype(np.int64), over


def heaviest(forest: Forest, most: int) -> list[int]:
    """Return the branches with most behind them, each after the one before it, at most `most`. O(branches * most)."""
    found: list[int] = []
    waiting: list[tuple[int, int]] = []
    _offer(waiting, forest, NONE, most)
    while waiting and len(found) < most:
        branch = heapq.heappop(waiting)[1]
        found.append(branch)
        _offer(waiting, forest, branch, most)
    return found


def _offer(waiting: list[tuple[int, int]], forest: Forest, branch: int, most: int) -> None:
    children = forest.children(branch)
    if len(children) > most:
        children = children[np.argpartition(-forest.weight[children], most)[:most]]
    for child in children.tolist():
        heapq.heappush(waiting, (-int(forest.weight[child]), child))


#: Branches that are shown, and tokens of each that are its label.
MAX_BRANCHES = 24
LABEL_TOKENS = 48
#: Blocks whose identities are copied at a time, in a third of a millisecond; roots whose keys are.
SLICE_BLOCKS = 2**17
MAX_ROOTS = 4096
#: Blocks of a branch that light up.
MAX_LIT = 2**14

Keys = tuple[object, ...]


@dataclass(slots=True)
class TreeBranch:
    """Cached blocks one behind another, up to where several follow one; a branch below another continues it.

    tenant: a number for the keys, 0 for none. start, end: blocks of the prompt. blocks, contents: int64, a block that
    caches each of its contents. prefix: int32, the tokens up to `end`, of which the first 1,024 are known.
    num_below: contents of all branches behind it. is_marked: whether something besides text stands in its first block,
    so that tokens do not tell which prompts got into it. num_rest: of those that are not shown; num_rest_branches:
    right behind it. num_requests: latest prompts that got into it. num_asked, num_hit: tokens of theirs within it, all
    and from the cache.
    """

    tenant: int
    keys: Keys | None
    start: int
    end: int
    blocks: NDArray[np.int64]
    contents: NDArray[np.int64]
    num_below: int
    is_marked: bool = False
    num_rest: int = 0
    num_rest_branches: int = 0
    prefix: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    label: list[int] = field(default_factory=list)
    num_requests: int = 0
    num_asked: int = 0
    num_hit: int = 0
    below: list[TreeBranch] = field(default_factory=list)


@dataclass(slots=True)
class Tree:
    """top: the branches that begin prompts. num_cached: contents in all. num_rest, num_rest_branches: of those at the
    top that are not shown."""

    top: list[TreeBranch]
    num_cached: int
    num_rest: int
    num_rest_branches: int

    def branches(self) -> list[TreeBranch]:
        """Return all that are shown, each before those below it."""
        return branches_of(self.top)


def branches_of(tree: Iterable[TreeBranch]) -> list[TreeBranch]:
    """Return all branches, each before those below it."""
    found: list[TreeBranch] = []
    for branch in tree:
        found += [branch, *branches_of(branch.below)]
    return found


# In the thread that owns the cache.


def see_identities(first: int, cache: KVCacheManager, around: Surroundings) -> tuple[NDArray[np.int64], int]:  # noqa: ARG001
    """Return what `SLICE_BLOCKS` blocks from one on cache, and the number of blocks. A memory copy."""
    contents = cache.contents
    return contents.identities(first, first + SLICE_BLOCKS), contents.num_blocks


def see_keys(cache: KVCacheManager, around: Surroundings) -> dict[int, Keys]:  # noqa: ARG001
    """Return the keys of the roots that were used last."""
    return cache.contents.keys(MAX_ROOTS)


def see_tokens(
    blocks: NDArray[np.int64],
    contents: NDArray[np.int64],
    cache: KVCacheManager,
    around: Surroundings,  # noqa: ARG001
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the tokens of blocks, and which of them still cache these contents. O(tokens)."""
    ids = blocks.astype(np.int32)
    there = ids < cache.contents.num_blocks
    ids = np.where(there, ids, 0).astype(np.int32)
    return cache.contents.tokens(ids), there & cache.contents.still(ids, contents)


def see_branch(branch: TreeBranch, cache: KVCacheManager, around: Surroundings) -> list[int]:  # noqa: ARG001
    """Return the blocks that still cache a branch, in order, as far as blocks are known by their tokens. O(blocks)."""
    if cache.config.is_mapped:
        return []
    blocks, contents = branch.blocks[:MAX_LIT], branch.contents[:MAX_LIT]
    there = blocks < cache.contents.num_blocks  # a pool may have shrunk
    ids = blocks[there].astype(np.int32)
    lit: list[int] = ids[cache.contents.still(ids, contents[there])].tolist()
    return lit


# In any other thread.


def cached_tree(pairs: NDArray[np.int64], keys: Mapping[int, Keys]) -> Tree:
    """Return the heaviest branches of what blocks cache. pairs, keys: as for `forest_of`."""
    forest = forest_of(pairs, keys)
    shown = heaviest(forest, MAX_BRANCHES)
    tenants = _tenants([int(forest.root[branch]) for branch in shown], keys)
    made = {branch: _branch(forest, branch, tenants, keys) for branch in shown}
    top = [made[branch] for branch in shown if forest.parent[branch] == NONE]
    for branch in shown:
        if forest.parent[branch] != NONE:
            made[int(forest.parent[branch])].below.append(made[branch])
    for branch, each in made.items():
        each.num_rest = each.num_below - sum(_weight(one) for one in each.below)
        each.num_rest_branches = len(forest.children(branch)) - len(each.below)
    total = len(forest.contents)
    at_top = len(forest.children(NONE)) - len(top)
    return Tree(sorted(top, key=lambda each: each.tenant), total, total - sum(map(_weight, top)), at_top)


def _weight(branch: TreeBranch) -> int:
    return branch.end - branch.start + branch.num_below


def _tenants(roots: list[int], keys: Mapping[int, Keys]) -> dict[int, int]:
    """Return a number for each root: 0 for that without keys, the others in the order of their weight."""
    others = [root for root in dict.fromkeys(roots) if keys.get(root) != ()]
    return dict.fromkeys(roots, 0) | {root: number for number, root in enumerate(others, 1)}


def _branch(forest: Forest, branch: int, tenants: Mapping[int, int], keys: Mapping[int, Keys]) -> TreeBranch:
    members, root = forest.members(branch), int(forest.root[branch])
    start, size = int(forest.start[branch]), len(members)
    behind = int(forest.weight[branch]) - size
    blocks, contents = forest.blocks[members], forest.contents[members]
    return TreeBranch(
        tenants[root], keys.get(root), start, start + size, blocks, contents, behind, bool(forest.is_marked[branch])
    )


def wanted(branches: list[TreeBranch], block_size: int) -> list[int]:
    """For each branch, how many of its first blocks the page reads: for its label, and to see who got into it."""
    label = -(-LABEL_TOKENS // block_size)
    return [min(each.end - each.start, max(label, MAX_TOKENS // block_size - each.start)) for each in branches]


def note_tokens(
    tree: Tree, counts: list[int], tokens: NDArray[np.int32], still: NDArray[np.bool_], block_size: int
) -> None:
    """What was read of the branches, in their order: their labels and prefixes. A branch that has gone has none."""
    at = 0
    own: dict[int, NDArray[np.int32]] = {}
    for branch, count in zip(tree.branches(), counts, strict=True):
        there = still[at : at + count]
        whole = count if there.all() else int(np.argmin(there))
        own[id(branch)] = tokens[at : at + whole].reshape(-1)
        branch.label = own[id(branch)][:LABEL_TOKENS].tolist()
        at += count
    nothing = np.empty(0, np.int32)
    for branch in tree.top:
        _note_prefix(branch, nothing, own, block_size)


def _note_prefix(
    branch: TreeBranch, before: NDArray[np.int32], own: Mapping[int, NDArray[np.int32]], block_size: int
) -> None:
    is_known = len(before) == branch.start * block_size  # the tokens of all before it
    branch.prefix = np.concatenate((before, own[id(branch)]))[:MAX_TOKENS] if is_known else before
    for below in branch.below:
        _note_prefix(below, branch.prefix, own, block_size)


def count_prompts(tree: Tree, prompts: Iterable[AskedPrompt], block_size: int) -> None:
    """Which branches the latest prompts got into, and what of them came from the cache. O(prompts * branches)."""
    for prompt in prompts:
        keys = plain_keys(prompt.keys)
        text = prompt.tokens[: min((span.start for span in spans_of(prompt.keys)), default=MAX_TOKENS)]
        _count([branch for branch in tree.top if branch.keys == keys], text, prompt.num_hit, block_size)


def _count(branches: list[TreeBranch], text: NDArray[np.int32], num_hit: int, size: int) -> None:
    """Count a prompt that begins with `text`, and had `num_hit` tokens of it from the cache."""
    for branch in branches:
        reached = 0 if branch.is_marked else _common_blocks(branch, text, size)
        if reached > branch.start:
            num_asked = (reached - branch.start) * size
            branch.num_requests += 1
            branch.num_asked += num_asked
            branch.num_hit += min(max(num_hit - branch.start * size, 0), num_asked)
            if reached == branch.end:
                _count(branch.below, text, num_hit, size)
            return


def _common_blocks(branch: TreeBranch, text: NDArray[np.int32], size: int) -> int:
    """Count the leading blocks that a prompt and a branch have in common, of those that are known of both."""
    num_tokens = min(len(branch.prefix), len(text)) // size * size
    differs = np.flatnonzero(branch.prefix[:num_tokens] != text[:num_tokens])
    return int(differs[0] if len(differs) else num_tokens) // size


def told(tree: Tree, labels: list[str], num_prompts: int) -> dict[str, Any]:
    """Return the tree for the page. labels: of its branches, in their order."""
    branches = [_told(number, branch, labels[number]) for number, branch in enumerate(tree.branches())]
    rest = {"cached": tree.num_cached, "rest": tree.num_rest, "rest_branches": tree.num_rest_branches}
    return {"branches": branches, "num_prompts": num_prompts, **rest}


def _told(number: int, branch: TreeBranch, label: str) -> dict[str, Any]:
    return {
        "id": number,
        "depth": branch.start,
        "blocks": branch.end - branch.start,
        "behind": branch.num_below,
        "rest": branch.num_rest,
        "rest_branches": branch.num_rest_branches,
        "tenant": branch.tenant,
        "requests": branch.num_requests,
        "asked": branch.num_asked,
        "hit": branch.num_hit,
        "text": label,
        "below": len(branch.below),
    }
