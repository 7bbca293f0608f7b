"""The pool as a whole: its eviction policy, retention, the clock that ends it, forgetting everything, and its size."""

from mypy_extensions import i64

from ...answers import Resize
from ..blocks.eviction import EvictionOrder, wished_policy
from ..index.prompt import Prompt
from ..parts import Parts
from .admission import AdmissionControl


class EvictCalls:
    """The wishes of the caller, for the pool that holds keys and values."""

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
        self.order.install(wished_policy(parts.config.eviction_policy, parts.kv_pool))

    def retain(self, prompt: Prompt, level: int, until: float | None) -> int:
        """Give the cached blocks that a prompt begins with this priority. Returns how many they are."""
        return self.order.retain(self._cached_blocks(prompt), level, until)

    def num_retained_of(self, prompt: Prompt) -> int:
        """Return how many of the cached blocks that a prompt begins with are retained now."""
        return self.order.num_retained_of(self._cached_blocks(prompt))

    def _cached_blocks(self, prompt: Prompt) -> list[int]:
        """Return the blocks of the pool that hold the longest cached beginning of a prompt, all layer groups'."""
        found = self.token_blocks.index.find_prompt(prompt, prompt.num_tokens // i64(self.token_blocks.block_size))
        blocks: list[int] = []
        for position in range(i64(len(found))):
            blocks += self.store.cached_for(i64(found[position]))
        return blocks

    def reset_prefix_cache(self) -> None:
        """Let no cached block hit any more."""
        self.sequences.version += 1
        self.store.reset()


class ResizeCalls:
    """All arrays are made first and then put in place, so that a lack of memory changes nothing."""

    def __init__(self, parts: Parts, admission: AdmissionControl) -> None:
        self.parts = parts
        self.admission = admission

    def resize(self, size: int) -> Resize:
        """Let the pool have `size` blocks."""
        parts = self.parts
        parts.config.require_floors(size)
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
