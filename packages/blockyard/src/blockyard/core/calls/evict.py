"""Calls on the whole pool: eviction policy, retention, the clock, reset and resize."""

from mypy_extensions import i64

from ...answers import Resize
from ..blocks.eviction import EvictionOrder, resolve_policy
from ..index.prompt import Prompt
from ..parts import Parts
from .admission import AdmissionControl


class EvictCalls:
    """Eviction policy, retention, time and reset of the pool that holds keys and values."""

    def __init__(self, parts: Parts) -> None:
        self.token_blocks = parts.token_blocks
        self.sequences = parts.sequences
        self.store = parts.store
        self.order = EvictionOrder(
            parts.kv_pool,
            parts.gate.interruption,
            parts.clock,
            parts.config.hints.retention_blocks,
            None if parts.states is None else parts.states.registry,
        )
        self.order.install(resolve_policy(parts.config.eviction_policy, parts.kv_pool))

    def retain(self, prompt: Prompt, level: int, until: float | None) -> int:
        """Set the priority of the cached blocks of a prompt's prefix. Return their number."""
        return self.order.retain(self._cached_blocks(prompt), level, until)

    def num_retained_of(self, prompt: Prompt) -> int:
        """Return how many cached blocks of a prompt's prefix are retained now."""
        return self.order.num_retained_of(self._cached_blocks(prompt))

    def _cached_blocks(self, prompt: Prompt) -> list[int]:
        """Return the blocks of all layer groups that hold the longest cached prefix of a prompt."""
        found = self.token_blocks.index.find_prompt(prompt, prompt.num_tokens // i64(self.token_blocks.block_size))
        blocks: list[int] = []
        for position in range(i64(len(found))):
            blocks += self.store.cached_for(i64(found[position]))
        return blocks

    def reset_prefix_cache(self) -> None:
        """Remove all blocks from the index, so that none can be hit."""
        self.sequences.version += 1
        self.store.reset()


class ResizeCalls:
    """Changes the size of the pool. All arrays are allocated before the first change, in case memory is short."""

    def __init__(self, parts: Parts, admission: AdmissionControl) -> None:
        self.parts = parts
        self.admission = admission

    def resize(self, size: int) -> Resize:
        """Change the size of the pool to `size` blocks."""
        parts = self.parts
        parts.config.require_guarantees(size)
        token_blocks = None if parts.grouped is None else parts.grouped.make_room(size)
        room = parts.kv_pool.make_room(size)  # last: the policy's own room is in place then
        watermark = i64(int(parts.config.watermark * size))
        parts.kv_pool.act("resize")
        parts.sequences.version += 1
        if token_blocks is not None:
            parts.token_blocks.resize(token_blocks.num_blocks, token_blocks)
        answer = parts.kv_pool.resize(size, room)
        self.admission.watermark = watermark
        return answer
