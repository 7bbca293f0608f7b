"""Checkpoints: copies of a running state, cached so that later prompts can restore it.

A *checkpoint position* is the number of tokens before the checkpoint, a multiple of `CacheConfig.hit_alignment`. It has
no other encoding; where the reason for a position matters, a kind stands beside it.
"""

from typing import Final

from mypy_extensions import i64

#: Kinds: why a position was chosen. A checkpoint keeps its kind, and its class learns by it.
BRANCH: Final[i64] = 0
PROMPT_END: Final[i64] = 1
OUTPUT_END: Final[i64] = 2
REQUESTED: Final[i64] = 3
WAITING: Final[i64] = 4
REGULAR: Final[i64] = 5
#: The class of checkpoints whose session is over, whatever their kind.
OVER: Final[i64] = 6
NUM_KINDS: Final[i64] = 7
#: No session has used the checkpoint yet; several sessions have, or requests without one.
NO_SESSION: Final[i64] = 0
SHARED: Final[i64] = -1
#: The cell of a checkpoint that `AgeCounts` does not count.
NOT_COUNTED: Final[i64] = -1
#: Sessions of a simulation have numbers from 1 to this one.
MOST_SESSIONS: Final = 2**62


class Checkpoint:
    """The record of a checkpoint. It outlives the cached state, so that its class learns of missed hits.

    Attributes:
        number: its own number, above 0.
        node: its node in the `PrefixTree`.
        position: its checkpoint position.
        kind: why its position was chosen.
        num_hits: how often it was hit.
        chain: how many hits in a row led to the request that took it.
        last_used: number of the request that took or hit it last.
        use_order: order of all uses, also within one request.
        is_cached: whether the state is in the cache; if not, only the record is left.
        above: number of the next cached checkpoint up the tree; 0 for none.
        own_tokens: tokens of keys and values that no other checkpoint needs.
        index: its index in the registry's list of all records.
        blocks: the pool blocks of the state.
        is_held: whether a sequence holds these blocks.
        session: the only session that has used it, `NO_SESSION` or `SHARED`.
        is_over: whether that session has ended.
        session_before, session_after: numbers of its neighbours in the list of the session's checkpoints.
        cell, counted_last_used, age_before, age_after: its entry in `AgeCounts`.
        heap, gain, rank, left, right, up: its entry in `CheckpointHeaps`; heap is 1 + its heap, 0 for none.

    Who assigns what (a test reads this list); `number`, `node` and `position` never change:

    ages       age_after, age_before, cell, counted_last_used
    block_map  blocks
    heaps      gain, heap, left, rank, right, up
    registry   above, chain, index, is_cached, is_held, is_over, kind, last_used, num_hits, own_tokens, session,
               session_after, session_before, use_order
    """

    def __init__(self, number: i64, node: i64, position: i64, kind: i64) -> None:
        self.number = number
        self.node = node
        self.position = position
        self.kind = kind
        self.num_hits: i64 = 0
        self.chain: i64 = 0
        self.last_used: i64 = 0
        self.use_order: i64 = 0
        self.is_cached = False
        self.above: i64 = 0
        self.index: i64 = 0
        self.own_tokens: i64 = 0
        self.blocks: list[int] = []
        self.is_held = False
        self.session: i64 = NO_SESSION
        self.is_over = False
        self.session_before: i64 = 0
        self.session_after: i64 = 0
        self.cell: i64 = NOT_COUNTED
        self.counted_last_used: i64 = 0
        self.age_before: i64 = 0
        self.age_after: i64 = 0
        self.heap: i64 = 0
        self.gain: float = 0.0
        self.rank: i64 = 0
        self.left: i64 = 0
        self.right: i64 = 0
        self.up: i64 = 0

    def age(self, now: i64) -> i64:
        """Return the number of requests since the last use, including request `now`."""
        return now - self.last_used + 1
