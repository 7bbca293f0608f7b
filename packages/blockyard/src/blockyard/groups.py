"""The layers of a model as the cache groups them: layers that share a block table, and layers that keep a state.

The allocator (`core.store.group_table`) and the capacity calculator (`sizing`) both ask `windows` which blocks a
sliding window still needs.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from .arguments import require_int, require_str
from .errors import InvalidArgument
from .windows import first_needed_block

MAX_GROUP_BLOCK_SIZE = 4096
MAX_WINDOW = 2**27
MAX_STATE_BYTES = 2**50
MAX_TOKEN_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Attention layers that share a block table, because they need the same tokens of a sequence.

    Args:
        block_size: tokens in a block of this group, over all shards; 1 to 4096.
        sliding_window: tokens that a token attends to, itself included; 0 for all (full attention, MLA).
        name: shown in reports.
        shards: ranks that each hold a part of every block's tokens (context parallelism); 1 for none.
        interleave: consecutive tokens on one rank: token i is on rank (i // interleave) % shards. shards *
            interleave must divide block_size, so that every block begins on rank 0.
        token_bytes: bytes of the keys and values of a token in all layers of the group (with shards, on the rank that
            holds it). Needed beside a `StateSpec`, and for `CacheConfig(num_bytes=...)`; 0 if unknown.

    Raises:
        InvalidArgument: if a value is outside its limits.
    """

    block_size: int = 16
    sliding_window: int = 0
    _: KW_ONLY
    name: str = ""
    shards: int = 1
    interleave: int = 1
    token_bytes: int = 0

    def __post_init__(self) -> None:
        for field, low, high in (
            ("block_size", 1, MAX_GROUP_BLOCK_SIZE),
            ("sliding_window", 0, MAX_WINDOW),
            ("shards", 1, MAX_GROUP_BLOCK_SIZE),
            ("interleave", 1, MAX_GROUP_BLOCK_SIZE),
            ("token_bytes", 0, MAX_TOKEN_BYTES),
        ):
            # Stored as plain integers: what is compiled takes no others.
            object.__setattr__(self, field, require_int(field, getattr(self, field), low, high))
        require_str("name", self.name)
        if self.block_size % (self.shards * self.interleave):
            raise InvalidArgument(
                f"block_size is {self.block_size}; it must be a multiple of shards * interleave, "
                f"{self.shards} * {self.interleave}"
            )

    @property
    def block_bytes(self) -> int:
        """Bytes that a block takes on each rank; 0 if `token_bytes` is unknown."""
        return self.block_size // self.shards * self.token_bytes

    def first_needed_block(self, num_computed: int) -> int:
        """Return the first block that tokens from `num_computed` on attend to; earlier ones may be freed. O(1)."""
        return first_needed_block(num_computed, self.sliding_window, self.block_size)

    def num_blocks(self, num_tokens: int, num_computed: int = 0) -> int:
        """Count the blocks held while tokens `num_computed` to `num_tokens` of a sequence are computed. O(1)."""
        return max(-(-num_tokens // self.block_size) - self.first_needed_block(num_computed), 0)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Layers that keep one state per sequence instead of keys and values (Mamba, linear attention; vLLM's MambaSpec).

    States of running sequences live in slots outside the pool. Checkpoints of them, from which later prompts continue,
    take blocks of the pool (docs/states.md).

    Args:
        state_bytes: bytes of a state in all these layers, 1 to 2**50.
        checkpoint_every: tokens between the positions at which a state can be checkpointed, 1 to 4096. With attention
            groups these positions are also multiples of each block_size. `CacheConfig.states` selects among them.
        name: shown in reports.

    Raises:
        InvalidArgument: if a value is outside its limits.
    """

    _: KW_ONLY
    state_bytes: int
    checkpoint_every: int = 16
    name: str = ""

    def __post_init__(self) -> None:
        # Stored as plain integers: what is compiled takes no others.
        for field, limit in (("state_bytes", MAX_STATE_BYTES), ("checkpoint_every", MAX_GROUP_BLOCK_SIZE)):
            object.__setattr__(self, field, require_int(field, getattr(self, field), 1, limit))
        require_str("name", self.name)
