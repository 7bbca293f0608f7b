"""The tree of cached prompts as the page shows it: the largest branches with their hits, and a sum of the rest.

The forest is made from each block's predecessor, without a loop over blocks.
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

from .call_queue import EngineStatus
from .prompt_log import MAX_TOKENS, AnsweredPrompt

Ints = NDArray[np.int64]
NONE = -1


@dataclass(frozen=True, slots=True)
class Forest:
    """Branches of cached contents. A branch is a chain up to a fork; parents come before their children.

    Attributes:
        contents: int64 (n,), content ids in ascending order.
        blocks: int64 (n,), a block that caches each content.
        branch: int64 (n,), branch of each content.
        size: contents of each branch.
        weight: contents of each branch and all of its descendants.
        parent: parent of each branch, -1 for none.
        start: number of contents before each branch.
        root: root content id of each branch's prompts, which identifies their extra keys.
        is_marked: whether the first content of each branch has something besides text (an image).
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
        """Return the children of a branch, or the branches without a parent for -1. O(branches)."""
        return np.flatnonzero(self.parent == branch)

    def members(self, branch: int) -> Ints:
        """Return the positions of a branch's contents, in order. O(contents)."""
        return np.flatnonzero(self.branch == branch)


def forest_of(pairs: Ints, keys: Mapping[int, tuple[object, ...]]) -> Forest:
    """Return the forest of the cached contents. O(n log n) for n blocks, in numpy.

    Args:
        pairs: int64 (blocks, 2), the content of each block, 0 for none, and the content before it.
        keys: extra keys of roots by id. Those of a root in the middle of a prompt begin with the content before it. A
            content whose parent is no longer cached begins a new branch.
    """
    cached = np.flatnonzero(pairs[:, 0])
    contents, first = np.unique(pairs[cached, 0], return_index=True)
    blocks = cached[first]
    inner = {root: each[0] for root, each in keys.items() if each and isinstance(each[0], int)}
    is_marked = np.isin(pairs[blocks, 1], list(inner))
    before = _past_roots(pairs[blocks, 1], inner)
    parent = _positions(contents, before)
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
    """Replace roots in the middle of a prompt by the contents before them."""
    if not inner:
        return before
    seen, inverse = np.unique(before, return_inverse=True)
    for row in np.flatnonzero(np.isin(seen, list(inner))):
        while int(seen[row]) in inner:
            seen[row] = inner[int(seen[row])]
    return seen[inverse]


def _positions(contents: Ints, names: Ints) -> Ints:
    """Return the positions of names in sorted contents, -1 for those that are missing."""
    if len(contents) == 0:
        return np.zeros(0, np.int64)
    positions = np.minimum(np.searchsorted(contents, names), len(contents) - 1)
    return np.where(contents[positions] == names, positions, NONE)


def _last_of(above: Ints) -> Ints:
    """Return the topmost ancestor of each node. O(n log depth), by pointer doubling."""
    ends = np.where(above < 0, np.arange(len(above)), above)
    while True:
        further = ends[ends]
        if np.array_equal(further, ends):
            return ends
        ends = further


def _sums(above: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Return for each node the sum of sizes of its subtree, and of its ancestors. O(n log depth).

    After k rounds the sums cover 2**k levels.
    """
    below, over = size.astype(np.float64), np.where(above < 0, 0, size[above])
    while (moving := np.flatnonzero(above >= 0)).size:
        higher = above[moving]
        below = below + np.bincount(higher, below[moving], minlength=len(size))
        over[moving] += over[higher]
        above = np.where(above < 0, NONE, above[above])
    return below.astype(np.int64), over


def heaviest(forest: Forest, most: int) -> list[int]:
    """Return the branches with the largest weight, parents first, at most `most`. O(branches * most)."""
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


#: Maximum of shown branches, and of tokens in the label of each.
MAX_BRANCHES = 24
LABEL_TOKENS = 48
#: Blocks whose identities are copied at a time, which takes a third of a millisecond; roots whose keys are.
SLICE_BLOCKS = 2**17
MAX_ROOTS = 4096
#: Maximum of highlighted blocks of a branch.
MAX_LIT = 2**14

Keys = tuple[object, ...]


@dataclass(slots=True)
class TreeBranch:
    """A branch of cached blocks, up to a fork. Its children continue it.

    Attributes:
        tenant: number for the keys, 0 for none.
        keys: extra keys of its blocks; None if unknown.
        start: number of the prompt's blocks before it.
        end: number of the prompt's blocks up to its end.
        num_below: contents of all descendants.
        is_marked: whether its first block has something besides text, so that tokens do not tell which prompts match.
        num_rest: contents of descendants that are not shown.
        num_rest_branches: children that are not shown.
        prefix: int32, the known tokens up to `end`, at most 1,024.
        num_requests: latest prompts that reached it.
        num_asked: tokens of these prompts within it.
        num_hit: tokens of these prompts within it that came from the cache.
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
    """The tree of cached prompts.

    Attributes:
        top: branches that begin prompts.
        num_cached: number of all contents.
        num_rest: contents under branches at the top that are not shown.
        num_rest_branches: branches at the top that are not shown.
    """

    top: list[TreeBranch]
    num_cached: int
    num_rest: int
    num_rest_branches: int

    def branches(self) -> list[TreeBranch]:
        """Return all shown branches, parents first."""
        return branches_of(self.top)


def branches_of(tree: Iterable[TreeBranch]) -> list[TreeBranch]:
    """Return all branches of a tree, parents first."""
    found: list[TreeBranch] = []
    for branch in tree:
        found += [branch, *branches_of(branch.below)]
    return found


# Only in the thread that owns the cache.


def read_identities(first: int, cache: KVCacheManager, status: EngineStatus) -> tuple[NDArray[np.int64], int]:  # noqa: ARG001
    """Copy the identities of up to `SLICE_BLOCKS` blocks from `first`; also return the number of blocks."""
    contents = cache.contents
    return contents.identities(first, first + SLICE_BLOCKS), contents.num_blocks


def read_keys(cache: KVCacheManager, status: EngineStatus) -> dict[int, Keys]:  # noqa: ARG001
    """Return the keys of the most recently used roots."""
    return cache.contents.keys(MAX_ROOTS)


def read_tokens(
    blocks: NDArray[np.int64],
    contents: NDArray[np.int64],
    cache: KVCacheManager,
    status: EngineStatus,  # noqa: ARG001
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the tokens of blocks, and which of them still cache these contents. O(tokens)."""
    ids = blocks.astype(np.int32)
    there = ids < cache.contents.num_blocks
    ids = np.where(there, ids, 0).astype(np.int32)
    return cache.contents.tokens(ids), there & cache.contents.still_cached(ids, contents)


def read_branch(branch: TreeBranch, cache: KVCacheManager, status: EngineStatus) -> list[int]:  # noqa: ARG001
    """Return the blocks that still cache a branch, in order; none in a cache with layer groups. O(blocks)."""
    if cache.config.is_mapped:
        return []
    blocks, contents = branch.blocks[:MAX_LIT], branch.contents[:MAX_LIT]
    there = blocks < cache.contents.num_blocks  # a pool may have shrunk
    ids = blocks[there].astype(np.int32)
    lit: list[int] = ids[cache.contents.still_cached(ids, contents[there])].tolist()
    return lit


# In any thread.


def cached_tree(pairs: NDArray[np.int64], keys: Mapping[int, Keys]) -> Tree:
    """Return the largest branches of the cached contents. `pairs` and `keys` are those of `forest_of`."""
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
    """Return a number for each root: 0 for the one without keys, the others in order of weight."""
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


def blocks_to_read(branches: list[TreeBranch], block_size: int) -> list[int]:
    """Return how many of each branch's first blocks to read, for its label and to match prompts."""
    label = -(-LABEL_TOKENS // block_size)
    return [min(each.end - each.start, max(label, MAX_TOKENS // block_size - each.start)) for each in branches]


def add_tokens(
    tree: Tree, counts: list[int], tokens: NDArray[np.int32], still: NDArray[np.bool_], block_size: int
) -> None:
    """Set the labels and prefixes of branches; those of branches that are no longer cached become empty.

    Args:
        tree: the branches.
        counts: blocks read per branch.
        tokens: tokens of all blocks, (blocks, block_size).
        still: whether each block still had its content when it was read, (blocks,).
        block_size: tokens per block.
    """
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


def count_prompts(tree: Tree, prompts: Iterable[AnsweredPrompt], block_size: int) -> None:
    """Count which branches the latest prompts reached, and their hits there. O(prompts * branches)."""
    for prompt in prompts:
        keys = plain_keys(prompt.keys)
        text = prompt.tokens[: min((span.start for span in spans_of(prompt.keys)), default=MAX_TOKENS)]
        _count([branch for branch in tree.top if branch.keys == keys], text, prompt.num_hit, block_size)


def _count(branches: list[TreeBranch], text: NDArray[np.int32], num_hit: int, size: int) -> None:
    """Count a prompt that begins with `text` and had `num_hit` tokens from the cache."""
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
    """Count the equal leading blocks of a prompt and a branch, as far as the tokens of both are known."""
    num_tokens = min(len(branch.prefix), len(text)) // size * size
    differs = np.flatnonzero(branch.prefix[:num_tokens] != text[:num_tokens])
    return int(differs[0] if len(differs) else num_tokens) // size


def tree_answer(tree: Tree, labels: list[str], num_prompts: int) -> dict[str, Any]:
    """Return the tree for the page; `labels` are those of its branches, in order."""
    branches = [_branch_answer(number, branch, labels[number]) for number, branch in enumerate(tree.branches())]
    rest = {"cached": tree.num_cached, "rest": tree.num_rest, "rest_branches": tree.num_rest_branches}
    return {"branches": branches, "num_prompts": num_prompts, **rest}


def _branch_answer(number: int, branch: TreeBranch, label: str) -> dict[str, Any]:
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
