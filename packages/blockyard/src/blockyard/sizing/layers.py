"""Layers of a model and the size of their cache: keys and values per token, or a state per sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..arguments import require_int, require_str, shown
from ..errors import InvalidArgument
from ..groups import MAX_WINDOW
from .shards import Shard

#: Bytes per element. The scales of a float8 cache, one number per tensor or head, are not counted.
DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float8": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}


def dtype_name(name: str, value: object) -> str:
    """Return the name of a type without its module, as in "torch.bfloat16".

    Args:
        name: argument or field, for the error.
        value: name of the type, or an object whose string is one.

    Raises:
        InvalidArgument: `DTYPE_BYTES` does not list the type.
    """
    text = str(value).removeprefix("torch.")
    if text not in DTYPE_BYTES:
        raise InvalidArgument(f"{name} is {shown(value)}; it must be one of {', '.join(DTYPE_BYTES)}")
    return text


def dtype_bytes(name: str, value: object) -> int:
    """Return the bytes per element of the type `value`. Raises `InvalidArgument` if it is unknown."""
    return DTYPE_BYTES[dtype_name(name, value)]


MAX_DIMENSION = 2**20
MAX_ELEMENTS = 2**40


def heads_of_rank(name: str, num_heads: int, tensor_parallel_size: int) -> int:
    """Return the heads that one rank keeps: an equal share, or one replicated head with more ranks than heads. O(1).

    Raises `InvalidArgument` naming the heads as `name` if neither number divides the other.
    """
    if num_heads % tensor_parallel_size == 0:
        return num_heads // tensor_parallel_size
    if num_heads < tensor_parallel_size and tensor_parallel_size % num_heads == 0:
        return 1
    raise InvalidArgument(
        f"tensor_parallel_size is {tensor_parallel_size}; it must divide {name}, {num_heads}, or be a multiple of it"
    )


#: Most lines of a description, and most runs of layers listed on one of them.
_MOST_LINES, _MOST_RUNS = 8, 8
#: 8-bit elements per scale, and bytes of a scale, in vLLM's format for sparse attention.
_SCALED_ELEMENTS, _SCALE_BYTES = 128, 4


def _with_scales(num_elements: int) -> int:
    return num_elements + -(-num_elements // _SCALED_ELEMENTS) * _SCALE_BYTES


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer that keeps keys and values for each token.

    Multi-head attention has as many KV heads as query heads, grouped-query attention fewer, multi-query attention one.
    Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) keeps one vector per token: one head, no value.

    Attributes:
        index: number of the layer in the model, from 0.
        num_kv_heads: KV heads.
        key_size: elements of a key per head.
        value_size: elements of a value per head.
        sliding_window: tokens that a token attends to, itself included; 0 for all.
        is_latent: whether one vector serves all heads, so that every rank keeps it whole.
        index_size: elements of the index key with which sparse attention selects tokens (DeepSeek V3.2), whole on every
            rank; 0 for none.
        rope_size: elements of the rotary part of a latent vector that sparse attention reads, which vLLM keeps in 16
            bits if the rest has 8; 0 for other layers.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    index: int
    num_kv_heads: int
    key_size: int
    value_size: int
    sliding_window: int = 0
    is_latent: bool = False
    index_size: int = 0
    rope_size: int = 0

    def __post_init__(self) -> None:
        require_int("index", self.index, 0, MAX_DIMENSION)
        require_int("num_kv_heads", self.num_kv_heads, 1, MAX_DIMENSION)
        require_int("key_size", self.key_size, 1, MAX_DIMENSION)
        require_int("value_size", self.value_size, 0, MAX_DIMENSION)
        require_int("sliding_window", self.sliding_window, 0, MAX_WINDOW)
        require_int("index_size", self.index_size, 0, MAX_DIMENSION)
        require_int("rope_size", self.rope_size, 0, self.key_size)

    @property
    def kind(self) -> str:
        """Return `full`, or the words among `sliding`, `latent` and `indexed` that apply, in this order."""
        words = ["sliding"] * (self.sliding_window > 0) + ["latent"] * self.is_latent
        words += ["indexed"] * (self.index_size > 0)
        return " ".join(words) or "full"

    def elements_per_token(self, tensor_parallel_size: int = 1, rank: int | None = None) -> int:
        """Return the elements that a rank keeps per token. O(1).

        Args:
            tensor_parallel_size: number of ranks.
            rank: the rank; None if all have equal shares.
        """
        heads = self._num_kept_heads(tensor_parallel_size, rank)
        return heads * (self.key_size + self.value_size) + self.index_size

    def bytes_per_token(self, element_bytes: int, tensor_parallel_size: int = 1, rank: int | None = None) -> int:
        """Return the bytes that a rank keeps per token. O(1).

        Sparse attention over latent vectors has vLLM's 8-bit format: a float32 scale per 128 elements of the vector and
        of the index key, and the rotary part in 16 bits (656 and 132 bytes for DeepSeek V3.2).

        Args:
            element_bytes: bytes per element.
            tensor_parallel_size: number of ranks.
            rank: the rank; None if all have equal shares.
        """
        if element_bytes == 1 and self.rope_size:
            return _with_scales(self.key_size - self.rope_size) + 2 * self.rope_size + _with_scales(self.index_size)
        return element_bytes * self.elements_per_token(tensor_parallel_size, rank)

    def _num_kept_heads(self, tensor_parallel_size: int, rank: int | None) -> int:
        if self.is_latent:
            return 1
        if rank is None:
            return heads_of_rank("num_kv_heads", self.num_kv_heads, tensor_parallel_size)
        return len(Shard(rank, tensor_parallel_size).kv_heads(self.num_kv_heads))


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor of a state, with `num_heads` times `elements_per_head` elements.

    `is_recurrent` marks the running sum, which implementations keep in a wider type than the rest.
    """

    name: str
    num_heads: int
    elements_per_head: int
    is_recurrent: bool = False

    def __post_init__(self) -> None:
        require_str("name", self.name)
        require_int("num_heads", self.num_heads, 1, MAX_DIMENSION)
        require_int("elements_per_head", self.elements_per_head, 0, MAX_ELEMENTS)

    def elements(self, tensor_parallel_size: int = 1) -> int:
        """Return the elements that one rank keeps per sequence. O(1)."""
        return heads_of_rank(f"heads of {self.name}", self.num_heads, tensor_parallel_size) * self.elements_per_head


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer, or a part of one, that keeps a state of constant size per sequence.

    `kind` is for reports: `gated delta net`, `mamba`, `mamba2`, `convolution`.
    """

    index: int
    kind: str
    parts: tuple[StatePart, ...]

    def __post_init__(self) -> None:
        require_int("index", self.index, 0, MAX_DIMENSION)
        require_str("kind", self.kind)
        _require_items("parts", self.parts, StatePart)


def _require_items(name: str, values: object, kind: type) -> None:
    if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
        raise InvalidArgument(f"{name} is {values!r}; it must be a tuple of {kind.__name__}")


def require_layers(layers: object, states: object) -> None:
    """Raise `InvalidArgument` unless these are tuples of `AttentionLayer` (at least one) and of `StateLayer`."""
    _require_items("layers", layers, AttentionLayer)
    _require_items("states", states, StateLayer)
    if layers == ():
        raise InvalidArgument("layers is empty; at least one layer must keep keys and values in blocks")


def count_kinds(layers: Iterable[AttentionLayer | StateLayer]) -> dict[str, int]:
    """Return the number of layers of each kind, in the order of their first layer. O(layers)."""
    counts: dict[str, int] = {}
    for layer in layers:
        counts[layer.kind] = counts.get(layer.kind, 0) + 1
    return counts


def describe_layers(layers: Iterable[AttentionLayer | StateLayer]) -> list[str]:
    """Return a line for each set of equal layers, at most eight: their indices and sizes. O(layers)."""
    indices: dict[AttentionLayer | StateLayer, list[int]] = {}
    for layer in layers:
        indices.setdefault(replace(layer, index=0), []).append(layer.index)
    lines = [f"{_ranges(found)}: {_described(layer)}" for layer, found in indices.items()]
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"and {more} further kinds of layers"]


def _ranges(indices: list[int]) -> str:
    """Return "layers 0-3, 5", or the number of layers if that is shorter."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index, index])
    if len(runs) > _MOST_RUNS:
        return f"{len(indices)} layers from {indices[0]} to {indices[-1]}"
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"layer {named}" if len(indices) == 1 else f"layers {named}"


def _described(layer: AttentionLayer | StateLayer) -> str:
    if isinstance(layer, StateLayer):
        parts = ", ".join(f"{part.name} {part.num_heads} x {part.elements_per_head}" for part in layer.parts)
        return f"{layer.kind}, {parts}"
    sizes = f"{layer.num_kv_heads} KV heads, key {layer.key_size}, value {layer.value_size}"
    window = f", window {layer.sliding_window}" if layer.sliding_window else ""
    return f"{layer.kind}, {sizes}{window}" + (f", index key {layer.index_size}" if layer.index_size else "")
