"""Loops that read ahead of the next ones, so that the processor overlaps their cache misses.

The sums that they return only keep the loops from being optimised away.
"""

from librt.vecs import vec
from mypy_extensions import i32, i64

from .hashing import root_hash
from .room import ID_BITS


def load_slots(
    hashes: vec[i64], slots: vec[i64], shift: i64, blocks: vec[i32], start: i64, first: i64, last: i64
) -> i64:
    """Prefetch the home slots of blocks `first` to `last` of a chain that are to be listed."""
    total: i64 = 0
    before = i64(blocks[start + first])
    for position in range(first, last):
        block = i64(blocks[start + position])
        if block - before != 1 and before - block != 1:
            total ^= slots[(hashes[position] >> ID_BITS) >> shift]
        before = block
    return total


def load_parents(
    hashes: vec[i64],
    chain_hash: vec[i64],
    identity: vec[i64],
    next_equal: vec[i32],
    parents: vec[i64],
    count: i64,
) -> i64:
    """Fill `hashes` with those of the parents, and prefetch what linking reads."""
    total: i64 = 0
    for position in range(count):
        before = parents[position]
        if before > 0:
            hashes[position] = chain_hash[before]
            total ^= identity[2 * before] ^ i64(next_equal[before])
        else:
            hashes[position] = root_hash(-before)
    return total
