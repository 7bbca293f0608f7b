"""The registry's record of a running request."""

from librt.vecs import vec
from mypy_extensions import i64

from ...arrays import zeros_i64
from .prefix_tree import NO_CHECKPOINT


class RequestRecord:
    """The path of one request through the `PrefixTree`, and the hit that it found there.

    Attributes:
        keys: chain hashes of its blocks, in order.
        nodes: the tree's nodes of these blocks; they may have been forgotten, or reused, since.
        num_nodes: how many of the keys and nodes are set.
        started: number of the request.
        known: tokens of its prompt that the tree already knew.
        hit: tokens of its prompt that were cached.
        checkpoint: number of the checkpoint that it hit; 0 for none.
        chain: how many hits in a row led to it.
    """

    def __init__(self, keys: vec[i64], num_blocks: i64, started: i64) -> None:
        self.keys = keys
        self.nodes = zeros_i64(int(num_blocks))
        self.num_nodes = num_blocks
        self.started = started
        self.known: i64 = 0
        self.hit: i64 = 0
        self.checkpoint: i64 = NO_CHECKPOINT
        self.chain: i64 = 0

    def fork(self) -> "RequestRecord":
        """Return a copy that another sequence extends; it counts as no hit."""
        other = RequestRecord(self.keys[:], i64(len(self.nodes)), self.started)
        other.nodes = self.nodes[:]
        other.num_nodes = self.num_nodes
        other.known, other.hit, other.chain = self.known, self.hit, self.chain
        return other


#: The record of a sequence that the registry does not follow.
NO_RECORD = RequestRecord(zeros_i64(0), 0, 0)
