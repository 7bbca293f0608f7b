"""Level "tokens": vLLM's `KVCacheManager` on `blockyard.BlockPool`, for models with one full-attention group.

Each request holds one lease. As in vLLM's interface, hits are looked up without being held, slots are given chunk by
chunk, and blocks are cached when their slots are given. Tokens prove a hit; vLLM's hashes only name blocks in events.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core import kv_cache_manager as stock
from vllm.v1.core.kv_cache_coordinator import _validate_prefix_cache_retention_interval
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from blockyard import BlockLease, BlockPool
from blockyard.keys import ExtraKey

from .adapter_options import Options
from .misses import StepMisses
from .token_pool import RequestKeys, TokenPool, request_keys, tokens_of
from .views import BlockIds, CachedCounts, TablesView

ADMITTED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def refusal_reason(
    kv_cache_config: Any, hash_block_size: int, dcp_world_size: int = 1, enable_caching: bool = True, **others: Any
) -> str:
    """Return why level "tokens" does not support a model, or "" if it does."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups"
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return f"its cache is a {type(spec).__name__}"
    block_size = spec.block_size * (dcp_world_size if spec.dcp_sharded else 1)
    if enable_caching and hash_block_size != block_size:
        return f"blocks have {block_size} tokens, hashes {hash_block_size}"
    if others.get("num_hash_lookahead_tokens"):
        return "a block's hash covers tokens after the block"
    return ""


class KVCacheManager(stock.KVCacheManager):
    """vLLM's block manager; requests hold leases of `pool`, and `admission` is notified before they are freed."""

    admission: Any = None

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        options: Options | None = None,
    ) -> None:
        group = kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        _validate_prefix_cache_retention_interval(
            kv_cache_config.prefix_cache_retention_interval, scheduler_block_size, kv_cache_config
        )
        assert watermark >= 0.0, "watermark must be non-negative"
        options = options or Options()
        self.block_size = spec.block_size * (dcp_world_size if spec.dcp_sharded else 1)
        self.num_blocks = kv_cache_config.num_blocks
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_eagle = use_eagle or group.is_eagle_group
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.kv_cache_config = kv_cache_config
        self.num_kv_cache_groups = 1
        self.mamba_shared_prefix_checkpoint = False
        self.retained_hit_group_ids = ()
        self.watermark_blocks = int(watermark * self.num_blocks)
        self.kv_cache_event_metadata = (
            (stock.get_kv_cache_spec_kind(spec).value, stock.get_kv_cache_spec_sliding_window(spec)),
        )
        #: Trailing computed tokens whose keys and values are not final yet.
        self.lag = max(0, num_prefill_lookahead - 1)
        self.pool = BlockPool(
            self.num_blocks,
            self.block_size,
            enable_prefix_caching=enable_caching,
            eviction_policy=options.eviction_policy,
            residency_sample=options.residency_sample,
            retention_blocks=options.retention_blocks,
            enable_kv_cache_events=bool(options.events),
        )
        self.misses = StepMisses(options.miss_causes, self.block_size) if options.miss_causes else None
        self.leases: dict[str, BlockLease] = {}
        self.keys: dict[str, RequestKeys] = {}
        self.block_pool: Any = TokenPool(
            self.pool, enable_caching, enable_kv_cache_events, metrics_collector, self.misses
        )
        self.counts = self.block_pool.counts
        self.empty_kv_cache_blocks = BlockIds(self.block_pool, [])
        self.coordinator: Any = self._coordinator(spec, scheduler_block_size)

    def _coordinator(self, spec: Any, scheduler_block_size: int) -> Any:
        """Return the parts of vLLM's coordinator that its scheduler and engine read."""
        single = SimpleNamespace(
            block_size=self.block_size,
            kv_cache_spec=spec,
            kv_cache_group_id=0,
            num_cached_block=CachedCounts(self.leases),
            retains_longer_hit=False,
            block_pool=self.block_pool,
            has_positionally_stable_blocks=True,
            req_to_blocks=TablesView(self.block_pool, self.leases),
            new_block_ids=[],
            records_new_block_ids=False,
        )
        return SimpleNamespace(
            single_type_managers=(single,),
            enable_partial_hash_hits=False,
            num_reprefillable_tokens=self.lag,
            eagle_group_ids={0} if self.use_eagle else set(),
            block_pool=self.block_pool,
            retention_interval=self.kv_cache_config.prefix_cache_retention_interval,
            get_num_blocks_to_allocate=self._num_to_allocate,
            scheduler_block_size=scheduler_block_size,
            get_blocks=lambda request_id: self.get_blocks(request_id).blocks,
            reset_prefix_cache=self.block_pool.reset_prefix_cache,
        )

    # Hits.

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> tuple[Any, int, int]:
        """Return the cached blocks that the request starts with, without holding them."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        found = self._computed_blocks(request, max_cache_hit_length)
        if self.misses is not None:
            self.misses.record_lookup(request, found[1])
        return found

    def _computed_blocks(self, request: Any, max_cache_hit_length: int | None) -> tuple[Any, int, int]:
        limit = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        limit -= limit % self.block_size
        if limit <= 0:
            return self.empty_kv_cache_blocks, 0, 0
        found = self.pool.find_cached_blocks(tokens_of(request, 0, limit), extra_keys=self.keys_of(request))
        found = self.block_pool.limit_to_hashes(found, request.block_hashes)
        if self.use_eagle and len(found):
            found = found.first(len(found) - 1)
        if not len(found):
            return self.empty_kv_cache_blocks, 0, 0
        if self.enable_kv_cache_events and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            self.block_pool.publish_stored(request, 0, len(found))
        return BlockIds(self.block_pool, found.block_ids.tolist(), found), found.num_tokens, 0

    def get_computed_blocks_for_connector(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int, bool]:
        """Return the result of `get_computed_blocks`, and False: with one group, hits of groups cannot differ."""
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    def truncate_computed_blocks(self, blocks: Any, num_computed_tokens: int) -> Any:
        assert num_computed_tokens % self.block_size == 0
        count = num_computed_tokens // self.block_size
        found = None if blocks.found is None else blocks.found.first(count)
        return BlockIds(self.block_pool, blocks.ids[:count], found)

    def create_kv_cache_blocks(self, blocks: Any) -> Any:
        return self._as_blocks([block.block_id for block in blocks[0]])

    def _as_blocks(self, ids: list[int]) -> BlockIds:
        return BlockIds(self.block_pool, ids) if ids else self.empty_kv_cache_blocks

    def keys_of(self, request: Any) -> tuple[ExtraKey, ...]:
        """Return the request's extra keys. O(1), or O(images) if it has changed."""
        made = self.keys.get(request.request_id)
        if made is None or not made.match(request):
            made = self.keys[request.request_id] = request_keys(request, self.block_size)
        return made.keys

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Count an admitted request's prompt tokens and hits, and the causes of its misses."""
        super().record_prefix_cache_stats(request, num_hits)
        if self.misses is not None:
            self.misses.count_admission(request)

    # Slots.

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Any:
        """Return new blocks for the tokens, holding the hits. None, and no change, if blocks run short."""
        lease = self.leases.get(request.request_id)
        known = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        longest = self.max_model_len
        after = (known if known < longest else longest) + num_new_tokens
        end = after + num_lookahead_tokens
        if end > longest:
            end = longest
        # Blocks that must stay free when a request is admitted beside others.
        watermark = self.watermark_blocks if has_scheduled_reqs and request.status in ADMITTED else 0
        if (
            lease is not None
            and num_new_tokens
            and end <= len(lease) * self.block_size
            and not (reserved_blocks or watermark)
        ):
            # Most steps: the last block has room.
            if full_sequence_must_fit:
                whole = min(request.num_tokens, longest)
                if self._num_needed(lease, whole, []) > self.pool.num_free_blocks:
                    return None
            # The cheap condition first: `num_tokens` is a property, and a block is rarely full.
            if not delay_cache_blocks and after >= (lease.num_cached_blocks + 1) * self.block_size:
                self._cache(request, lease, min(after, request.num_tokens))
            return self.empty_kv_cache_blocks
        if num_new_tokens == 0 and num_external_computed_tokens == 0 and num_new_computed_tokens == 0:
            raise ValueError("num_new_tokens must be greater than 0 when there are no computed tokens to adopt")
        hits = new_computed_blocks if lease is None and new_computed_blocks else self.empty_kv_cache_blocks
        missing = -(-end // self.block_size) - (len(hits.ids) if lease is None else len(lease))
        free = self.pool.num_free_blocks - watermark
        if full_sequence_must_fit and self._num_needed(lease, min(request.num_tokens, longest), hits.ids) > free:
            return None
        if self._num_needed(lease, end, hits.ids) > free - reserved_blocks:
            return None
        new = self._take(request, lease, hits, missing)
        if not delay_cache_blocks:
            self._cache(request, self.leases[request.request_id], min(after, request.num_tokens))
        return self._as_blocks(new)

    def _num_needed(self, lease: BlockLease | None, num_tokens: int, hits: list[int]) -> int:
        """Return how many free blocks this takes: new ones, and hits that nothing holds yet."""
        blocks = cdiv(num_tokens, self.block_size)
        if lease is not None:
            return max(0, blocks - len(lease))
        counts = self.counts
        return max(0, blocks - len(hits)) + sum(counts[block_id] == 0 for block_id in hits)

    def _num_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Any = ((),), **others: Any
    ) -> int:
        hits = [block.block_id for block in new_computed_blocks[0]]
        return self._num_needed(self.leases.get(request_id), num_tokens, hits)

    def _take(self, request: Any, lease: BlockLease | None, hits: BlockIds, missing: int) -> list[int]:
        """Hold the hits of a newly admitted request and take the missing blocks."""
        if lease is not None:
            new = self.pool.extend(lease, missing).tolist() if missing > 0 else []
        else:
            lease = self._hold(request, hits, max(0, missing))
            self.leases[request.request_id] = lease
            new = lease.block_ids[len(hits.ids) :].tolist()
            if self.metrics_collector:
                for block_id in hits.ids:
                    self.metrics_collector.on_block_accessed(self.block_pool.block(block_id))
        if new:
            self.block_pool.note_taken(new)
        return new

    def _hold(self, request: Any, hits: BlockIds, missing: int) -> BlockLease:
        if not hits.ids:
            return self.pool.get_new_blocks(missing, holder=request.request_id)
        found = hits.found
        if found is None:
            tokens = tokens_of(request, 0, len(hits.ids) * self.block_size)
            found = self.pool.find_cached_blocks(tokens, extra_keys=self.keys_of(request))
            assert found.block_ids.tolist() == hits.ids, "the request's tokens are cached in other blocks than the hit"
        return self.pool.hold(found, holder=request.request_id, extend_by=missing)

    # Caching. vLLM caches blocks when it gives their slots, before anything is computed.

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Cache the full blocks up to these tokens. O(new tokens)."""
        lease = self.leases.get(request.request_id)
        if lease is not None:
            self._cache(request, lease, num_computed_tokens)

    def _cache(self, request: Any, lease: BlockLease, num_computed_tokens: int) -> None:
        if not self.enable_caching:
            return
        full = max(0, num_computed_tokens - self.lag) // self.block_size
        if lease.num_cached_blocks < full:
            self.block_pool.cache(request, lease, full, self.keys_of(request))

    # Freeing.

    def _pop(self, request: Any) -> BlockLease | None:
        self.keys.pop(request.request_id, None)
        return self.leases.pop(request.request_id, None)

    def free(self, request: Any) -> None:
        if self.admission is not None:
            self.admission.finish(request)
        lease = self._pop(request)
        if lease is not None:
            self.pool.free_blocks(lease)

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """Return the request's blocks, to be freed later by `block_pool.free_blocks`."""
        if self.admission is not None:
            self.admission.finish(request)
        lease = self._pop(request)
        return [] if lease is None else self.block_pool.blocks_of_lease(lease)

    # Reading.

    def get_blocks(self, request_id: str) -> Any:
        return self._as_blocks(list(self.leases.get(request_id, ())))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        lease = self.leases.get(request_id)
        return ([],) if lease is None else (lease.block_ids.tolist(),)

    def estimate_cached_tokens(self, request: Any) -> int:
        lease = self.leases.get(request.request_id)
        return 0 if lease is None else lease.num_cached_blocks * self.block_size

    # Not needed for full attention.

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Do nothing: full attention attends to every token."""

    def new_step_starts(self) -> None:
        """Do nothing: nothing is pending."""

    def take_new_block_ids(self) -> list[int]:
        """Return no blocks to zero."""
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return no copies."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return no states."""
        return {}

    def finalize_partial_tail_offloads(self, request: Any) -> list[tuple[int, int, int]]:
        """Return no states."""
        return []
