"""Invariants of the index."""

import numpy as np
from mypy_extensions import i64

from ...errors import InvariantError
from ..arrays import view_i32, view_i64
from .content_log import ContentLog
from .prefix_index import PrefixIndex
from .room import ID_MASK


def check_index(index: PrefixIndex) -> None:
    """Raise `InvariantError` unless a lookup finds each indexed block exactly once and all counts are right.

    O(num_blocks).
    """
    indexed = [block for block in range(len(index.chain_hash)) if index.is_cached(i64(block))]
    if len(indexed) != index.num_indexed:
        raise InvariantError(f"index: {len(indexed)} blocks have content, but num_indexed is {index.num_indexed}")
    pending = sum(1 for owner in index.owner if owner != 0)
    if pending != index.num_pending:
        raise InvariantError(f"I3: {pending} blocks have an owner, but num_pending is {index.num_pending}")
    in_table = [int(slot) & int(ID_MASK) for slot in view_i64(index._slots).tolist() if slot]
    if in_table and not 0 < min(in_table) <= max(in_table) < len(index.chain_hash):
        raise InvariantError(f"index: the table leads to block {max(in_table)}; the pool has {len(index.chain_hash)}")
    following = [block for block in range(len(index.chain_hash)) if index.rings.follows(i64(block))]
    standing = in_table + following
    if sorted(block for oldest in standing for block in index.rings.members(oldest)) != indexed:
        raise InvariantError(
            "index: the blocks that the table, neighbours and rings lead to are not those that have content"
        )
    linked = np.flatnonzero(view_i32(index.rings.next_equal) | view_i32(index.rings.prev_equal)).tolist()
    for block in sorted(set(linked) - set(indexed)):
        raise InvariantError(f"index: block {block} has no content, but is linked in a ring")
    if index.log is not None:
        _check_log(index, index.log, standing)
    if index.observer is not None:
        index.observer.check()
    blocks = {int(index.content_of(i64(block))): block for block in standing}
    for block in standing:
        before = blocks.get(int(index.parent_of(i64(block))), 0)
        _check_block(index, block, before)
        _check_chain(index, block, before)


def _check_log(index: PrefixIndex, log: ContentLog, standing: list[int]) -> None:
    """Check that each computed content has one log entry, and that entries and marks agree."""
    logged = {block for block in range(len(log.marks)) if log.marks[i64(block)] != 0}
    for oldest in standing:
        computed = {block for block in index.rings.members(oldest) if index.owner[i64(block)] == 0}
        if len(computed & logged) != min(len(computed), 1):
            raise InvariantError(
                f"index: of the equal blocks {sorted(computed)}, {sorted(computed & logged)} are logged; exactly one "
                "must be"
            )
        logged -= computed
    if logged:
        raise InvariantError(f"index: blocks {sorted(logged)} are logged, but have no computed content")
    for place in range(int(log.num_entries)):
        entry = log.entries[i64(place)]
        if entry > 0 and log.marks[entry] != place + 1:
            raise InvariantError(
                f"index: log entry {place} has block {entry}, but that block's mark is {log.marks[entry]}"
            )


def _check_block(index: PrefixIndex, oldest: i64, standing_before: i64) -> None:
    content = index.content_of(oldest)
    parent = index.parent_of(oldest)
    if not parent < content <= index._last_content:
        raise InvariantError(
            f"I5: block {oldest} has content {content}, which must be above its parent {parent} and at most "
            f"{index._last_content}"
        )
    ring = index.rings.members(oldest)
    for position, member in enumerate(ring):
        block = i64(member)
        row = index.rows.start_of(block)
        before = index.rings.prev_equal[block]
        if before != (ring[position - 1] if len(ring) > 1 else 0):
            raise InvariantError(f"index: block {block} points back to {before} in the ring {ring}")
        if index.content_of(block) != content or index.parent_of(block) != parent:
            raise InvariantError(
                f"I5: block {block} is in the ring of block {oldest}, but has another content or parent"
            )
        if standing_before == 0 and index.rings.follows(block):
            # Its parent was removed, so it cannot be found.
            continue
        found = index.find(index.rows.words, row, index.chain_hash[block], parent)
        if found + index.equal_follower(index.rows.words, row, standing_before) != oldest:
            raise InvariantError(f"I5: a lookup of block {block}'s tokens does not find block {oldest}")


def _check_chain(index: PrefixIndex, block: i64, before: i64) -> None:
    """Check that a block's hash follows from its parent's hash, if the parent is indexed or a known root."""
    parent = index.parent_of(block)
    if before == 0 and not index.roots.holds(parent):
        return
    if index.hash_block(block, before, parent) != index.chain_hash[block]:
        raise InvariantError(f"index: the hash of block {block} does not follow from its parent's")
