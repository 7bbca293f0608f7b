"""KV events as arrays: the contents that were cached or evicted since they were last taken."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError
from ...kv_events import BlockChanges, KVCacheEvents
from ..arrays import view_i64, zeros_i32, zeros_i64
from ..blocks.ledger import BlockLedger
from ..index.content_log import ContentLog
from ..index.prefix_index import PrefixIndex
from .content_ledger import ContentLedger


class Reading:
    """One reading of a log. ids: contents cached, or minus those evicted, in order. came: the blocks of the former."""

    def __init__(self, index: PrefixIndex, entries: vec[i64]) -> None:
        num_came: i64 = 0
        for entry in entries:
            if entry > 0:
                num_came += 1
        self.ids = entries
        self.came = zeros_i32(int(num_came))
        num_came = 0
        for place in range(i64(len(entries))):
            if entries[place] > 0:
                self.came[num_came] = i32(entries[place])
                num_came += 1
                entries[place] = index.content_of(entries[place])


class LoggedIndex:
    """An index that logs its changes."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        index.log = ContentLog(len(index.chain_hash))

    def log(self) -> ContentLog:
        """Return the log; a pool that grows gets another one."""
        log = self.index.log
        if log is None:
            raise InvariantError("index: its log is off")
        return log

    def read(self) -> Reading:
        """Read the log, without clearing it. O(entries)."""
        return Reading(self.index, self.log().read())


class EventReader:
    """Reads the logs of a cache: of its token blocks, and of the pools below them where there are any."""

    def __init__(self, token_blocks: BlockLedger, pools: list[ContentLedger], num_groups: int) -> None:
        self.token_blocks = token_blocks
        #: Layer groups with keys and values; this number stands for any part of a checkpoint.
        self.num_groups: i64 = num_groups
        self.contents = LoggedIndex(token_blocks.index)
        self.pools = pools
        self.pool_logs = [LoggedIndex(pool.index) for pool in pools]

    def take(self) -> KVCacheEvents:
        """Return the events since the last call. O(events). If it raises MemoryError, none is lost."""
        log = self.contents.log()
        reading = self.contents.read()
        events = KVCacheEvents(
            log.was_cleared,
            tuple(log.new_roots.items()),
            tuple(log.lost_roots),
            view_i64(reading.ids),
            self._parents(reading.came),
            self._tokens(reading.came),
            tuple([self._changes(number) for number in range(len(self.pools))]),
        )
        log.set_read()
        for pool_log in self.pool_logs:
            pool_log.log().set_read()
        return events

    def _parents(self, blocks: vec[i32]) -> npt.NDArray[np.int64]:
        parents = zeros_i64(len(blocks))
        for place in range(i64(len(blocks))):
            parents[place] = self.contents.index.parent_of(i64(blocks[place]))
        return view_i64(parents)

    def _tokens(self, blocks: vec[i32]) -> npt.NDArray[np.int32]:
        size = self.token_blocks.block_size
        if len(blocks) == 0:
            return np.empty((0, size), dtype=np.int32)
        return self.token_blocks.block_tokens(blocks, len(blocks) * size).reshape(len(blocks), size)

    def _changes(self, number: int) -> BlockChanges:
        reading = self.pool_logs[number].read()
        pool = self.pools[number]
        contents = zeros_i64(len(reading.came))
        groups = zeros_i64(len(reading.came))
        for place in range(i64(len(reading.came))):
            contents[place] = pool.content_of(i64(reading.came[place]))
            groups[place] = min(pool.group_of(i64(reading.came[place])), self.num_groups)
        return BlockChanges(view_i64(reading.ids), view_i64(contents), view_i64(groups))
