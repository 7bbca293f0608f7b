"""Prefix-cache events of a manager as arrays (`KVCacheManager.take_events`), and the counters of a publisher."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Blocks cached and uncached by a pool that stores only parts of contents (a layer group, the CPU pool), in order.

    Attributes:
        ids: int64 (n,); the id of a new holding, or minus the id of a removed one. Ids are never reused.
        contents: int64 (m,); for each new holding, the content id of the last token block that it covers.
        groups: int64 (m,); for each new holding, its layer group. The group after the last one with keys and values
            stands for states: a state is complete once a content has `CacheConfig.state_blocks` holdings of it.
    """

    ids: npt.NDArray[np.int64]
    contents: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVCacheEvents:
    """Changes of the prefix cache since the events were last taken, in order.

    A content is a block's tokens together with all tokens and extra keys before them. Its id is unique and greater than
    its parent's. Equal blocks share it. It is removed with the last computed block that holds it, and may return under
    the same id when an equal block is computed.

    Attributes:
        cleared: whether all contents and roots were removed before the other changes (`reset_prefix_cache`).
        new_roots: (id, extra keys) of the roots that first blocks have as parent. The root of a span has
            (preceding content, span) as keys.
        lost_roots: ids of roots that no prompt can reach; all contents below them are removed too.
        contents: int64 (n,); the id of a new content, or minus the id of a removed one.
        parents: int64 (m,); for each new content, the content or root before it.
        token_ids: int32 (m, block_size); for each new content, its tokens.
        pools: with layer groups or a CPU pool, the changes of the pool and of the CPU pool; else ().
    """

    cleared: bool
    new_roots: tuple[tuple[int, tuple[object, ...]], ...]
    lost_roots: tuple[int, ...]
    contents: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    pools: tuple[BlockChanges, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing changed."""
        changed = len(self.contents) + sum(len(pool.ids) for pool in self.pools)
        return not (self.cleared or self.new_roots or self.lost_roots or changed)


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters of a `blockyard.events.KVEventPublisher` since it was created.

    Attributes:
        is_running: whether its thread runs.
        seconds_since_message: time since the last message was sent; at most about the heartbeat interval (1 s) while
            the thread keeps up.
        num_messages: live messages sent, heartbeats included.
        num_bytes: bytes of their payloads.
        num_heartbeats: messages without events.
        num_waiting: batches queued for the thread.
        num_merged: batches merged into the one before because the queue was long.
        num_replays: replays completed.
        num_given_up: replays abandoned because the consumer read too slowly or disconnected.
        num_refused: replay requests that could not be parsed.
        num_snapshots: snapshots made for replays.
        snapshot_bytes: their bytes.
        num_cut: connections closed because they subscribed to too many topics.
    """

    is_running: bool
    seconds_since_message: float
    num_messages: int
    num_bytes: int
    num_heartbeats: int
    num_waiting: int
    num_merged: int
    num_replays: int
    num_given_up: int
    num_refused: int
    num_snapshots: int
    snapshot_bytes: int
    num_cut: int = 0
