"""For type checkers, who read it instead of block_pool.py. Written by `python -m tests.stubs`."""

import numpy as np
import numpy.typing as npt

from ...answers import RetentionEnds
from ...argument_types import ExtraKeys, Integer, Integers, Number, Policy
from ...kv_events import KVCacheEvents
from ..blocks.caching import FoundBlocks
from ..blocks.lease import BlockLease
from .standalone_pool import StandalonePool

class BlockPool(StandalonePool):
    def __init__(
        self,
        num_blocks: Integer,
        block_size: Integer = 16,
        *,
        enable_prefix_caching: bool = True,
        hash_seed: Integer | None = None,
        history_size: Integer = 0,
        eviction_policy: Policy = "lru",
        retention_blocks: Integer = 0,
        residency_sample: Integer = 0,
        enable_kv_cache_events: bool = False,
    ) -> None: ...
    def uncache(self, block_ids: Integers) -> int: ...
    def adopt(self, block_ids: Integers, *, holder: str = "", may_evict: bool = True) -> BlockLease: ...
    def evict(self, num_blocks: Integer) -> npt.NDArray[np.int32]: ...
    def cache_full_blocks(
        self, lease: BlockLease, token_ids: Integers, *, num_cached_blocks: Integer = 0, extra_keys: ExtraKeys = ()
    ) -> None: ...
    def cache_next_blocks(
        self, lease: BlockLease, token_ids: Integers, num_cached_blocks: Integer, *, extra_keys: ExtraKeys = ()
    ) -> int: ...
    def find_cached_blocks(self, token_ids: Integers, *, extra_keys: ExtraKeys = ()) -> FoundBlocks: ...
    def hold(
        self, found: FoundBlocks, *, holder: str = "", num_blocks: Integer | None = None, extend_by: Integer = 0
    ) -> BlockLease: ...
    def get_cached_blocks(self, token_ids: Integers, *, extra_keys: ExtraKeys = (), holder: str = "") -> BlockLease: ...
    def get_cached_block(
        self, token_ids: Integers, *, extra_keys: ExtraKeys = (), holder: str = ""
    ) -> BlockLease | None: ...
    def num_cached_tokens(self, token_ids: Integers, *, extra_keys: ExtraKeys = ()) -> int: ...
    def cached_block_ids(self, token_ids: Integers, *, extra_keys: ExtraKeys = ()) -> list[int]: ...
    def retain(
        self,
        token_ids: Integers,
        *,
        priority: Integer = 1,
        expires_at: Number | None = None,
        extra_keys: ExtraKeys = (),
    ) -> int: ...
    @property
    def num_retained_blocks(self) -> int: ...
    @property
    def ended_retentions(self) -> RetentionEnds: ...
    def reset(self) -> None: ...
    def take_events(self) -> KVCacheEvents: ...
    @property
    def enable_kv_cache_events(self) -> bool: ...
