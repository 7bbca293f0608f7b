"""What a manager tells of its prefix cache, as arrays: `KVCacheManager.take_events`; what its publisher counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """These blocks of a pool below token blocks (layer groups, a CPU pool) came and went, in order.

    ids: int64 (n,), the id of a holding that came, or minus that of one that went; never used twice. contents, groups:
    int64 (m,), of those that came: the content id of the last token block that it holds, and its layer group. Behind
    the last layer group with keys and values stand states: `CacheConfig.state_blocks` such
    holdings of one content are the state behind it, and fewer are nothing.
    """

    ids: npt.NDArray[np.int64]
    contents: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVCacheEvents:
    """What prompts can hit, and can hit no more, since the events were last taken (`take_events`).

    A content is a block's tokens after all before them, under its extra keys. It has an id that no other content gets
    and that is greater than its parent's; equal blocks share it, and it goes with the last of them that is computed. It
    may come back under its id when another equal block is computed.

    cleared: all contents and roots were forgotten before anything that follows (`reset_prefix_cache`).
    new_roots: (id, extra keys) of roots, which stand before first blocks; a span's are (content before it, the span).
    lost_roots: roots that no prompt reaches any more; all contents behind them are gone.
    contents: int64 (n,), the id of a content that came, or minus that of one that went, in order.
    parents: int64 (m,), of those that came, the content or root before. token_ids: int32 (m, block size), their tokens.
    pools: with layer groups or a CPU pool, what the pool and the CPU pool hold of these contents; else ().
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
        """Return whether nothing happened."""
        changed = len(self.contents) + sum(len(pool.ids) for pool in self.pools)
        return not (self.cleared or self.new_roots or self.lost_roots or changed)


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """The counts of a `blockyard.events.KVEventPublisher` since it was made.

    is_running: whether its thread runs. seconds_since_message: since the last message went out; with a heartbeat of 1 s
    it stays little above that while the thread keeps up.
    num_messages, num_bytes: messages sent live, heartbeats among them, and the bytes of their payloads.
    num_heartbeats: those that said nothing. num_waiting: hand-overs that wait for the thread. num_merged: those
    that were merged with the one before, because many waited.
    num_replays, num_given_up: replays that were answered to the end, and those whose consumer read too little or went
    away. num_refused: requests that could not be read. num_snapshots, snapshot_bytes: made for replays. num_cut:
    connections cut off for their many topics.
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
