"""A layer group is layers that share a block table, or that keep states; it knows what a sequence takes.

The allocator (`core.store.group_table`) and the capacity calculator (`sizing`) both ask `windows` which blocks a window
still needs.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from .arguments import require_int, require_str, shown
from .errors import InvalidArgument
from .windows import first_needed_block

MAX_GROUP_BLOCK_SIZE = 4096
MAX_WINDOW = 2**27
MAX_STATE_BYTES = 2**50
MAX_TOKEN_BYTES = 2**50
KINDS = ("attention", "state")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table, or whose states are kept at the same boundaries.

    block_size: tokens a block of this group holds, over all shards; 1 to 4096. Of a state group: states can be kept at
        multiples of this many tokens.
    sliding_window: how many tokens, its own included, a token attends to; 0 for all (full attention, MLA).
    name: for reports.
    shards: ranks that each keep a part of every block's tokens (context parallel); 1 for none.
    interleave: neighbouring tokens that stay on one rank: token i is on rank (i // interleave) % shards. Both together
        must divide block_size, so that every block begins on rank 0.
    kind: "attention" for keys and values a token, "state" for layers that keep one state a sequence (docs/states.md).
    state_bytes: of a state group, bytes of a state in all its layers, 1 to 2**50. token_bytes: bytes of keys and values
        of a token in all layers of the group (with shards, on the rank that keeps it), 0 if not needed; wanted beside
        a state group, and of a cache whose size is given in bytes.

    Raises `InvalidArgument` for a value outside its limits.
    """

    block_size: int = 16
    sliding_window: int = 0
    _: KW_ONLY
    name: str = ""
    shards: int = 1
    interleave: int = 1
    kind: str = "attention"
    state_bytes: int = 0
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
        if self.kind not in KINDS:
            raise InvalidArgument(f"kind is {shown(self.kind)}; it must be one of {', '.join(KINDS)}")
        if self.is_state:
            self._check_state()
        elif self.state_bytes != 0:
            raise InvalidArgument(f"state_bytes is {shown(self.state_bytes)} for kind 'attention'; it must be 0")

    def _check_state(self) -> None:
        object.__setattr__(self, "state_bytes", require_int("state_bytes", self.state_bytes, 1, MAX_STATE_BYTES))
        for name, value, only in (
            ("sliding_window", self.sliding_window, 0),
            ("shards", self.shards, 1),
            ("token_bytes", self.token_bytes, 0),
        ):
            if value != only:
                raise InvalidArgument(f"{name} is {value} for kind 'state'; it must be {only}")

    @property
    def is_state(self) -> bool:
        """Return whether its layers keep a state."""
        return self.kind == "state"

    @property
    def block_bytes(self) -> int:
        """Return the bytes that its tokens take in a block, on each rank; 0 if it does not say how many one takes."""
        return self.block_size // self.shards * self.token_bytes

    def first_needed_block(self, num_computed: int) -> int:
        """Return the first block that tokens from `num_computed` on attend to; those before may be freed. O(1)."""
        return first_needed_block(num_computed, self.sliding_window, self.block_size)

    def num_blocks(self, num_tokens: int, num_computed: int = 0) -> int:
        """Blocks held while the tokens from `num_computed` to `num_tokens` of a sequence are computed. O(1)."""
        return max(-(-num_tokens // self.block_size) - self.first_needed_block(num_computed), 0)
