"""SGLang's order of waiting requests by shared prefixes: depth first, the subtree with most requests first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Path = npt.NDArray[np.int32]


@dataclass
class SharedStart:
    """A prefix shared by several paths.

    Attributes:
        length: its length in bytes.
        ends: indices of the paths that end here.
        children: longer shared prefixes.
        weight: number of paths through it.
    """

    length: int
    ends: list[int] = field(default_factory=list)
    children: list[SharedStart] = field(default_factory=list)
    weight: int = 0


def weight_order(paths: Sequence[Path]) -> list[int]:
    """Return the indices of `paths`, lists of blocks: the heaviest subtree first, and its deepest paths first.

    O(total length + n log n) for n paths.
    """
    root = _tree(paths)
    order: list[int] = []
    stack: list[tuple[SharedStart, bool]] = [(root, False)]
    while stack:
        branch, is_left = stack.pop()
        if is_left:
            order.extend(branch.ends)
            continue
        stack.append((branch, True))
        # The sort is stable: of equal weights, the earlier request comes first.
        heaviest = sorted(branch.children, key=lambda child: -child.weight)
        stack.extend((child, False) for child in reversed(heaviest))
    return order


def _tree(paths: Sequence[Path]) -> SharedStart:
    """Return the tree of all prefixes at which a path ends or two paths branch."""
    root = SharedStart(0)
    # Big-endian bytes sort like the numbers, and a prefix sorts before its continuations.
    keys = [path.astype(">i4").tobytes() for path in paths]
    open_branches = [root]
    before = b""
    for index in sorted(range(len(paths)), key=keys.__getitem__):
        key = keys[index]
        count = min(len(before), len(key)) // 4
        differ = np.nonzero(np.frombuffer(before, np.int32, count) != np.frombuffer(key, np.int32, count))[0]
        shared = 4 * (int(differ[0]) if len(differ) else count)
        _close(open_branches, shared)
        if len(key) > open_branches[-1].length:
            branch = SharedStart(len(key))
            open_branches[-1].children.append(branch)
            open_branches.append(branch)
        open_branches[-1].ends.append(index)
        before = key
    _close(open_branches, 0)
    _weigh(root)
    return root


def _close(open_branches: list[SharedStart], shared: int) -> None:
    """Close the branches that the next path does not share, splitting one that it leaves in the middle."""
    last: SharedStart | None = None
    while open_branches[-1].length > shared:
        last = open_branches.pop()
    if last is not None and open_branches[-1].length < shared:
        parted = SharedStart(shared, children=[last])
        open_branches[-1].children[-1] = parted
        open_branches.append(parted)


def _weigh(root: SharedStart) -> None:
    """Count the paths in each subtree, and order children by their first path."""
    firsts: dict[int, int] = {}
    stack = [(root, False)]
    while stack:
        branch, is_left = stack.pop()
        if not is_left:
            stack.append((branch, True))
            stack.extend((child, False) for child in branch.children)
            continue
        branch.ends.sort()
        branch.weight = len(branch.ends) + sum(child.weight for child in branch.children)
        branch.children.sort(key=lambda child: firsts[id(child)])
        firsts[id(branch)] = min([*branch.ends[:1], *(firsts[id(child)] for child in branch.children[:1])], default=0)
