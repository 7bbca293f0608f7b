"""SGLang's order of waiting requests by what they share: depth first, the fullest branch of the tree first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Path = npt.NDArray[np.int32]


@dataclass
class SharedStart:
    """A beginning that several paths share: which end there, and how many go through it."""

    length: int
    ends: list[int] = field(default_factory=list)
    children: list[SharedStart] = field(default_factory=list)
    weight: int = 0


def weight_order(paths: Sequence[Path]) -> list[int]:
    """The indices of `paths`, which are lists of blocks: those of the heaviest subtree first, the deepest ones first.

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
        # Stable: of equal weights the one that was asked for first.
        heaviest = sorted(branch.children, key=lambda child: -child.weight)
        stack.extend((child, False) for child in reversed(heaviest))
    return order


def _tree(paths: Sequence[Path]) -> SharedStart:
    """Return the tree of all beginnings at which a path ends or two part."""
    root = SharedStart(0)
    # Big-endian bytes sort as the numbers do, and a beginning stands before what goes on behind it.
    keys = [path.astype(">i4").tobytes() for path in paths]
    open_branches = [root]
    before = b""
    for index in sorted(range(len(paths)), key=keys.__getitem__):
        key = keys[index]
        shared = _shared_length(before, key)
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
    """Leave the branches that the next path does not go through; one that it leaves in the middle is parted."""
    last: SharedStart | None = None
    while open_branches[-1].length > shared:
        last = open_branches.pop()
    if last is not None and open_branches[-1].length < shared:
        parted = SharedStart(shared, children=[last])
        open_branches[-1].children[-1] = parted
        open_branches.append(parted)


def _shared_length(one: bytes, other: bytes) -> int:
    """Return how many bytes of whole blocks both begin with."""
    count = min(len(one), len(other)) // 4
    differ = np.nonzero(np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count))[0]
    return 4 * (int(differ[0]) if len(differ) else count)


def _weigh(root: SharedStart) -> None:
    """How many paths end in each subtree, and its children in the order of the first path in each."""
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
