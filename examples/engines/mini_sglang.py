"""mini-sglang on a `BlockPool`: its scheduler, its page table and its kernels stay as they are.

    from engines import mini_sglang

    scheduler = Scheduler(config)
    mini_sglang.install(scheduler)

Written for mini-sglang of 2026, whose `CacheManager` has the eight methods below; a page is a block. What changes: the
cost of a lookup and of an eviction does not grow with the tree, blocks are evicted by a policy of one's choice, and the
pool can be watched and checked. Pages with equal contents are not merged: a request keeps those that it filled. Use
pages of 16 tokens or so: a page of one token is a block of one token, with a block's cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from blockyard import BlockLease, BlockPool, FoundBlocks, InvalidArgument, OutOfBlocks
from blockyard.errors import MissingExtra
from blockyard.signatures import require_methods

try:
    import torch
except ImportError as error:
    raise MissingExtra(f"engines.mini_sglang needs torch, as mini-sglang does: pip install torch ({error})") from error

#: mini-sglang numbers its pages from 0; block 0 of a pool is the null block, so that a pool has one more.
_FIRST = 1
#: What mini-sglang's cache manager takes; mini-sglang has no version numbers.
_CONTRACT = {
    "match_req": "self, req",
    "lock": "self, handle",
    "unlock": "self, handle",
    "allocate_paged": "self, reqs",
    "cache_req": "self, req, finished",
    "check_integrity": "self",
    "lazy_free_region": "self",
}
_NEEDED = "mini-sglang of 2026: pip install git+https://github.com/sgl-project/mini-sglang.git"


class CacheHandle:
    """The cached blocks found for a request, and the lease on them while they are locked."""

    def __init__(self, found: FoundBlocks, page_size: int, device: torch.device) -> None:
        self.found = found
        self.cached_len = found.num_tokens
        self.lease: BlockLease | None = None
        self._page_size = page_size
        self._device = device

    def get_matched_indices(self) -> torch.Tensor:
        """Return the slots of the tokens that were found, int32 (cached_len,)."""
        return _slots(self.found.block_ids, self._page_size).to(self._device)


class MatchResult(NamedTuple):
    """The result of `match_req`, with the field name that mini-sglang reads."""

    cuda_handle: CacheHandle


class CacheManager:
    """mini-sglang's cache manager, with its arguments. pool_options go to `BlockPool`.

    `pool` is the pool; a page's block id is its page number + 1. Raises `InvalidArgument` for sizes outside the pool's
    limits.
    """

    def __init__(self, num_pages: int, page_size: int, page_table: torch.Tensor, **pool_options: Any) -> None:
        if num_pages < 1:
            raise InvalidArgument(f"num_pages is {num_pages}; it must be at least 1")
        self.num_pages = num_pages
        self.pool = BlockPool(num_pages + _FIRST, page_size, **pool_options)
        self.page_size = self.pool.block_size
        self.page_table = page_table
        self.device = page_table.device

    def match_req(self, req: Any) -> MatchResult:
        """Find the cached pages that a pending request begins with, without its last token. Holds nothing.

        Raises `InvalidArgument` for a request without tokens.
        """
        if len(req.input_ids) == 0:
            raise InvalidArgument(f"input_ids of req {req.uid} is empty; it must have at least 1 token")
        found = self.pool.find_cached_blocks(req.input_ids.numpy())
        most = (len(req.input_ids) - 1) // self.page_size
        return MatchResult(CacheHandle(found.first(min(len(found), most)), self.page_size, self.device))

    @property
    def available_size(self) -> int:
        """Number of tokens that fit into the pages no request holds."""
        return self.pool.num_free_blocks * self.page_size

    def lock(self, handle: CacheHandle) -> None:
        """Hold the pages found. Raises `StaleBlocks` if they were evicted, `InvalidArgument` if already held."""
        _require_handle("handle", handle)
        if handle.lease is not None:
            raise InvalidArgument("handle is locked already; a handle belongs to one request")
        handle.lease = self.pool.hold(handle.found)

    def unlock(self, handle: CacheHandle) -> None:
        """Free all pages a handle holds: those found, and those allocated to its request since. May be called again.

        Raises `InvalidArgument` if the argument is not a handle.
        """
        _require_handle("handle", handle)
        if handle.lease is not None:
            lease, handle.lease = handle.lease, None
            self.pool.free_blocks(lease)

    def allocate_paged(self, reqs: Sequence[Any]) -> None:
        """Give each request pages up to its `device_len`.

        Raises `OutOfBlocks` if not all fit, and `InvalidArgument` for a request that was not locked or does not fit
        into its row of the page table; no request is given pages then.
        """
        missing = [self._num_pages_in_row(req) - len(_lease(req)) for req in reqs]
        num_missing = sum(number for number in missing if number > 0)
        if num_missing > self.pool.num_free_blocks:
            free = self.pool.num_free_blocks
            raise OutOfBlocks(f"{num_missing} pages are needed for {len(reqs)} requests; {free} are free")
        for req, number in zip(reqs, missing, strict=True):
            if number > 0:
                first = len(_lease(req)) * self.page_size
                slots = _slots(self.pool.extend(_lease(req), number), self.page_size).to(self.device)
                self.page_table[req.table_idx, first : first + len(slots)] = slots

    def _num_pages_in_row(self, req: Any) -> int:
        """Return how many pages a request's tokens need. Checks that its row of the page table has room for them."""
        num_rows, width = self.page_table.shape
        number = -(-req.device_len // self.page_size)
        if not 0 <= req.table_idx < num_rows:
            raise InvalidArgument(f"table_idx of req {req.uid} is {req.table_idx}; page_table has {num_rows} rows")
        if number * self.page_size > width:
            raise InvalidArgument(
                f"device_len of req {req.uid} is {req.device_len}, which is {number} pages of {self.page_size} tokens; "
                f"a row of page_table has {width} slots"
            )
        return int(number)

    def cache_req(self, req: Any, *, finished: bool) -> None:
        """Cache the full pages that a request has computed, and free all its pages if it has finished.

        Raises `InvalidArgument` for a request that was not locked.
        """
        lease = _lease(req)
        start, end = lease.num_cached_blocks, req.cached_len // self.page_size
        if end > start:
            tokens = req.input_ids[start * self.page_size : end * self.page_size]
            self.pool.cache_next_blocks(lease, tokens.numpy(), start)
        if finished:
            self.unlock(req.cache_handle)

    def check_integrity(self) -> None:
        """Raise `InvariantError` if anything is wrong. O(num_pages)."""
        self.pool.check()

    @contextmanager
    def lazy_free_region(self) -> Iterator[None]:
        """Do nothing: freeing a page is cheap and need not be put off."""
        yield


def install(scheduler: Any, **pool_options: Any) -> CacheManager:
    """Replace the cache manager of a mini-sglang scheduler, before it has run anything.

    Raises `InvalidArgument` if requests wait or run or the argument is not such a scheduler, and `MissingExtra` for a
    version of mini-sglang whose cache manager takes other arguments.
    """
    if not (hasattr(scheduler, "cache_manager") and hasattr(scheduler, "prefill_manager")):
        raise InvalidArgument(f"scheduler is a {type(scheduler).__name__}; it must be mini-sglang's Scheduler")
    old = scheduler.cache_manager
    require_methods(old, _CONTRACT, __name__, _NEEDED)
    if scheduler.prefill_manager.runnable or scheduler.decode_manager.runnable:
        raise InvalidArgument("scheduler has requests; install it before the first one")
    manager = CacheManager(old.num_pages, old.page_size, old.page_table, **pool_options)
    scheduler.cache_manager = scheduler.prefill_manager.cache_manager = manager
    return manager


def _require_handle(name: str, handle: object) -> None:
    if not isinstance(handle, CacheHandle):
        raise InvalidArgument(f"{name} is {handle!r}; it must be a CacheHandle, as match_req gives it")


def _lease(req: Any) -> BlockLease:
    _require_handle(f"cache_handle of req {req.uid}", req.cache_handle)
    lease: BlockLease | None = req.cache_handle.lease
    if lease is None:
        raise InvalidArgument(f"req {req.uid} holds nothing; its handle was not locked, or it has ended")
    return lease


def _slots(block_ids: np.ndarray, page_size: int) -> torch.Tensor:
    """Return the slots of every token of blocks, in order, int32 (blocks * page_size,)."""
    first = (block_ids.astype(np.int32) - _FIRST) * page_size
    return torch.from_numpy((first[:, None] + np.arange(page_size, dtype=np.int32)).reshape(-1))


if __name__ == "__main__":
    raise SystemExit(f"{__file__} is imported, not run: its first lines show how. It needs {_NEEDED}")
