"""Memory layouts of a block: tokens before heads (NHD) or heads before tokens (HND), and the layers' positions in it.

Layers of different groups share positions in a block (`LayerPlaces`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ..arguments import require_int
from ..errors import InvalidArgument


class KVLayout(StrEnum):
    """Memory layout of a block of keys (or of values).

    NHD: (block_size, num_kv_heads, head_size), for FlashAttention, vLLM, and FlashInfer by default. A token's row is
    contiguous, so writing is one copy per token and gathering one copy per block.

    HND: (num_kv_heads, block_size, head_size), for FlashInfer and TensorRT-LLM. A head's tokens are contiguous.
    Gathering into token order needs a transposition.
    """

    NHD = "NHD"
    HND = "HND"

    @classmethod
    def parse(cls, value: object) -> KVLayout:
        """Return the layout given as a `KVLayout` or its name."""
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
    """The group of each layer, and its position in a block.

    Args:
        num_layers: number of layers.
        layer_groups: layers of each group, every layer once; None for one group of all.

    Raises:
        InvalidArgument: a layer is missing, unknown or listed twice.
    """

    def __init__(self, num_layers: int, layer_groups: Sequence[Sequence[int]] | None = None) -> None:
        groups = [range(num_layers)] if layer_groups is None else layer_groups
        named = sorted(layer for group in groups for layer in group)
        if named != list(range(num_layers)):
            raise InvalidArgument(
                f"layer_groups is {layer_groups!r}; it must name each of the {num_layers} layers, from 0, once"
            )
        self.num_groups = len(groups)
        #: Positions in a block: the number of layers of the largest group.
        self.num_places = max(len(group) for group in groups)
        self._num_layers = num_layers
        self._group = {layer: number for number, group in enumerate(groups) for layer in group}
        self._place = {layer: place for group in groups for place, layer in enumerate(group)}

    def place(self, layer: int) -> int:
        """Return a layer's position in a block."""
        return self._place[self._known(layer)]

    def group(self, layer: int) -> int:
        """Return the number of a layer's group, whose plan is `plan.groups[number]`."""
        return self._group[self._known(layer)]

    def _known(self, layer: int) -> int:
        return require_int("layer", layer, 0, self._num_layers - 1)
