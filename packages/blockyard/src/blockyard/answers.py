"""The manager answers with these: admission, the fate of a reservation, and its counters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar


class Admission(Enum):
    """Whether a prompt can be allocated (vLLM's AllocStatus). Only OK is truthy.

    OK: now. LATER: after running sequences or leases have freed blocks or a row. NEVER: not even in an empty pool,
    because it is longer than max_model_len or takes more than the pool minus its watermark.
    """

    #: Now.
    OK = "ok"
    #: After running sequences or leases have freed blocks or a row.
    LATER = "later"
    #: Not even in an empty pool.
    NEVER = "never"

    def __bool__(self) -> bool:
        """Is True for OK alone, so that `if cache.can_allocate(prompt):` asks what it says."""
        return self is Admission.OK


class SeqStatus(IntEnum):
    """It says what became of one sequence's reservation.

    SCHEDULED: it has its slots. NO_BLOCKS: not enough free blocks; nothing changed for it: preempt a sequence, or try
    again later. WAITS_FOR_PREFIX: blocks that it hit are still being computed by another sequence without slots in this
    step: skip a step.
    """

    #: It has its slots.
    SCHEDULED = 0
    #: Not enough free blocks; nothing changed for it. Preempt a sequence, or try again later. A sequence with a sliding
    #: window that runs alone needs a shorter chunk instead.
    NO_BLOCKS = 1
    #: Blocks it hit are still being computed by another sequence that has no slots in this step. Skip a step.
    WAITS_FOR_PREFIX = 2


class BlockState(IntEnum):
    """It is what `pool.states()` says of each id. README's "A block's life" draws how one becomes another."""

    #: Held by none, and nothing can hit it.
    FREE = 0
    #: Held, and not cached: its holder writes into it.
    PRIVATE = 1
    #: Held (ref_cnt 1 or more) and cached: any prompt can hit it.
    SHARED = 2
    #: Cached, and held by none: a hit revives it, an allocation evicts it.
    IDLE = 3
    #: Held and in the index, and still to be computed by a sequence; an equal prompt joins it.
    PENDING = 4
    #: Held beyond the end of a pool that shrank; gone when it is freed.
    RETIRING = 5
    #: Not one of the pool's blocks: an id beyond the end of a pool that shrank, or the null block.
    GONE = 6
    #: Released and not cached, and kept until a step in flight has ended that may use it.
    FENCED = 7


@dataclass(frozen=True, slots=True)
class TenantUse:
    """It says what a tenant has of the pool now, and what it may have, in blocks (docs/tenants.md).

    name, group: its own, and its group's; "" for a tenant in none. num_held: blocks that its sequences and leases hold.
    num_idle: cached blocks of its that nothing holds. num_retained: of both, those that `retain` keeps.
    min_blocks, max_held, max_idle, max_retained: its floor and limits; None for no limit. weight: its own.
    share: its floor, and its part by weight of what all floors leave: what is above is lent, and comes back first.
    num_evicted_blocks: cached blocks that it lost to allocations, its own included, so far.
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
    """Counters since the manager was made, and its state now.

    num_prompt_tokens: tokens of all prompts that have begun to compute. A prompt counts once, at the first `commit`
        that computes some of it (or at its `fork` or `truncate`); one that is freed before that does not count.
    num_hit_tokens: those of them that the cache had at that moment.
    num_resumed_tokens, num_resumed_hit_tokens: the same for requests that ran before (`allocate(resumed=True)`), which
        would make the hit rate look better than it is.
    num_evicted_blocks: cached blocks that an allocation took, or a shrinking pool gave up.
    num_allocated_blocks, num_freed_blocks: blocks that left the free queue, new or revived, and that came back to it;
        their difference is what is in use.
    num_copied_blocks: blocks copied on write.
    peak_used_blocks: most blocks held at once.
    num_free_blocks, num_used_blocks, num_cached_blocks: now; free + used is the pool without the null block.
    num_running_seqs: rows in use now.
    num_wasted_slots: slots that running sequences hold and no known token fills, now (internal fragmentation).
    num_retained_blocks: blocks that a wish keeps (`retain`), held or idle, now.
    num_sessions: sessions that are known (`allocate(session=...)`, `hint`), now.
    num_hinted_evictions: evicted blocks that were chosen because of a hint.
    num_saved_states: states that plans said to save; num_kept_states: of them, those that could be hit then.
    num_replaced_states: of these, those of an output that went when the next one of it was there.
    num_refused_states: states that were wanted and not saved, because they would have been the first to go.
    tenants: of a cache that tenants share, what each has, "*" first; () of others.
    num_bytes: bytes of the pool's blocks, block_bytes: of one of them (`CacheConfig.block_bytes`); 0 if not known.
    num_padding_bytes: bytes in the blocks of running sequences that nothing can fill, because a token of another group
        takes more, now; `CacheConfig.padding_bytes` in each block, which counts for each sequence that holds it.
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
        """Return the share of the prompt tokens taken from the cache, 0 to 1."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class RetentionEnds:
    """It counts the blocks whose retention (`retain`) has ended so far, by cause.

    num_evicted: running requests took them, as nothing else was idle. num_expired: their time was over. num_released:
    the wish was taken back, with priority 0. num_dropped: what they cached was lost otherwise: by a reset, a pool that
    shrank, `evict` or another eviction policy.
    """

    CAUSES: ClassVar[tuple[str, ...]] = ("evicted", "expired", "released", "dropped")

    num_evicted: int
    num_expired: int
    num_released: int
    num_dropped: int


class HintOutcome(Enum):
    """What became of a hint. Only ACCEPTED is truthy."""

    #: It holds until the session goes on, or another hint.
    ACCEPTED = "accepted"
    #: Nothing has changed: the policy takes no hints, the cache knows no sessions, or a newer sequence of the session
    #: has begun.
    REFUSED = "refused"
    #: No such session, or it was forgotten.
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        return self is HintOutcome.ACCEPTED


class Resize(Enum):
    """It says what became of a change of the pool's size. True in an `if` for APPLIED alone.

    APPLIED: done. DEFERRED: some blocks beyond the new end are still held; each goes when it is freed.
    """

    #: Done.
    APPLIED = "applied"
    #: Some blocks beyond the new end are still held; each goes when it is freed.
    DEFERRED = "deferred"

    def __bool__(self) -> bool:
        """Is True for APPLIED alone."""
        return self is Resize.APPLIED


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """It is one thing that happened to blocks of a pool.

    number: counts the events from 0. time: as last told to `advance_time`. action: "take", "share", "release" or
    "evict", or "retention evicted" and the like where a wish ended (`RetentionEnds`). actor: the call and the holder it
    was for. block_ids: the blocks, in order. num_free: free blocks after it.
    """

    number: int
    time: float
    action: str
    actor: str
    block_ids: list[int]
    num_free: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts[i] durations were at most bounds[i] and above the bound before; the last count is above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_samples(self) -> int:
        """Return how many durations were counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean; 0 for none."""
        return self.total / self.num_samples if self.num_samples else 0.0


@dataclass(frozen=True, slots=True)
class Residency:
    """It says how long blocks stay, from every `sample`-th block id, in the units of `advance_time`.

    lifetime: from being taken to being evicted. idle_before_evict: from the last use to it. reuse_gap: between uses.
    """

    sample: int
    lifetime: Histogram
    idle_before_evict: Histogram
    reuse_gap: Histogram


@dataclass(frozen=True, slots=True)
class MissCauses:
    """Tokens of a prompt, or of all prompts that have begun to compute, by what became of them.

    num_hit: taken from the cache. num_tail: behind the last block that can hit, the last token included: a prompt
    shorter than a block is all tail. num_never_seen: in blocks that were never cached under these keys, or so long ago
    that it is forgotten. num_evicted: in blocks that were cached and evicted. num_other_keys: of a prompt whose first
    block is not cached under its own keys, but was under another salt, adapter or generation.
    num_no_state: in blocks whose keys and values are all there, behind the last state that is (docs/states.md).
    num_recomputed: of a request that was preempted (`resumed=True`), whatever the cause; its hits are not counted as
    hits in the totals, and so not at all.
    evicted_ago: evictions since the youngest of the evicted blocks went, 0 for the latest of all; -1 where none was
    evicted, where that is forgotten, and in totals.
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
        """Return the tokens that were not hit, by the name of the cause: "tail", "never_seen", "evicted", ..."""
        names = [name for name in self.FIELDS[1:] if name.startswith("num_")]
        return {name.removeprefix("num_"): getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Holding:
    """It says what one holder has not freed: a line of the leak report.

    kind: "sequence", "swapped sequence", "lease" or "steps in flight", for blocks that wait for `end_step`. handle: the
    sequence's handle, the lease's serial, or the oldest step in flight.
    holder: the name it was given. block_ids, cpu_block_ids: the blocks, in order, each layer group after another; last,
    those that its first step will copy the beginning of.
    """

    kind: str
    handle: int
    holder: str
    num_tokens: int
    block_ids: list[int]
    cpu_block_ids: list[int]


@dataclass(frozen=True, slots=True)
class NameEvent:
    """It is one thing that happened to a name in a `NamedPool`.

    kind: "stored" (block `block_id` has it now), "removed" (it has it no longer), or "cleared": all names are gone;
        name is b"", group and block_id are 0 then.
    """

    kind: str
    name: bytes
    group: int
    block_id: int
