"""What stays cached: the eviction policy, retention, the clock that ends it, and forgetting everything."""

from mypy_extensions import i64

from ..index.prompt import Prompt, make_prompt
from ..parts import Parts
from ..pool.eviction import EvictionOrder, wished_end, wished_priority


class EvictCalls:
    """The wishes of the caller, for the pool that holds keys and values."""

    def __init__(self, parts: Parts) -> None:
        self.gate = parts.gate
        self.token_blocks = parts.token_blocks
        self.sequences = parts.sequences
        self.store = parts.store
        self.block_size: i64 = parts.block_size
        self.order = EvictionOrder(parts.kv_pool, parts.gate.interruption, parts.clock, parts.config.retention_blocks)
        self.order.install(parts.config.eviction_policy)

    def set_eviction_policy(self, policy: object) -> None:
        """See `KVCacheManager.set_eviction_policy`."""
        self.gate.enter("set_eviction_policy")
        try:
            self.order.install(policy)
        finally:
            self.gate.leave()

    def retain(self, token_ids: object, priority: object, expires_at: object, extra_keys: object) -> int:
        """See `KVCacheManager.retain`."""
        self.gate.enter("retain")
        try:
            prompt = make_prompt(token_ids, extra_keys, int(self.block_size))
            level = wished_priority(priority)
            until = wished_end(expires_at)
            return self.order.retain(self._cached_blocks(prompt), level, until)
        finally:
            self.gate.leave()

    def _cached_blocks(self, prompt: Prompt) -> list[int]:
        """The blocks of the pool that hold the longest cached beginning of a prompt, all layer groups'."""
        found = self.token_blocks.index.find_prompt(prompt, prompt.num_tokens // self.block_size)
        blocks: list[int] = []
        for position in range(found):
            blocks += self.store.cached_for(i64(self.token_blocks.index.found[position]))
        return blocks

    def advance_time(self, now: object) -> None:
        """See `KVCacheManager.advance_time`."""
        self.gate.enter("advance_time")
        try:
            self.order.advance(now)
        finally:
            self.gate.leave()

    def reset_prefix_cache(self) -> None:
        """See `KVCacheManager.reset_prefix_cache`."""
        self.gate.enter("reset_prefix_cache")
        try:
            self.sequences.version += 1
            self.store.reset()
        finally:
            self.gate.leave()
