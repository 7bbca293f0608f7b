"""Room for a larger pool, made before anything of it is put in place."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..index.room import IndexRoom
from .fence import FenceRoom
from .free_queue import QueueRoom


class LedgerRoom:
    """The arrays of a larger ledger, before they are put in place."""

    def __init__(
        self, num_blocks: i64, index: IndexRoom, queue: QueueRoom, ref_cnt: vec[i32], fence: FenceRoom | None
    ) -> None:
        self.num_blocks = num_blocks
        self.index = index
        self.queue = queue
        self.ref_cnt = ref_cnt
        self.fence = fence


class NamedRoom(LedgerRoom):
    """The same for blocks with names. next_entry, first_unused: of the larger ledger."""

    def __init__(self, room: LedgerRoom, next_entry: vec[i32], first_unused: i64) -> None:
        super().__init__(room.num_blocks, room.index, room.queue, room.ref_cnt, room.fence)
        self.next_entry = next_entry
        self.first_unused = first_unused
