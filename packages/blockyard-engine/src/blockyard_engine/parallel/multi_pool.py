"""One request's blocks over the pools of several devices: allocated all or none, freed in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blockyard import BlockLease
from blockyard.arguments import require_int, require_str, shown
from blockyard.cache_options import MAX_BLOCKS
from blockyard.errors import DoubleFree, ForeignBlock, InvalidArgument, InvariantError, OutOfBlocks
from blockyard.extending import LeasePool

MAX_POOLS = 4096


class MultiLease:
    """A lease of blocks of several pools, in the order of the request's blocks. Free it once, with `free_blocks`."""

    def __init__(self, owner: MultiBlockPool, serial: int, holder: str) -> None:
        self._owner = owner
        self._serial = serial
        self._holder = holder
        #: (device, its lease), in order; a lease that was extended has a device several times.
        self._parts: list[tuple[int, BlockLease]] = []

    @property
    def holder(self) -> str:
        """Name of the holder."""
        return self._holder

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Device and block id of each block, in order, int32 (n, 2); a copy. O(n)."""
        rows = [np.empty((0, 2), np.int32)]
        for device, part in self._parts:
            ids = part.block_ids
            rows.append(np.stack([np.full(len(ids), device, np.int32), ids], axis=1))
        return np.concatenate(rows)

    def num_blocks_of(self, device: int) -> int:
        """Return how many of the blocks are on a device. O(parts). Raises `InvalidArgument` for an invalid number."""
        require_int("device", device, 0, 2**31 - 1)
        return sum(len(part) for number, part in self._parts if number == device)

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts)

    def __repr__(self) -> str:
        return f"<MultiLease {self._called()}: {self.block_ids.tolist()}>"

    def _called(self) -> str:
        return f"{self._serial} of {self._holder!r}" if self._holder else str(self._serial)

    def __copy__(self) -> MultiLease:
        raise TypeError("a MultiLease cannot be copied: two would free the same blocks")

    def __deepcopy__(self, memo: object) -> MultiLease:
        raise TypeError("a MultiLease cannot be copied: two would free the same blocks")

    def __reduce__(self) -> str:
        raise TypeError("a MultiLease cannot be pickled; send its `block_ids`")


class MultiBlockPool:
    """Pools of several devices as one pool (the course's `MultiGPUBlockPool`).

    A request's blocks are spread in proportion to each pool's free blocks, so all pools fill evenly; the remainder goes
    to the pools with the largest fractions. The pools may have other users too. Raises `InvalidArgument`.

    Args:
        pools: one per device, all with the same block size, none twice.

    >>> from blockyard import BlockPool
    >>> pool = MultiBlockPool([BlockPool(11, 16), BlockPool(6, 16)])
    >>> lease = pool.get_new_blocks(7, holder="request-1")
    >>> lease.num_blocks_of(0), lease.num_blocks_of(1), pool.num_free_blocks
    (5, 2, 8)
    >>> pool.free_blocks(lease)
    >>> pool.num_used_blocks
    0
    """

    def __init__(self, pools: Sequence[LeasePool]) -> None:
        if not isinstance(pools, (list, tuple)) or not 1 <= len(pools) <= MAX_POOLS:
            raise InvalidArgument(f"pools is {shown(pools)}; it must be a list of 1 to {MAX_POOLS} pools")
        for device, pool in enumerate(pools):
            if not isinstance(pool, LeasePool):
                raise InvalidArgument(f"pools[{device}] is {shown(pool)}; it must be a pool")
            if pool.block_size != pools[0].block_size:
                raise InvalidArgument(
                    f"pools[{device}] has block_size {pool.block_size}; it must be that of pools[0], "
                    f"{pools[0].block_size}"
                )
            if any(pool is other for other in pools[:device]):
                raise InvalidArgument(f"pools[{device}] is in the list twice; give each device its own pool")
        self.pools = tuple(pools)
        self._live: dict[int, MultiLease] = {}
        self._last_serial = 0

    # Sizes. O(devices).

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.pools[0].block_size)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of all pools, without the null blocks."""
        return sum(pool.num_usable_blocks for pool in self.pools)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of all pools."""
        return sum(pool.num_free_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        """Blocks held in all pools, by any holder."""
        return sum(pool.num_used_blocks for pool in self.pools)

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_usable_blocks

    def leases(self) -> list[MultiLease]:
        """Return the leases that are not freed, oldest first: the leak report."""
        return list(self._live.values())

    # Leases.

    def get_new_blocks(self, num_blocks: int, *, holder: str = "") -> MultiLease:
        """Lease `num_blocks` blocks, spread over the pools by free space. O(num_blocks + devices * log devices).

        Raises `OutOfBlocks` if all pools together have fewer free blocks, and `InvalidArgument`; nothing has changed
        then. If an eviction policy fails (`PolicyError`), nothing is held, but blocks that other pools evicted stay
        evicted.
        """
        name = require_str("holder", holder)
        self._last_serial += 1
        lease = MultiLease(self, self._last_serial, name)
        try:
            self._take(lease, num_blocks)
            self._live[lease._serial] = lease
            return lease
        except BaseException:
            self._live.pop(lease._serial, None)
            self._free_parts(lease._parts, 0)
            raise

    def extend(self, lease: MultiLease, num_blocks: int) -> None:
        """Append `num_blocks` blocks to a lease. Raises as `get_new_blocks`."""
        held = self._require_live(lease)
        num_parts = len(held._parts)
        try:
            self._take(held, num_blocks)
            self._require_live(held)  # an eviction policy may have freed it meanwhile
        except BaseException:
            self._free_parts(held._parts, num_parts if held._serial in self._live else 0)
            raise

    def _take(self, lease: MultiLease, num_blocks: int) -> None:
        """Append blocks to a lease; after an error the caller frees those already taken."""
        count = require_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
        shares = [(device, share) for device, share in enumerate(self._spread(count)) if share > 0]
        for device, _ in shares:
            require_idle(self.pools[device])
        for device, share in shares:
            lease._parts.append((device, self.pools[device].get_new_blocks(share, holder=lease._holder)))

    def _spread(self, count: int) -> list[int]:
        """Return how many blocks each pool gives: largest remainders (Hamilton's method), within its free blocks."""
        free = [pool.num_free_blocks for pool in self.pools]
        total = sum(free)
        if count > total:
            raise OutOfBlocks(f"num_blocks is {count}; only {total} blocks are free in {len(free)} pools", count, total)
        if count == 0:
            return [0] * len(free)
        shares = [count * each // total for each in free]
        # The remainder is smaller than the number of pools with a fraction, each of which has one more block.
        by_rest = sorted(range(len(free)), key=lambda device: (-(count * free[device] % total), device))
        for device in by_rest[: count - sum(shares)]:
            shares[device] += 1
        return shares

    def free_blocks(self, lease: MultiLease) -> None:
        """Free a lease on all devices, last block first. O(blocks).

        During a call of one of the pools, that pool's blocks are freed when the call ends. Raises `DoubleFree` for a
        lease that is already freed, and `ForeignBlock` for one of another `MultiBlockPool`.
        """
        held = self._require_live(lease)
        try:
            self._free_parts(held._parts, 0)
            self._live.pop(held._serial, None)
        except BaseException:
            with contextlib.suppress(DoubleFree):
                self._free_parts(held._parts, 0)
            self._live.pop(held._serial, None)
            raise

    def _free_parts(self, parts: list[tuple[int, BlockLease]], first: int) -> None:
        """Free all parts after the `first` ones, last part first, and remove them from the list.

        If a part was freed elsewhere, free the others and then raise `DoubleFree`.
        """
        failed: DoubleFree | None = None
        while len(parts) > first:
            device, part = parts[-1]
            try:
                self.pools[device].free_blocks(part)
            except DoubleFree as error:
                failed = error
            parts.pop()
        if failed is not None:
            raise failed

    def _require_live(self, lease: object) -> MultiLease:
        if not isinstance(lease, MultiLease):
            raise InvalidArgument(f"lease is {shown(lease)}; it must be a MultiLease, as get_new_blocks returns it")
        if lease._owner is not self:
            raise ForeignBlock(f"lease {lease._called()} was handed out by another pool")
        if self._live.get(lease._serial) is not lease:
            raise DoubleFree(f"lease {lease._called()} was already freed")
        return lease

    def check(self) -> None:
        """Verify every pool, and that each lease's blocks are held and in no other lease of this pool. O(all blocks).

        Raises `InvariantError`.
        """
        seen: set[tuple[int, int]] = set()
        for pool in self.pools:
            pool.check()
        live = [{id(part) for part in pool.leases()} for pool in self.pools]
        for lease in self._live.values():
            for device, part in lease._parts:
                if id(part) not in live[device]:
                    raise InvariantError(f"{lease!r} no longer holds its blocks {list(part)} of device {device}")
            blocks = {(device, block) for device, block in lease.block_ids.tolist()}
            if len(blocks) != len(lease) or blocks & seen:
                raise InvariantError(f"{lease!r} holds blocks that another lease holds too")
            seen |= blocks


def require_idle(pool: LeasePool) -> None:
    """Raise `ConcurrentCall` while a call of the pool, or of its manager, is running. O(1)."""
    pool.free_blocks(pool.get_new_blocks(0))
