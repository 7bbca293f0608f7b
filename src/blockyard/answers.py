"""What the manager answers with: admission, the fate of a reservation, and its counters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Admission(Enum):
    """Whether a prompt can be allocated (vLLM's AllocStatus)."""

    #: Now.
    OK = "ok"
    #: Once running sequences have given back blocks or a row.
    LATER = "later"
    #: Not even by an empty cache.
    NEVER = "never"


class SeqStatus(IntEnum):
    """What became of one sequence's reservation."""

    #: It has its slots.
    SCHEDULED = 0
    #: Not enough free blocks; nothing changed for it. Preempt a sequence, or try again later.
    NO_BLOCKS = 1
    #: Blocks it hit are still being computed by another sequence that has no slots in this step. Skip a step.
    WAITS_FOR_PREFIX = 2


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the manager was made, and its state now.

    num_prompt_tokens: tokens of all allocated prompts.
    num_hit_tokens: those of them taken from the cache.
    num_evicted_blocks: cached blocks that an allocation took.
    num_copied_blocks: blocks copied on write.
    peak_used_blocks: most blocks held at once.
    num_free_blocks, num_used_blocks, num_cached_blocks: now; free + used is the pool without the null block.
    num_running_seqs: rows in use now.
    num_wasted_slots: slots that running sequences hold and no known token fills, now (internal fragmentation).
    """

    num_prompt_tokens: int
    num_hit_tokens: int
    num_evicted_blocks: int
    num_copied_blocks: int
    peak_used_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_running_seqs: int
    num_wasted_slots: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens taken from the cache, 0 to 1."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0
