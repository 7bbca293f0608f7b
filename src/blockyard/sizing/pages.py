"""How the layers of a model share one pool: groups whose blocks all have the same bytes.

A block id is one address for whichever group takes it, so a block must have the same bytes in every group. Two means
make it so, after vLLM's hybrid KV cache manager, in this order:

1. Layers with the same window form groups of the same number of layers. That number is the smallest count of layers
   with one window, or the largest if it is less than a quarter above; a group that lacks layers is padded.
2. If the layers of two groups keep different bytes for a token, the group with fewer takes a larger block size: the
   largest multiple of `block_size` whose block still fits the bytes of the largest group's. What is left is padding.

A model whose layers all have the same window is one group, of `block_size`, without padding, however its layers differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..groups import LayerGroup

#: (index of the layer, bytes of a token in it)
SizedLayer = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PageGroup:
    """A layer group, the indices of its layers, and the bytes of its block that they use; the rest is padding."""

    group: LayerGroup
    layers: tuple[int, ...]
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Pages:
    """The groups of a model, and the bytes that a block has in each of them."""

    groups: tuple[PageGroup, ...]
    bytes_per_block: int

    def over(self, shards: int, interleave: int) -> Pages:
        """The same pages, each of them one rank's part of a block of `shards` times as many tokens."""
        if shards == 1:
            return self
        groups = [
            replace(page.group, block_size=page.group.block_size * shards, shards=shards, interleave=interleave)
            for page in self.groups
        ]
        return Pages(tuple(map(_with_group, self.groups, groups)), self.bytes_per_block)


def _with_group(page: PageGroup, group: LayerGroup) -> PageGroup:
    return replace(page, group=group)


def make_pages(layers_by_window: dict[int, list[SizedLayer]], block_size: int, layers_per_group: int = 0) -> Pages:
    """Divide layers into groups with blocks of equal bytes; full attention comes first.

    layers_by_window: for each window (0 for full attention) its layers with their bytes of a token.
    block_size: tokens a block of the group whose token takes the most bytes. layers_per_group: 0 for the rule above.
    O(layers). Raises `InvalidArgument` if a scaled block size passes the limit of `LayerGroup`.
    """
    windows = sorted(layers_by_window)
    if len(windows) == 1:
        return _single(windows[0], layers_by_window[windows[0]], block_size)
    size = layers_per_group or _layers_per_group([len(layers) for layers in layers_by_window.values()])
    token_bytes = {window: size * max(width for _, width in layers_by_window[window]) for window in windows}
    page_bytes = max(token_bytes.values()) * block_size
    groups: list[PageGroup] = []
    for window in windows:
        scaled = page_bytes // (token_bytes[window] * block_size) * block_size
        groups += _groups_of(window, layers_by_window[window], size, scaled)
    return Pages(tuple(groups), page_bytes)


def _single(window: int, layers: list[SizedLayer], block_size: int) -> Pages:
    group = _page_group(window, layers, block_size, _kind_name(window))
    return Pages((group,), group.used_bytes)


def _layers_per_group(counts: list[int]) -> int:
    smallest, largest = min(counts), max(counts)
    return largest if largest * 4 < smallest * 5 else smallest


def _groups_of(window: int, layers: list[SizedLayer], size: int, block_size: int) -> list[PageGroup]:
    parts = [layers[start : start + size] for start in range(0, len(layers), size)]
    name = _kind_name(window)
    names = [name] if len(parts) == 1 else [f"{name} {number}" for number in range(len(parts))]
    return [_page_group(window, part, block_size, name) for part, name in zip(parts, names, strict=True)]


def _page_group(window: int, layers: Sequence[SizedLayer], block_size: int, name: str) -> PageGroup:
    indices = tuple(index for index, _ in layers)
    return PageGroup(LayerGroup(block_size, window, name), indices, block_size * sum(width for _, width in layers))


def _kind_name(window: int) -> str:
    return f"window {window}" if window else "full"
