"""The two orders in which kernels read a block: tokens outside heads (NHD), or heads outside tokens (HND).

Layers of several groups share places in a block; `LayerPlaces` knows which layer keeps its keys and values where.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ..arguments import require_int
from ..errors import InvalidArgument


class KVLayout(StrEnum):
    """How a block of keys (or of values) lies in memory.

    NHD: (block_size, num_kv_heads, head_size). FlashAttention, vLLM, and FlashInfer's default. A token's row is
        contiguous, so writing is one copy a token and gathering one copy a block.
    HND: (num_kv_heads, block_size, head_size). FlashInfer's and TensorRT-LLM's other order: a head's tokens
        are contiguous. Gathering into token order costs a transposition.
    """

    NHD = "NHD"
    HND = "HND"

    @classmethod
    def parse(cls, value: object) -> KVLayout:
        """Return the layout called `value`, a `KVLayout` or its name."""
        try:
            return cls(str(value))
        except ValueError as error:
            raise InvalidArgument(f"layout is {value!r}; it must be 'NHD' or 'HND'") from error

    def block_shape(self, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int]:
        """Return the shape of one block of keys in this layout."""
        if self is KVLayout.NHD:
            return (block_size, num_kv_heads, head_size)
        return (num_kv_heads, block_size, head_size)


class LayerPlaces:
    """The group of each layer and its place in it.

    layer_groups: the layers of each group; together every layer once. None: one group of all.
    Raises `InvalidArgument` where a layer is missing, unknown or named twice.
    """

    def __init__(self, num_layers: int, layer_groups: Sequence[Sequence[int]] | None = None) -> None:
        groups = [range(num_layers)] if layer_groups is None else layer_groups
        named = sorted(layer for group in groups for layer in group)
        if named != list(range(num_layers)):
            raise InvalidArgument(
                f"layer_groups is {layer_groups!r}; it must name each of the {num_layers} layers, from 0, once"
            )
        self.num_groups = len(groups)
        #: Places a block has: the layers of the largest group.
        self.num_places = max(len(group) for group in groups)
        self._num_layers = num_layers
        self._group = {layer: number for number, group in enumerate(groups) for layer in group}
        self._place = {layer: place for group in groups for place, layer in enumerate(group)}

    def place(self, layer: int) -> int:
        """Return where in a block a layer keeps its keys and values."""
        return self._place[self._known(layer)]

    def group(self, layer: int) -> int:
        """Return the number of a layer's group: its plan is `plan.groups[number]`."""
        return self._group[self._known(layer)]

    def _known(self, layer: int) -> int:
        return require_int("layer", layer, 0, self._num_layers - 1)
