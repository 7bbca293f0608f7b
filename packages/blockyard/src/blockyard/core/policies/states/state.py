"""A state stands at a position of known content, or stood there."""

from typing import Final

from mypy_extensions import i64

#: Why a position was chosen. A state keeps its kind, and its class learns by it.
JUNCTION: Final[i64] = 0
PROMPT_END: Final[i64] = 1
OUTPUT_END: Final[i64] = 2
TOLD: Final[i64] = 3
QUEUED: Final[i64] = 4
REGULAR: Final[i64] = 5
#: The class of states whose session is said to be over, whatever their kind.
OVER: Final[i64] = 6
KINDS: Final = ("junction", "prompt end", "output end", "told", "queue", "regular", "over")
#: Of a state: no session has used it yet; several have, or requests without one.
NO_SESSION: Final[i64] = 0
SHARED: Final[i64] = -1
#: The cell of a state that `StateAges` does not count.
NOT_COUNTED: Final[i64] = -1
#: Sessions of a simulation have numbers from 1 to this one.
MOST_SESSIONS: Final = 2**62


class State:
    """This is what must be known of a position to judge what its state is worth. A state that went stays, and its
    class learns what it would have hit.

    number: its own, above 0. node: where it stands (`StateTree`). position: tokens before it.
    kind, num_hits, chain: why it was taken, how often it was hit, how many hits led to the request that took it.
    since: the request that took or hit it last. stamp: the same, with an order in one request.
    is_kept: whether the state is there. above: number of the next one up that is there, 0 for none.
    alone: tokens of keys and values that only it needs. place: where it is in the list of all.
    parts, is_busy: its blocks, where a pool has it (`StateShelf`), and whether they are held.
    session, is_over: the session that alone has used it, and whether that is said to be over.
    session_before, session_after: numbers of the neighbours in the list of that session's states.
    cell, counted_since, age_before, age_after: where `StateAges` counts it, and its neighbours there.
    heap, gain, rank, left, right, up: 1 + its heap in `StateHeaps`, 0 for none, and its links there.
    """

    def __init__(self, number: i64, node: i64, position: i64, kind: i64) -> None:
        self.number = number
        self.node = node
        self.position = position
        self.kind = kind
        self.num_hits: i64 = 0
        self.chain: i64 = 0
        self.since: i64 = 0
        self.stamp: i64 = 0
        self.is_kept = False
        self.above: i64 = 0
        self.place: i64 = 0
        self.alone: i64 = 0
        self.parts: list[int] = []
        self.is_busy = False
        self.session: i64 = NO_SESSION
        self.is_over = False
        self.session_before: i64 = 0
        self.session_after: i64 = 0
        self.cell: i64 = NOT_COUNTED
        self.counted_since: i64 = 0
        self.age_before: i64 = 0
        self.age_after: i64 = 0
        self.heap: i64 = 0
        self.gain: float = 0.0
        self.rank: i64 = 0
        self.left: i64 = 0
        self.right: i64 = 0
        self.up: i64 = 0

    def age(self, now: i64) -> i64:
        """Requests since it was last of use, this one included."""
        return now - self.since + 1
