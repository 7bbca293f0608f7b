"""Lookups for waiting requests, in a pool without sequences."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import zeros_i32
from ..blocks.by_id import require_ids
from ..blocks.lease import BlockLease
from ..blocks.ledger import BlockLedger
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Hit, Prompt, make_chunk
from ..tokens import int64_items
from .room import KeptBlocks


class Lookups:
    """Answers for a `BlockPool`, and is the interface of those for a manager.

    Attributes:
        index: index of the token blocks.
        pool: blocks with keys and values.
        block_size: tokens of a token block.
        is_exact: whether a hit is all leading indexed blocks, unless some are pending.
        most_inside: tokens that a hit can have beyond its whole blocks.
    """

    def __init__(self, index: PrefixIndex, pool: BlockLedger, block_size: int) -> None:
        self.index = index
        self.pool = pool
        self.block_size: i64 = block_size
        self.is_exact = True
        self.most_inside: i64 = 0

    def prompt(self, token_ids: object, extra_keys: object) -> Prompt:
        """Return the checked prompt of a waiting request."""
        return make_chunk(token_ids, extra_keys, int(self.block_size)).at(0, int(self.block_size))

    def version(self) -> i64:
        """Return a number that changes with everything but the index that a hit depends on, if `is_exact`."""
        return 0

    def find(self, prompt: Prompt, num_seqs: i64) -> Hit:
        """Return the hit of a prompt for `num_seqs` sequences."""
        del num_seqs
        root = self.index.known_root(prompt.keys)
        return Hit(root, self.index.find_under(root, prompt, (prompt.num_tokens - 1) // self.block_size))

    def num_blocks(self, num_tokens: i64) -> i64:
        """Return the blocks that a sequence of this length needs."""
        return -(-num_tokens // self.block_size)

    def num_taken(self, prompt: Prompt, num_seqs: i64, kept: KeptBlocks) -> i64:
        """Return the blocks that a prompt takes if it is admitted: new ones, and idle ones that are not kept."""
        blocks = self.find(prompt, num_seqs).blocks
        taken = self.num_blocks(prompt.num_tokens) - i64(len(blocks))
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if self.pool.ref_cnt[block] == 0 and not kept.is_idle(block):
                taken += 1
        return taken

    def blocks_of(self, blocks: object) -> vec[i32]:
        """Return the ids of the blocks of a lease, or the given ids; each once, without the null block."""
        if isinstance(blocks, BlockLease):
            return distinct(blocks.held_ids())
        ids = int64_items("blocks", blocks)
        require_ids(ids, int(self.pool.capacity))
        return distinct([int(block) for block in ids])


def distinct(blocks: list[int]) -> vec[i32]:
    """Return each block but the null block once."""
    found = set(blocks)
    found.discard(0)
    ordered = zeros_i32(len(found))
    for position, block in enumerate(found):
        ordered[position] = i32(block)
    return ordered
