"""What stays cached: the eviction policy, retention, the clock that ends it, and forgetting everything."""

from typing import Final

from mypy_extensions import i64

from ...arguments import require_int, require_number
from ...errors import InvalidArgument, OverBudget
from ..index.prompt import Prompt, make_prompt
from ..parts import Parts
from ..policies import make_policy
from ..policies.caught import CaughtPolicy
from ..policies.retention import Retention

MAX_PRIORITY: Final = 2**20


class EvictCalls:
    """Installs what chooses victims: the order of the free queue, or a policy, with retention around it."""

    def __init__(self, parts: Parts) -> None:
        self.gate = parts.gate
        self.config = parts.config
        self.token_blocks = parts.token_blocks
        self.kv_pool = parts.kv_pool
        self.sequences = parts.sequences
        self.store = parts.store
        self.clock = parts.clock
        self.block_size: i64 = parts.block_size
        self.retention: Retention | None = None
        self._install(parts.config.eviction_policy)

    def _install(self, policy: object) -> None:
        """Least recently used needs no policy: it is the order of the free queue."""
        num_blocks = int(self.kv_pool.capacity)
        caught = CaughtPolicy(make_policy(policy, num_blocks), num_blocks, self.gate.interruption)
        retention: Retention | None = None
        if self.config.retention_blocks > 0:
            retention = Retention(caught, num_blocks)
            self.kv_pool.choose_by(retention, caught)
        elif isinstance(policy, str) and policy == "lru":
            self.kv_pool.choose_by(None, None)
        else:
            self.kv_pool.choose_by(caught, caught)
        self.retention = retention

    def set_eviction_policy(self, policy: object) -> None:
        """See `KVCacheManager.set_eviction_policy`."""
        self.gate.enter("set_eviction_policy")
        try:
            self._install(policy)
        finally:
            self.gate.leave()

    def retain(self, token_ids: object, priority: object, expires_at: object, extra_keys: object) -> int:
        """See `KVCacheManager.retain`."""
        self.gate.enter("retain")
        try:
            prompt = make_prompt(token_ids, extra_keys, int(self.block_size))
            level = require_int("priority", priority, 0, MAX_PRIORITY)
            until = None if expires_at is None else require_number("expires_at", expires_at)
            return self._retain(self._cached_blocks(prompt), level, until)
        finally:
            self.gate.leave()

    def _cached_blocks(self, prompt: Prompt) -> list[int]:
        """The blocks of the pool that hold the longest cached beginning of a prompt, all layer groups'."""
        found = self.token_blocks.index.find_prompt(prompt, prompt.num_tokens // self.block_size)
        blocks: list[int] = []
        for position in range(found):
            blocks += self.store.cached_for(i64(self.token_blocks.index.found[position]))
        return blocks

    def _retain(self, blocks: list[int], priority: int, expires_at: float | None) -> int:
        retention = self.retention
        if retention is None:
            raise InvalidArgument("retention_blocks is 0; retain needs a budget of blocks in the config")
        budget = self.config.retention_blocks
        new = len([block for block in blocks if not retention.is_retained(block)]) if priority > 0 else 0
        if retention.num_retained + new > budget:
            raise OverBudget(
                f"retain: {new} more blocks would be retained; {retention.num_retained} of {budget} are already"
            )
        if self.kv_pool.chooser is not None and self.kv_pool.chooser.caught.failure:
            raise self.kv_pool.chooser.error()
        for block in blocks:
            retention.set_priority(block, priority, expires_at)
        return len(blocks)

    def advance_time(self, now: object) -> None:
        """See `KVCacheManager.advance_time`."""
        self.gate.enter("advance_time")
        try:
            time = require_number("now", now)
            if time < self.clock.now:
                raise InvalidArgument(f"now is {time}; it must be at least {self.clock.now}, the time told before")
            self.clock.now = time
            if self.retention is not None:
                self.retention.advance(time)
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
