"""Values that the manager and the pools return: statuses, statistics and events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar


class Admission(Enum):
    """Outcome of the admission of a prompt (vLLM's AllocStatus). Only OK is truthy."""

    #: It fits now.
    OK = "ok"
    #: It fits after running sequences or leases free blocks or a row.
    LATER = "later"
    #: It does not fit even in an empty pool: it is longer than max_model_len, or needs more than the pool minus its
    #: watermark.
    NEVER = "never"

    def __bool__(self) -> bool:
        return self is Admission.OK


class SeqStatus(IntEnum):
    """Outcome of one sequence's reservation."""

    #: The sequence got its slots.
    SCHEDULED = 0
    #: There are not enough free blocks, and nothing changed for the sequence. Preempt another one, or try again later.
    #: If a sequence with a sliding window is the only one running, reserve a shorter chunk.
    NO_BLOCKS = 1
    #: The sequence hit blocks that another one is still computing, and that one has no slots in this step. Try again in
    #: the next step.
    WAITS_FOR_PREFIX = 2


class BlockState(IntEnum):
    """State of a block, as returned by `pool.states()`. The README's "A block's life" shows the transitions."""

    #: Not held and not cached.
    FREE = 0
    #: Held and not cached: its holder writes into it.
    PRIVATE = 1
    #: Held (ref_cnt 1 or more) and cached: any prompt can hit it.
    SHARED = 2
    #: Cached and not held: a hit takes it again, an allocation evicts it.
    IDLE = 3
    #: Held and indexed, but not computed yet. An equal prompt shares it.
    PENDING = 4
    #: Held, but beyond the end of a pool that shrank. Removed when it is freed.
    RETIRING = 5
    #: Not a block of the pool: beyond the end of a pool that shrank, or the null block.
    GONE = 6
    #: Released and not cached, but kept until the steps in flight that may use it have ended (deferred free).
    FENCED = 7


@dataclass(frozen=True, slots=True)
class TenantUse:
    """A tenant's blocks and limits (docs/tenants.md).

    Attributes:
        name: name of the tenant.
        group: name of its group; "" without one.
        num_held: blocks that its sequences and leases hold.
        num_idle: its cached blocks that nothing holds.
        num_retained: blocks of both kinds that `retain` protects.
        min_blocks: its guarantee.
        max_held: limit of `num_held`; None for no limit.
        max_idle: limit of `num_idle`; None for no limit.
        max_retained: limit of `num_retained`; None for no limit.
        weight: its weight.
        share: its guarantee, and by weight a part of the blocks that no guarantee covers. Blocks above it are borrowed,
            and reclaimed first.
        num_evicted_blocks: its cached blocks evicted so far, by any tenant's allocations.
    """

    name: str
    group: str
    num_held: int
    num_idle: int
    num_retained: int
    min_blocks: int
    max_held: int | None
    max_idle: int | None
    max_retained: int | None
    weight: int
    share: int
    num_evicted_blocks: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the manager was created, and gauges of its current state.

    Attributes:
        num_prompt_tokens: tokens of all prompts that have begun to compute. A prompt is counted at the first `commit`
            that computes some of it (or at its `fork` or `truncate`), and not at all if it is freed before.
        num_hit_tokens: those of them that were cached at that moment.
        num_evicted_blocks: cached blocks taken by allocations or removed by a shrinking pool.
        num_copied_blocks: blocks copied on write.
        peak_used_blocks: most blocks held at once.
        num_free_blocks: free blocks now, idle ones included. Free and used blocks add up to the pool without the null
            block.
        num_used_blocks: held blocks now.
        num_cached_blocks: cached blocks now.
        num_running_seqs: rows in use now.
        num_wasted_slots: slots that running sequences hold without a token (internal fragmentation), now.
        num_resumed_tokens: like `num_prompt_tokens`, for preempted requests that came back (`allocate(resumed=True)`),
            which would inflate the hit rate.
        num_resumed_hit_tokens: like `num_hit_tokens`, for these.
        num_allocated_blocks: blocks that left the free queue, new or cached.
        num_freed_blocks: blocks that returned to it. The difference is the number of blocks in use.
        num_retained_blocks: blocks that `retain` protects, held or idle, now.
        num_sessions: known sessions (`allocate(session=...)`, `hint`), now.
        num_hinted_evictions: blocks evicted because of a hint.
        num_saved_states: states that plans asked to save.
        num_kept_states: those of them that could be hit once saved.
        num_replaced_states: those of them that the same output's next state replaced.
        num_refused_states: states not saved because they would have been evicted first.
        tenants: one entry per tenant, "*" first; () without tenants.
        num_bytes: bytes of the pool's blocks; 0 if unknown.
        block_bytes: bytes of a block (`CacheConfig.block_bytes`); 0 if unknown.
        num_padding_bytes: bytes in blocks of running sequences that cannot be filled because another group's tokens are
            larger, now. A shared block counts once per sequence.
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
    num_resumed_tokens: int = 0
    num_resumed_hit_tokens: int = 0
    num_allocated_blocks: int = 0
    num_freed_blocks: int = 0
    num_retained_blocks: int = 0
    num_sessions: int = 0
    num_hinted_evictions: int = 0
    num_saved_states: int = 0
    num_kept_states: int = 0
    num_replaced_states: int = 0
    num_refused_states: int = 0
    tenants: tuple[TenantUse, ...] = ()
    num_bytes: int = 0
    block_bytes: int = 0
    num_padding_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the fraction of the prompt tokens that were cached, 0 to 1."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class RetentionEnds:
    """Blocks whose retention (`retain`) ended, by cause.

    Attributes:
        num_evicted: evicted for running requests because nothing else was idle.
        num_expired: the time of the retention ran out.
        num_released: the retention was withdrawn, with priority 0.
        num_dropped: the content was removed by a reset, a shrinking pool, `evict` or a change of the eviction policy.
    """

    CAUSES: ClassVar[tuple[str, ...]] = ("evicted", "expired", "released", "dropped")

    num_evicted: int
    num_expired: int
    num_released: int
    num_dropped: int


class HintOutcome(Enum):
    """Outcome of a hint. Only ACCEPTED is truthy."""

    #: The hint applies until the session continues or gets another hint.
    ACCEPTED = "accepted"
    #: Nothing changed: the policy takes no hints, sessions are off, or a newer sequence of the session has begun.
    REFUSED = "refused"
    #: The session is unknown, or was forgotten.
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        return self is HintOutcome.ACCEPTED


class Resize(Enum):
    """Outcome of resizing a pool. Only APPLIED is truthy."""

    #: The pool has its new size.
    APPLIED = "applied"
    #: Some blocks beyond the new end are still held. Each is removed when it is freed.
    DEFERRED = "deferred"

    def __bool__(self) -> bool:
        return self is Resize.APPLIED


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """An entry of a pool's allocation history.

    Attributes:
        number: serial number, from 0.
        time: time last passed to `advance_time`.
        action: "take", "share", "release" or "evict", or "retention evicted" and so on (`RetentionEnds`).
        actor: the call, and the holder it was for.
        block_ids: the blocks, in order.
        num_free: free blocks after it.
    """

    number: int
    time: float
    action: str
    actor: str
    block_ids: list[int]
    num_free: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram of durations: counts[i] of them were above bounds[i - 1] and at most bounds[i].

    The last count is of durations above all bounds. `total` is the sum of all durations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_samples(self) -> int:
        """Return the number of durations."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Return the mean duration; 0 if there are none."""
        return self.total / self.num_samples if self.num_samples else 0.0


@dataclass(frozen=True, slots=True)
class Residency:
    """Block residency times, sampled from every `sample`-th block id, in the units of `advance_time`.

    Attributes:
        sample: distance of the sampled block ids.
        lifetime: time from allocation to eviction.
        idle_before_evict: time from the last use to eviction.
        reuse_gap: time between two uses.
    """

    sample: int
    lifetime: Histogram
    idle_before_evict: Histogram
    reuse_gap: Histogram


@dataclass(frozen=True, slots=True)
class MissCauses:
    """Tokens of one prompt, or of all prompts that have begun to compute, by hit or cause of the miss.

    Attributes:
        num_hit: tokens taken from the cache.
        num_tail: tokens after the last block that can be hit, including the last token. All tokens of a prompt shorter
            than a block.
        num_never_seen: tokens in blocks that were never cached under these keys, or too long ago to be remembered.
        num_evicted: tokens in blocks that were cached and evicted.
        num_other_keys: tokens of prompts whose first block is cached only under another salt, adapter or generation.
        num_recomputed: tokens of preempted requests (`resumed=True`), whatever the cause. Their hits are not counted in
            totals.
        evicted_ago: number of evictions since the most recent eviction of one of these blocks; 0 if that was the last
            one, -1 if none was evicted or it is forgotten, and in totals.
        num_no_state: tokens whose keys and values are cached, after the last cached state (docs/states.md).
    """

    num_hit: int
    num_tail: int
    num_never_seen: int
    num_evicted: int
    num_other_keys: int
    num_recomputed: int
    evicted_ago: int
    num_no_state: int = 0

    FIELDS: ClassVar[tuple[str, ...]] = (
        "num_hit",
        "num_tail",
        "num_never_seen",
        "num_evicted",
        "num_other_keys",
        "num_recomputed",
        "evicted_ago",
        "num_no_state",
    )

    @property
    def missed(self) -> dict[str, int]:
        """Return the missed tokens by cause: "tail", "never_seen", "evicted", ..."""
        names = [name for name in self.FIELDS[1:] if name.startswith("num_")]
        return {name.removeprefix("num_"): getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Holding:
    """A line of the leak report: one holder and the blocks that it has not freed.

    Attributes:
        kind: "sequence", "swapped sequence", "lease", or "steps in flight" for blocks that wait for `end_step`.
        handle: the sequence's handle, the lease's serial, or the oldest step in flight.
        holder: its name.
        num_tokens: tokens of a sequence.
        block_ids: its blocks, layer group by layer group; then blocks whose beginning its first step copies.
        cpu_block_ids: its blocks in the CPU pool.
    """

    kind: str
    handle: int
    holder: str
    num_tokens: int
    block_ids: list[int]
    cpu_block_ids: list[int]


@dataclass(frozen=True, slots=True)
class NameEvent:
    """A name was stored in or removed from a `NamedPool`, or all names were cleared.

    Attributes:
        kind: "stored" (`block_id` now holds the name), "removed", or "cleared" (all names; the other fields are empty).
        name: the name.
        group: its layer group.
        block_id: the block.
    """

    kind: str
    name: bytes
    group: int
    block_id: int
