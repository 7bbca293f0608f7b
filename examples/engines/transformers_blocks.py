"""transformers' continuous batching (`generate_batch`) on a `BlockPool`.

    from engines.transformers_blocks import pooled_cache

    with pooled_cache(eviction_policy="lru") as pools:
        outputs = model.generate_batch(inputs, generation_config=..., continuous_batching_config=...)

transformers has no place for another block manager, so classes of its cache and of its schedulers are exchanged while
the context lasts; caches and schedulers that are made in it keep them. Written for transformers 5.19, for models of
which all layers attend to all tokens. What changes: a hit is compared token by token (transformers trusts 8 bytes of a
hash), cached blocks go one by one, in the order of a policy (transformers drops all of them at once), and a request is
admitted with its hit or not at all. Equal blocks of two requests stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from blockyard import BlockLease, BlockPool, FoundBlocks, InvalidArgument
from blockyard.engine_versions import TRANSFORMERS
from blockyard.signatures import engine_imports

with engine_imports(TRANSFORMERS, __name__):
    import torch
    from transformers.generation.continuous_batching import cache as _cache
    from transformers.generation.continuous_batching import continuous_api as _continuous_api
    from transformers.generation.continuous_batching import offloading_manager as _offloading_manager
    from transformers.generation.continuous_batching.cache_allocators import (
        FULL_ATTENTION,
        SLIDING_ATTENTION,
        CachePool,
        FullAttentionCacheAllocator,
    )
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler, PrefillFirstScheduler


class PooledSectors(CachePool):  # type: ignore[misc]  # untyped
    """The sectors of memory as transformers sees them: all belong to one allocator, and its pool counts free blocks."""

    blocks: BlockPool

    def reset(self) -> None:
        """Leave no sector free: the allocator has all of them and keeps them."""
        self.free_sectors: list[int] = []

    def set_blocks_per_sector(self, index: int, blocks_per_sector: int) -> None:
        """Keep the number, which is needed to number blocks as transformers does."""
        self.blocks_per_sector[index] = blocks_per_sector

    def try_to_free_sectors(self) -> None:
        """Free nothing: there is no other allocator to take them."""

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        """Free nothing: blocks are freed with their leases."""

    def count_free_blocks(self, index: int) -> int:  # transformers calls it so
        """Number of blocks a request can be given: empty ones, and cached ones that nothing holds."""
        return self.blocks.num_free_blocks


class OffloadedSectors(CachePool):  # type: ignore[misc]  # untyped
    """The CPU memory that offloaded requests are copied to.

    transformers counts a sector as free and then releases it, so the copy fails and ends all requests. With a single
    allocator nothing has to be released.
    """

    def try_to_free_sectors(self) -> None:
        """Free nothing: no other allocator needs the sectors."""


class PooledAllocator(FullAttentionCacheAllocator):  # type: ignore[misc]  # untyped
    """A full-attention allocator whose blocks come from a `BlockPool`, by one lease for each request.

    `blocks` is the pool. Block tables hold its ids, offset by the two sectors that transformers reserves.
    """

    pool_options: dict[str, Any]
    pools: list[BlockPool]

    def _after_cache_tensor_init(
        self, non_trash_bytes: int, bytes_per_sector: int, cache_tensor: torch.Tensor, pool: PooledSectors
    ) -> None:
        super()._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        options = {"enable_prefix_caching": self.use_block_sharing, **self.pool_options}
        self.blocks = pool.blocks = BlockPool(self.num_blocks + 1, self.tokens_per_page, **options)
        self._moved_by = pool.num_reserved_sectors * self.blocks_per_sector - 1
        self._leases: dict[str, BlockLease] = {}
        #: What was found last, and for which prompt as long as nothing has happened since.
        self._found: FoundBlocks | None = None
        self._asked: list[int] | None = None
        #: Children that were forked together so far: a failure ends them all.
        self._children: list[str] = []
        #: The tokens that the request that is looked up next can be given in this step, and whether that was too many.
        self.num_tokens_left = 0
        self.declined: str | None = None
        #: Whether a scheduler of ours asks: one of transformers' would hold hits that it cannot go on with.
        self.has_scheduler = False
        self.ledger = PooledLedger(self.blocks)
        self.pools.append(self.blocks)

    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        """Return 0 if the request fits, and more if it was declined or blocks are missing: no sectors can be added."""
        self._require_scheduler()
        if request_id == self.declined:
            return 1
        missing = int(self.needs_new_blocks(request_id, past_length, query_length))
        return missing if missing > 0 and missing > self.blocks.num_free_blocks else 0

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Give a request blocks for its new tokens. Raises `OutOfBlocks` if there are not enough."""
        missing = int(self.needs_new_blocks(request_id, past_length, query_length))
        if missing > 0 or request_id not in self._leases:
            self._extend(request_id, missing)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:  # likewise
        """End a request's lease. no_cache has no effect: the pool reuses cached blocks as readily as empty ones."""
        self.block_table.pop(request_id, None)
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.blocks.free_blocks(lease)

    def has_room(self, prompt_ids: list[int]) -> bool:
        """Return whether blocks are free for the part of a prompt that this step computes. O(blocks found)."""
        found = self._find(prompt_ids)
        num_tokens = min(len(prompt_ids) - found.num_tokens, self.num_tokens_left)
        # What no other request holds of the hit counts as free until it is held.
        if found.num_idle - (-num_tokens // self.tokens_per_page) > self.blocks.num_free_blocks:
            return False
        self._found, self._asked = found, prompt_ids
        return True

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Return the cached blocks that a prompt begins with. At least its last token is left to compute."""
        self._require_scheduler()
        # `has_room` has just been asked about this very list, unless another caller asks.
        if self._asked is not prompt_ids or self._found is None:
            self._found = self._find(prompt_ids)
        self._asked = None
        return self._numbered(self._found.block_ids)

    def _require_scheduler(self) -> None:
        if not self.has_scheduler:
            raise InvalidArgument(
                "the cache was made in pooled_cache and its scheduler was not; a manager's thread makes both after "
                "start has returned: leave pooled_cache when it has given its first result"
            )

    def _find(self, prompt_ids: list[int]) -> FoundBlocks:
        found = self.blocks.find_cached_blocks(prompt_ids)
        return found.first(min(len(found), (len(prompt_ids) - 1) // self.tokens_per_page))

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Hold the first of the blocks found last. Raises `StaleBlocks` if they were evicted."""
        if self._found is None or self._numbered(self._found.block_ids) != block_ids:
            raise InvalidArgument(f"block_ids has {len(block_ids)} blocks that match_prefix_blocks did not find")
        lease = self.blocks.hold(self._found, holder=request_id, num_blocks=prefix_len // self.tokens_per_page)
        self._begin(request_id, lease)

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Cache the blocks that the forward pass filled. O(new tokens).

        Does nothing if the request was cancelled while its batch was computed, as asynchronous batching allows.
        """
        lease = self._leases.get(request_id)
        if lease is None:
            return
        first = lease.num_cached_blocks
        start = first * self.tokens_per_page
        filled = (len(token_ids) - start) // self.tokens_per_page
        end = start + min(new_new_blocks, filled) * self.tokens_per_page
        self.blocks.cache_next_blocks(lease, token_ids[start:end], first)

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """Return how many full blocks are cached. Asynchronous batching forks while a batch is computed: the blocks
        that the batch fills are copied, because a block shared before it is cached could not be cached later."""
        shareable = int(super().count_shareable_blocks(source_request_id, past_length))
        return min(shareable, self._leases[source_request_id].num_cached_blocks)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Share full blocks with another request. Returns the blocks to copy, and the blocks to copy them into.

        An error ends the step before the scheduler knows the children of this step, so they are freed here.
        """
        source = self._leases[source_request_id]
        num_shared = self.count_shareable_blocks(source_request_id, past_length)
        copied = self._numbered(source.block_ids[num_shared:])
        self._children.append(dest_request_id)
        try:
            self._begin(dest_request_id, self.blocks.touch(source, holder=dest_request_id, stop=num_shared))
            self._extend(dest_request_id, len(copied))
        except BaseException:
            self.forget_children()
            raise
        return copied, self.block_table[dest_request_id][num_shared:]

    def keep_children(self) -> None:
        """Forget which requests were forked: the scheduler knows them all now."""
        self._children.clear()

    def forget_children(self) -> None:
        """Free the forked requests that the scheduler does not know yet."""
        while self._children:
            self.free_blocks(self._children.pop())

    def _begin(self, request_id: str, lease: BlockLease) -> None:
        self._leases[request_id] = lease
        self.block_table[request_id] = self._numbered(lease.block_ids)

    def _extend(self, request_id: str, num_blocks: int) -> None:
        lease = self._leases.get(request_id)
        if lease is None:
            self._begin(request_id, self.blocks.get_new_blocks(num_blocks, holder=request_id))
        else:
            self.block_table[request_id] += self._numbered(self.blocks.extend(lease, num_blocks))

    def _numbered(self, block_ids: np.ndarray) -> list[int]:
        """Return the ids as transformers numbers blocks."""
        return [block + self._moved_by for block in block_ids.tolist()]


class _Admission:
    """The changes to both of transformers' schedulers for caches whose blocks belong to a pool.

    transformers holds a request's hit before it asks whether the rest fits. A request that does not fit keeps its hit
    from all others until it is preempted, having computed nothing, and no request is admitted until another ends. Here
    such a request waits and holds nothing.
    """

    cache: Any
    active_requests: dict[str, Any]
    waiting_requests: dict[str, Any]
    block_new_requests: bool

    @property
    def _allocator(self) -> PooledAllocator:
        [allocator] = self.cache.cache_allocators.values()
        return allocator  # type: ignore[no-any-return]

    def add_waiting_request(self, state: Any) -> None:
        """Queue a request. Raises `InvalidArgument`, which fails this request alone, if another has its id or if its
        prompt is empty or longer than the whole cache. transformers itself would give two requests with one id the same
        blocks, end all requests at a prompt that is too long, and answer an empty one from another request's blocks."""
        if state.request_id in self.active_requests or state.request_id in self.waiting_requests:
            raise InvalidArgument(f"request_id is {state.request_id!r}; another request has it")
        allocator = self._allocator
        most = allocator.blocks.num_usable_blocks * allocator.tokens_per_page
        # One that comes back has been admitted before.
        is_new = state._true_initial_tokens == 0 and not state.is_cpu_offloaded
        if is_new and not state.initial_tokens:
            raise InvalidArgument("input_ids is empty; it must have at least 1 token")
        if is_new and len(state.initial_tokens) > most:
            raise InvalidArgument(f"input_ids has {len(state.initial_tokens)} tokens; the cache has room for {most}")
        super().add_waiting_request(state)  # type: ignore[misc]

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """Let transformers choose the batch. If nothing runs, new requests are admitted: no request could end first."""
        if not self.active_requests:
            self.block_new_requests = False
        allocator = self._allocator
        allocator.has_scheduler = True
        allocator.keep_children()
        allocator.num_tokens_left = token_budget
        try:
            return super().schedule_batch(token_budget, cache_budget)  # type: ignore[misc]
        finally:
            allocator.declined = None

    def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, removed: set[str]) -> None:
        super()._schedule_request(state, request_tokens, token_budget, removed)  # type: ignore[misc]
        self._allocator.num_tokens_left = token_budget - len(state.tokens_to_process)

    def _infer_request_tokens(self, state: Any, removed: set[str]) -> list[int]:
        allocator = self._allocator
        allocator.declined = None
        is_looked_up = state.request_id in self.waiting_requests and not state.is_cpu_offloaded
        if is_looked_up and self.cache.use_prefix_sharing and not allocator.has_room(state.remaining_prefill_tokens):
            allocator.declined = state.request_id
            return state.remaining_prefill_tokens  # type: ignore[no-any-return]
        return super()._infer_request_tokens(state, removed)  # type: ignore[misc,no-any-return]


class PooledFIFO(_Admission, FIFOScheduler):  # type: ignore[misc]  # untyped
    """transformers' scheduler "fifo"."""


class PooledPrefillFirst(_Admission, PrefillFirstScheduler):  # type: ignore[misc]  # untyped
    """transformers' scheduler "prefill_first"."""


class PooledLedger:
    """Stands in for transformers' ledger of cached blocks, and passes its calls on to the pool."""

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks

    def reset(self) -> None:
        """Forget all cached blocks."""
        self._blocks.reset_prefix_cache()

    def evict_cached_blocks(self) -> Sequence[int]:
        """Return nothing: the pool counts cached blocks as free and evicts them one by one when it needs them."""
        return []


def _refuse_windows(**_: Any) -> None:
    raise InvalidArgument(
        "the model has sliding_attention layers; pooled_cache serves models of which all layers attend to all tokens"
    )


class _Allocators(dict[str, Any]):
    """transformers' table of the layer kinds it can serve. Its own error for another kind is nothing but the name."""

    def __contains__(self, kind: object) -> bool:
        if not super().__contains__(kind):
            raise InvalidArgument(
                f"the model has {kind} layers, for which transformers' continuous batching has no cache; pooled_cache "
                "serves models of which all layers attend to all tokens, blockyard_engine those with states too"
            )
        return True


@contextmanager
def pooled_cache(**pool_options: Any) -> Iterator[list[BlockPool]]:
    """Keep the blocks of each continuous-batching cache made within the context in a `BlockPool`. Yields the pools.

    pool_options (eviction_policy, retention_blocks, history_size and so on) go to `BlockPool`. A model with
    sliding-window or state layers raises `InvalidArgument` when its cache is made. Not for use by several threads at
    once. A manager started with `init_continuous_batching` and `start` makes its cache and its scheduler in its own
    thread after `start` returns, so leave the context only when it has given its first result. If you leave earlier,
    all its requests may fail with `InvalidArgument`.
    """
    pools: list[BlockPool] = []
    allocator = type("PooledAllocator", (PooledAllocator,), {"pool_options": pool_options, "pools": pools})
    exchanged: list[tuple[Any, str, Any]] = [
        (
            _cache,
            "ATTN_TYPE_TO_ALLOCATOR",
            _Allocators({FULL_ATTENTION: allocator, SLIDING_ATTENTION: _refuse_windows}),
        ),
        (_cache, "CachePool", PooledSectors),
        (_offloading_manager, "CachePool", OffloadedSectors),
        (_continuous_api, "SCHEDULER_MAPPING", {"fifo": PooledFIFO, "prefill_first": PooledPrefillFirst}),
        (_continuous_api, "FIFOScheduler", PooledFIFO),
    ]
    own = [(module, name, getattr(module, name)) for module, name, _ in exchanged]
    try:
        for module, name, ours in exchanged:
            setattr(module, name, ours)
        yield pools
    finally:
        for module, name, theirs in own:
            setattr(module, name, theirs)


if __name__ == "__main__":
    raise SystemExit(f"{__file__} is imported, not run: its first lines show how. It needs {TRANSFORMERS}")
