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
