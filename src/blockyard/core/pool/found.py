"""What a lookup found in a pool, as a value that holds nothing: to be held later, if it is still there."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...arguments import require_int
from ...errors import ForeignBlock, InvalidArgument, StaleBlocks
from ..arrays import view_i32, zeros_i64
from ..index.prompt import Prompt
from ..refusing import refuse_pickle, refuse_subclass
from .ledger import BlockLedger
from .misses import missed_keys


class FoundBlocks:
    """The cached beginning of a prompt, as `BlockPool.find_cached_blocks` saw it. It holds nothing.

    It remembers the content of each block, which no other content ever gets the number of: `BlockPool.hold` takes the
    blocks only as long as they have it, whatever has happened in between.
    """

    def __init__(self, ledger: BlockLedger, blocks: vec[i32], contents: vec[i64], missed: vec[i64]) -> None:
        self._ledger = ledger
        self._blocks = blocks
        self._contents = contents
        #: Keys of what the prompt asks for besides, for a policy that wants to know it.
        self._missed = missed

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The ids, int32 (n,), read-only, without a copy."""
        return view_i32(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens that they hold the keys and values of."""
        return len(self._blocks) * self._ledger.block_size

    @property
    def num_idle(self) -> int:
        """How many of them nothing holds now: as many free blocks go when they are held. O(blocks)."""
        return int(self._ledger.count_idle(self._blocks, len(self._blocks)))

    def first(self, num_blocks: object) -> "FoundBlocks":
        """The first `num_blocks` of them. O(num_blocks). Raises `InvalidArgument` for more than there are."""
        count = require_int("num_blocks", num_blocks, 0, len(self._blocks))
        return FoundBlocks(self._ledger, self._blocks[:count], self._contents[:count], self._missed)

    def __repr__(self) -> str:
        return f"<FoundBlocks {[int(block) for block in self._blocks]}>"

    def __init_subclass__(cls) -> None:
        """Refuse: a subclass of a compiled class could not be made."""
        raise refuse_subclass("FoundBlocks")

    def __reduce__(self) -> str:
        raise refuse_pickle("a FoundBlocks", "send its `block_ids`")


def find_full(ledger: BlockLedger, prompt: Prompt) -> vec[i32]:
    """Returns the cached blocks that a prompt begins with, the last full one too. O(blocks found)."""
    return ledger.index.find_prompt(prompt, prompt.num_tokens // i64(ledger.block_size))


def found_blocks(ledger: BlockLedger, prompt: Prompt) -> FoundBlocks:
    """Returns what `find_full` finds, with the content of each block."""
    blocks = find_full(ledger, prompt)
    count = i64(len(blocks))
    identity = ledger.index.identity
    contents = zeros_i64(int(count))
    for position in range(count):
        contents[position] = identity[2 * i64(blocks[position])]
    return FoundBlocks(ledger, blocks, contents, missed_keys(ledger, prompt, blocks, count))


def require_found(ledger: BlockLedger, found: FoundBlocks, count: i64) -> None:
    """Raises `ForeignBlock` for what another pool found, `StaleBlocks` where one of the first `count` has changed."""
    if found._ledger is not ledger:
        raise ForeignBlock(f"{found!r} was found in another pool")
    if count > len(found._blocks):
        raise InvalidArgument(f"num_blocks is {count}; found has {len(found._blocks)} blocks")
    identity = ledger.index.identity
    for position in range(count):
        block = i64(found._blocks[position])
        if identity[2 * block] != found._contents[position]:
            raise StaleBlocks(
                f"block {block} at position {position} no longer holds what was found in it; look up again",
                int(position),
            )
