"""`KVCacheSpec`: the cache of a model, and its numbers of bytes, blocks and sequences.

Any layer group can use any block, so blocks must have the same bytes in all groups. As in vLLM's hybrid KV cache
manager, this takes two steps:

1. Layers with the same window are divided into groups of equally many layers. That number is the smallest count of
   layers with one window, or the largest count if it is less than a quarter larger. Smaller groups are padded.
2. If tokens of two groups have different bytes, the group with fewer gets a larger block size: the largest multiple of
   `block_size` whose block fits into the bytes of the largest group's. The rest is padding.

A model whose layers all have the same window is one group of `block_size` without padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..arguments import require_int
from ..cache_options import MAX_MODEL_LEN
from ..config import MAX_BLOCK_SIZE, CacheConfig, cache_config
from ..errors import InvalidArgument
from ..groups import LayerGroup
from ..windows import num_peak_blocks
from .config_fields import ConfigFields
from .from_config import family_of, read_layers
from .layers import (
    MAX_DIMENSION,
    AttentionLayer,
    StateLayer,
    count_kinds,
    describe_layers,
    dtype_bytes,
    dtype_name,
    require_layers,
)

#: (index of the layer, bytes per token in it)
SizedLayer = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PageGroup:
    """A layer group, the indices of its layers, and the bytes of a block that they use. The rest is padding."""

    group: LayerGroup
    layers: tuple[int, ...]
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Pages:
    """The layer groups of a model, and the bytes of a block."""

    groups: tuple[PageGroup, ...]
    bytes_per_block: int

    def over(self, shards: int, interleave: int) -> Pages:
        """Return the pages of one of `shards` ranks. They share a block, so it has `shards` times the tokens."""
        if shards == 1:
            return self
        pages = []
        for page in self.groups:
            size = page.group.block_size * shards
            group = replace(page.group, block_size=size, shards=shards, interleave=interleave)
            pages.append(replace(page, group=group))
        return Pages(tuple(pages), self.bytes_per_block)


def make_pages(layers_by_window: dict[int, list[SizedLayer]], block_size: int, layers_per_group: int = 0) -> Pages:
    """Divide layers into groups whose blocks have equal bytes; full attention comes first. O(layers).

    Args:
        layers_by_window: layers by window (0 for full attention), with their bytes per token.
        block_size: tokens per block in the group with the largest tokens.
        layers_per_group: layers per group; 0 for the rule above.

    Raises:
        InvalidArgument: a scaled block size exceeds the limit of `LayerGroup`.
    """
    windows = sorted(layers_by_window)
    if len(windows) == 1:
        group = _page_group(windows[0], layers_by_window[windows[0]], block_size, _kind_name(windows[0]))
        return Pages((group,), group.used_bytes)
    counts = [len(layers) for layers in layers_by_window.values()]
    size = layers_per_group or (max(counts) if max(counts) * 4 < min(counts) * 5 else min(counts))
    token_bytes = {window: size * max(width for _, width in layers_by_window[window]) for window in windows}
    page_bytes = max(token_bytes.values()) * block_size
    groups: list[PageGroup] = []
    for window in windows:
        scaled = page_bytes // (token_bytes[window] * block_size) * block_size
        groups += _groups_of(window, layers_by_window[window], size, scaled)
    return Pages(tuple(groups), max(group.used_bytes for group in groups))


def _groups_of(window: int, layers: list[SizedLayer], size: int, block_size: int) -> list[PageGroup]:
    parts = [layers[start : start + size] for start in range(0, len(layers), size)]
    name = _kind_name(window)
    names = [name] if len(parts) == 1 else [f"{name} {number}" for number in range(len(parts))]
    return [_page_group(window, part, block_size, name) for part, name in zip(parts, names, strict=True)]


def _page_group(window: int, layers: Sequence[SizedLayer], block_size: int, name: str) -> PageGroup:
    indices = tuple(index for index, _ in layers)
    token_bytes = sum(width for _, width in layers)
    group = LayerGroup(block_size, window, name=name, token_bytes=token_bytes)
    return PageGroup(group, indices, block_size * token_bytes)


def _kind_name(window: int) -> str:
    return f"window {window}" if window else "full"


#: Largest valid number of bytes.
MAX_BYTES = 2**62


@dataclasses.dataclass(frozen=True, repr=False)
class KVCacheSpec:
    """The cache of a model on one rank, in blocks of equal bytes.

    Args:
        layers: layers that keep keys and values; at least one.
        block_size: tokens per block in the group with the largest tokens; see `pages` for the others.
        dtype: type of keys and values; may differ from the model's.
        tensor_parallel_size: ranks that share the KV heads. With fewer heads than ranks each rank keeps one.
        states: layers that keep a state per sequence, outside the blocks.
        state_dtype: type of recurrent states.
        model_dtype: type of the states of convolutions; `dtype` if empty.
        layers_per_group: layers per group of a model with several windows; 0 for vLLM's rule (see `pages`).
        tensor_parallel_rank: the rank, if the ranks' shares may differ (3 heads on 2 ranks). None for equal shares,
            which most engines require.
        context_parallel_size: ranks that share the tokens of each block. `block_size` is one rank's part: the
            allocator's blocks have context_parallel_size times as many tokens, in the same bytes per rank.
        interleave: neighbouring tokens that stay on one rank (`LayerGroup.shards`).

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    layers: tuple[AttentionLayer, ...]
    block_size: int = 16
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    states: tuple[StateLayer, ...] = ()
    state_dtype: str = "float32"
    model_dtype: str = ""
    layers_per_group: int = 0
    tensor_parallel_rank: int | None = None
    context_parallel_size: int = 1
    interleave: int = 1
    pages: Pages = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_layers(self.layers, self.states)
        require_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        require_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_DIMENSION)
        require_int("layers_per_group", self.layers_per_group, 0, MAX_DIMENSION)
        if self.tensor_parallel_rank is not None:
            require_int("tensor_parallel_rank", self.tensor_parallel_rank, 0, self.tensor_parallel_size - 1)
        require_int("context_parallel_size", self.context_parallel_size, 1, MAX_DIMENSION)
        dtype_name("dtype", self.dtype)
        dtype_name("state_dtype", self.state_dtype)
        dtype_name("model_dtype", self.model_dtype or self.dtype)
        object.__setattr__(self, "pages", self._make_pages())

    def __repr__(self) -> str:
        """Return the bytes and the layers, one line for each set of equal layers. O(layers)."""
        fields = [field for field in dataclasses.fields(self) if field.repr and field.name not in ("layers", "states")]
        given = [
            f"{field.name}={value!r}"
            for field in fields
            if (value := getattr(self, field.name)) != field.default or field.name in ("block_size", "dtype")
        ]
        sizes = [f"bytes_per_token={self.bytes_per_token}", f"bytes_per_block={self.bytes_per_block}"]
        if self.states:
            sizes.append(f"state_bytes_per_sequence={self.state_bytes_per_sequence}")
        lines = [", ".join(sizes + given), *describe_layers(self.layers), *describe_layers(self.states)]
        return "KVCacheSpec(" + ",\n    ".join(lines) + ")"

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        block_size: int = 16,
        dtype: object = None,
        tensor_parallel_size: int = 1,
        state_dtype: object = None,
        layers_per_group: int = 0,
    ) -> KVCacheSpec:
        """Return the spec of a Hugging Face model. O(layers).

        Args:
            config: a dict, an object with attributes (transformers' configs, also nested), or a path to a config.json,
                to Mistral's params.json, or to a folder with either.
            block_size: tokens per block.
            dtype: type of keys and values; the config's own if None.
            tensor_parallel_size: ranks that share the KV heads.
            state_dtype: type of recurrent states; the config's own if None, else float32, the widest in use.
            layers_per_group: layers per group; 0 for vLLM's rule.

        Raises:
            InvalidArgument: a field is missing, out of range or not understood, or the `model_type` is unknown
                (`docs/sizing.md`).
            ModelError: the file cannot be read.
        """
        fields = ConfigFields(config)
        layers, states = read_layers(fields)
        if states and not layers:
            size = sum(part.elements() for layer in states for part in layer.parts)
            raise InvalidArgument(
                f"model_type is {fields.model_type!r}; its {len(states)} layers keep a state of {size} elements per "
                f"sequence and no keys and values, so it needs no blocks"
            )
        own = fields.top("dtype", "torch_dtype") or family_of(fields).fixed.get("dtype")
        if own is None and dtype is None:
            raise InvalidArgument("dtype is missing from the config; give the cache's type, as in dtype='bfloat16'")
        state = state_dtype or fields.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype") or "float32"
        return cls(
            layers=layers,
            block_size=block_size,
            dtype=dtype_name("dtype", own if dtype is None else dtype),
            tensor_parallel_size=tensor_parallel_size,
            states=states,
            state_dtype=dtype_name("state_dtype", state),
            model_dtype="" if own is None else dtype_name("dtype", own),
            layers_per_group=layers_per_group,
        )

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        *,
        block_size: int = 16,
        dtype: object = "bfloat16",
        value_size: int | None = None,
        index_size: int = 0,
    ) -> KVCacheSpec:
        """Return the spec of equal layers of full attention, as `storage.KVCache` allocates them. O(layers).

        Args:
            num_layers: number of layers.
            num_kv_heads: KV heads per layer.
            head_size: elements of a key per head.
            block_size: tokens per block.
            dtype: type of keys and values.
            value_size: elements of a value per head; `head_size` if None.
            index_size: elements of an index key.
        """
        require_int("num_layers", num_layers, 1, MAX_DIMENSION)
        require_int("head_size", head_size, 1, MAX_DIMENSION)
        values = head_size if value_size is None else value_size
        layers = tuple(
            AttentionLayer(index, num_kv_heads, head_size, values, index_size=index_size) for index in range(num_layers)
        )
        return cls(layers=layers, block_size=block_size, dtype=dtype_name("dtype", dtype))

    def without_windows(self) -> KVCacheSpec:
        """Return the same layers in one group that keeps all tokens, for an engine without layer groups."""
        layers = tuple(dataclasses.replace(layer, sliding_window=0) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    @property
    def num_layers_by_kind(self) -> dict[str, int]:
        """Return the number of layers of each kind: `full`, `sliding`, `latent`, and kinds of states."""
        return count_kinds((*self.layers, *self.states))

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Return the layer groups for the allocator, full attention first."""
        return tuple(page.group for page in self.pages.groups)

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Return the groups with their layers' indices and the bytes of a block that they use."""
        return self.pages.groups

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of a block, padding included; the same in every group."""
        return self.pages.bytes_per_block

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers, ignoring windows."""
        return sum(self._token_bytes(layer) for layer in self.layers)

    @property
    def state_bytes_per_sequence(self) -> int:
        """Return the bytes of a sequence's states, outside the blocks; 0 for a model with attention only."""
        recurrent = dtype_bytes("state_dtype", self.state_dtype)
        other = dtype_bytes("model_dtype", self.model_dtype or self.dtype)
        parts = [part for state in self.states for part in state.parts]
        return sum(
            part.elements(self.tensor_parallel_size) * (recurrent if part.is_recurrent else other) for part in parts
        )

    def sequence_blocks(self, num_tokens: int, num_computed: int | None = None) -> int:
        """Return the blocks of a sequence over all groups while tokens `num_computed` to `num_tokens` are computed.

        O(groups).

        Args:
            num_tokens: tokens of the sequence.
            num_computed: tokens computed before the step; `num_tokens - 1`, a decode step, if None.
        """
        num_tokens = require_int("num_tokens", num_tokens, 0, MAX_MODEL_LEN)
        computed = max(num_tokens - 1, 0) if num_computed is None else num_computed
        require_int("num_computed", computed, 0, num_tokens)
        return sum(group.num_blocks(num_tokens, computed) for group in self.groups)

    def peak_sequence_blocks(self, num_tokens: int, tokens_per_step: int = 1) -> int:
        """Return the most blocks, over all groups, of a sequence that grows to `num_tokens`. O(groups).

        Each group is counted at its own peak, so the sum is an upper bound.

        Args:
            num_tokens: final length.
            tokens_per_step: most tokens computed in one step; a chunk of a prompt keeps its window and itself.
        """
        num_tokens = require_int("num_tokens", num_tokens, 0, MAX_MODEL_LEN)
        require_int("tokens_per_step", tokens_per_step, 1, MAX_MODEL_LEN)
        return sum(
            num_peak_blocks(num_tokens, tokens_per_step, group.sliding_window, group.block_size)
            for group in self.groups
        )

    def sequence_bytes(self, num_tokens: int, num_computed: int | None = None) -> int:
        """Return the bytes of a sequence: the blocks of `sequence_blocks` and its states. O(groups)."""
        blocks = self.sequence_blocks(num_tokens, num_computed)
        return blocks * self.bytes_per_block + self.state_bytes_per_sequence

    def peak_sequence_bytes(self, num_tokens: int, tokens_per_step: int = 1) -> int:
        """Return the most bytes of a sequence that grows to `num_tokens`, states included. O(groups)."""
        blocks = self.peak_sequence_blocks(num_tokens, tokens_per_step)
        return blocks * self.bytes_per_block + self.state_bytes_per_sequence

    def padding_bytes(self, num_tokens: int) -> int:
        """Return the bytes of padding in `peak_sequence_blocks`, needed because tokens of the groups differ in size."""
        num_tokens = require_int("num_tokens", num_tokens, 0, MAX_MODEL_LEN)
        return sum(
            num_peak_blocks(num_tokens, 1, page.group.sliding_window, page.group.block_size)
            * (self.bytes_per_block - page.used_bytes)
            for page in self.page_groups
        )

    def max_concurrent_sequences(
        self,
        num_tokens: int,
        *,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
        tokens_per_step: int = 1,
    ) -> int:
        """Return how many sequences of `num_tokens` tokens fit at once if they share no blocks.

        Give exactly one of num_blocks and memory_bytes. The null block is accounted for.

        Args:
            num_tokens: tokens of each sequence.
            num_blocks: blocks of the pool. States are assumed to have separate memory.
            memory_bytes: memory for blocks and states.
            tokens_per_step: most tokens computed in one step.

        Raises:
            InvalidArgument: both or neither is given, or a value is outside its limits.
        """
        require_int("num_tokens", num_tokens, 1, MAX_MODEL_LEN)
        if (num_blocks is None) == (memory_bytes is None):
            raise InvalidArgument(
                f"num_blocks is {num_blocks} and memory_bytes is {memory_bytes}; give exactly one of them"
            )
        if num_blocks is not None:
            usable = require_int("num_blocks", num_blocks, 0, MAX_BYTES) - 1
            return max(usable, 0) // self.peak_sequence_blocks(num_tokens, tokens_per_step)
        usable = require_int("memory_bytes", memory_bytes, 0, MAX_BYTES) - self.bytes_per_block
        return max(usable, 0) // self.peak_sequence_bytes(num_tokens, tokens_per_step)

    def cache_config(
        self,
        num_blocks: int = 0,
        *,
        num_bytes: int | None = None,
        max_num_seqs: int = 256,
        max_model_len: int = 8192,
        num_cpu_blocks: int = 0,
        **others: Any,
    ) -> CacheConfig:
        """Return a `CacheConfig` of these groups.

        Args:
            num_blocks: blocks of the pool; 0 with num_bytes.
            num_bytes: bytes of the pool, instead of num_blocks.
            max_num_seqs: most sequences at once.
            max_model_len: most tokens of a sequence.
            num_cpu_blocks: blocks of the CPU pool.
            **others: other fields of `CacheConfig`.

        Raises:
            InvalidArgument: `CacheConfig` rejects a value, or has no such field.
        """
        options = {"groups": self.groups, "num_cpu_blocks": num_cpu_blocks, "num_bytes": num_bytes, **others}
        return cache_config(num_blocks, max_num_seqs=max_num_seqs, max_model_len=max_model_len, **options)

    def _token_bytes(self, layer: AttentionLayer) -> int:
        size = dtype_bytes("dtype", self.dtype)
        return layer.bytes_per_token(size, self.tensor_parallel_size, self.tensor_parallel_rank)

    def _make_pages(self) -> Pages:
        by_window: dict[int, list[tuple[int, int]]] = {}
        for layer in self.layers:
            by_window.setdefault(layer.sliding_window, []).append((layer.index, self._token_bytes(layer)))
        pages = make_pages(by_window, self.block_size, self.layers_per_group)
        return pages.over(self.context_parallel_size, self.interleave)
