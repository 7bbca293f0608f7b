"""Merges hand-overs, so that what waits for a publisher's thread is bounded by the pool, however long it waits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...kv_events import BlockChanges, KVCacheEvents


def num_entries(changes: KVCacheEvents) -> int:
    """Counts what came and went. O(pools)."""
    roots = len(changes.new_roots) + len(changes.lost_roots)
    return roots + len(changes.contents) + sum(len(pool.ids) for pool in changes.pools)


def merged(first: KVCacheEvents, second: KVCacheEvents) -> KVCacheEvents:
    """Merges what a cache told in two readings into one, and leaves out what came and went in between.

    O(n log n) for n entries. What came is at most what the cache holds now, and what went what it held before.
    """
    if second.cleared:
        return second
    made, lost = {root for root, _ in first.new_roots}, set(second.lost_roots)
    kept, used = _net(first.contents, second.contents)
    return KVCacheEvents(
        first.cleared,
        (*(item for item in first.new_roots if item[0] not in lost), *second.new_roots),
        (*first.lost_roots, *(root for root in second.lost_roots if root not in made)),
        np.concatenate((first.contents, second.contents))[kept],
        np.concatenate((first.parents, second.parents))[used],
        np.concatenate((first.token_ids, second.token_ids))[used],
        tuple(map(_merged_pool, first.pools, second.pools)),
    )


def _merged_pool(first: BlockChanges, second: BlockChanges) -> BlockChanges:
    kept, used = _net(first.ids, second.ids)
    return BlockChanges(
        np.concatenate((first.ids, second.ids))[kept],
        np.concatenate((first.contents, second.contents))[used],
        np.concatenate((first.groups, second.groups))[used],
    )


def _net(
    first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Keeps the first entry of each id that has an odd number of them; also returns which of those that came are kept.

    Each id comes and goes in turns, so an even number of entries leaves things as they were.
    """
    entries = np.concatenate((first, second))
    _, begins, counts = np.unique(np.abs(entries), return_index=True, return_counts=True)
    kept = np.zeros(len(entries), dtype=np.bool_)
    kept[begins[counts % 2 == 1]] = True
    return kept, kept[entries > 0]
