"""Data parallelism: one cache per rank, and the choice of the rank for each prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from blockyard import KVCacheManager
from blockyard.answers import Admission, CacheStats, HintOutcome, Holding, TenantUse
from blockyard.argument_types import ExtraKeys, Integer, Integers
from blockyard.arguments import require_int, require_number, shown
from blockyard.errors import InvalidArgument, NeverFits, OutOfBlocks, UnknownSequence

from .multi_pool import require_idle

MAX_CACHES = 4096


class Placement(NamedTuple):
    """Where a prompt was admitted: the rank, the sequence in that rank's cache, and the tokens that hit there."""

    rank: int
    seq: int
    num_hit_tokens: int


class CacheGroup:
    """The caches of data parallel ranks. Each rank makes its steps with its own cache.

    A prompt goes to the rank with the lowest cost, in blocks:

        cost = blocks of the prompt that the rank lacks + load_weight * blocks that its requests hold

    This is Dynamo's rule (`prompt_blocks - overlap + active blocks`, ai-dynamo 1.x, kv-router). A hit attracts requests
    until the load outweighs it, so equal prompts gather but no rank gets all of them. Ties go to the rank with the
    fewest sequences, then round-robin. Ranks without room are skipped.

    Args:
        caches: one per rank.
        load_weight: weight of the load; 0 considers only hits.

    Raises:
        InvalidArgument: a value is outside its limits.

    >>> from blockyard import CacheConfig
    >>> group = CacheGroup([KVCacheManager(CacheConfig(num_blocks=50, block_size=4)) for _ in range(2)])
    >>> group.allocate([1, 2, 3, 4, 5]).rank, group.allocate([6, 7, 8, 9, 10]).rank
    (0, 1)
    >>> group.allocate([6, 7, 8, 9, 11])[::2]
    (1, 4)
    """

    def __init__(self, caches: Sequence[KVCacheManager], load_weight: float = 1.0) -> None:
        if not isinstance(caches, (list, tuple)) or not 1 <= len(caches) <= MAX_CACHES:
            raise InvalidArgument(f"caches is {shown(caches)}; it must be a list of 1 to {MAX_CACHES} KVCacheManagers")
        for rank, cache in enumerate(caches):
            if not isinstance(cache, KVCacheManager):
                raise InvalidArgument(f"caches[{rank}] is {shown(cache)}; it must be a KVCacheManager")
            if any(cache is other for other in caches[:rank]):
                raise InvalidArgument(f"caches[{rank}] is in the list twice; give each rank its own cache")
        self.caches = tuple(caches)
        self.load_weight = require_number("load_weight", load_weight)
        if self.load_weight < 0:
            raise InvalidArgument(f"load_weight is {load_weight}; it must be 0 or more")
        self._next_rank = 0

    # Admission.

    def costs(self, token_ids: object, *, extra_keys: object = ()) -> list[float]:
        """Return the cost of a prompt on each rank, in blocks. Changes nothing. O(tokens * ranks)."""
        costs = []
        for cache in self.caches:
            missing = len(token_ids) - cache.num_cached_tokens(token_ids, extra_keys=extra_keys)  # type: ignore[arg-type]
            costs.append(missing / cache.block_size + self.load_weight * cache.num_used_blocks)
        return costs

    def try_allocate(
        self,
        token_ids: Integers,
        *,
        holder: str = "",
        extra_keys: ExtraKeys = (),
        num_seqs: Integer = 1,
        resumed: bool = False,
        session: str | None = None,
    ) -> Placement | Admission:
        """Admit a prompt on the cheapest rank that has room. O(tokens * ranks).

        Takes the arguments of `KVCacheManager.allocate` and raises as `KVCacheManager.try_allocate`. Returns the
        placement, or LATER, or NEVER if no rank could ever take the prompt; nothing has changed then.
        """
        options: dict[str, Any] = {
            "holder": holder,
            "extra_keys": extra_keys,
            "num_seqs": num_seqs,
            "resumed": resumed,
            "session": session,
        }
        answer = Admission.NEVER
        for rank in self._by_cost(token_ids, extra_keys):
            placed = self._try_rank(rank, token_ids, options)
            if isinstance(placed, Placement):
                return placed
            if placed is Admission.LATER:
                answer = Admission.LATER
        return answer

    def _try_rank(self, rank: int, token_ids: Integers, options: dict[str, Any]) -> Placement | Admission:
        cache = self.caches[rank]
        seq: int | Admission = Admission.LATER
        try:
            seq = cache.try_allocate(token_ids, **options)
            if isinstance(seq, Admission):
                return seq
            self._next_rank = (rank + 1) % len(self.caches)
            return Placement(rank, seq, int(cache.num_computed_tokens(seq)))
        except BaseException:
            if not isinstance(seq, Admission):
                cache.free(seq)
            raise

    def allocate(
        self,
        token_ids: Integers,
        *,
        holder: str = "",
        extra_keys: ExtraKeys = (),
        num_seqs: Integer = 1,
        resumed: bool = False,
        session: str | None = None,
    ) -> Placement:
        """Admit a prompt on the best rank that has room, or raise. O(tokens * ranks).

        The arguments are those of `KVCacheManager.allocate`. Raises `OutOfBlocks` if no rank has enough free blocks
        or request slots now, `NeverFits` if no rank could ever take the prompt.
        """
        answer = self.try_allocate(
            token_ids, holder=holder, extra_keys=extra_keys, num_seqs=num_seqs, resumed=resumed, session=session
        )
        if answer is Admission.NEVER:
            raise NeverFits(
                f"a prompt of {len(token_ids)} tokens does not fit the empty cache of any of {len(self.caches)} ranks"  # type: ignore[arg-type]
            )
        if isinstance(answer, Admission):
            raise OutOfBlocks(
                f"none of {len(self.caches)} ranks has room; {self.num_free_blocks} blocks are free in total"
            )
        return answer

    def _by_cost(self, token_ids: object, extra_keys: object) -> list[int]:
        count, caches = len(self.caches), self.caches
        costs = self.costs(_sized(token_ids), extra_keys=extra_keys)
        in_turn = [(self._next_rank + number) % count for number in range(count)]
        return sorted(in_turn, key=lambda rank: (costs[rank], caches[rank].num_seqs))

    # Sequences.

    def rank_of(self, seq: int) -> int:
        """Return the rank of a running sequence; handles are unique across ranks. O(ranks).

        Raises `UnknownSequence`.
        """
        for rank, cache in enumerate(self.caches):
            try:
                cache.num_tokens(require_int("seq", seq, 0, 2**63 - 1))
            except UnknownSequence:
                continue
            return rank
        raise UnknownSequence(f"sequence {seq} does not run on any of {len(self.caches)} ranks")

    def free(self, seqs: int | Iterable[int]) -> None:
        """Free sequences of any ranks and their blocks. O(blocks + sequences * ranks).

        Raises `UnknownSequence` if a sequence runs nowhere or is named twice; then none is freed.
        """
        handles = list(seqs) if isinstance(seqs, Iterable) else [seqs]
        if len(set(handles)) < len(handles):
            raise UnknownSequence(f"seqs is {shown(handles)}; a sequence is named twice")
        by_rank: dict[int, list[int]] = {}
        for seq in handles:
            by_rank.setdefault(self.rank_of(seq), []).append(seq)
        for rank, own in by_rank.items():
            self.caches[rank].free(own)

    # All together.

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of all caches."""
        return sum(cache.num_free_blocks for cache in self.caches)

    @property
    def num_used_blocks(self) -> int:
        """Blocks held in all caches."""
        return sum(cache.num_used_blocks for cache in self.caches)

    @property
    def num_seqs(self) -> int:
        """Running sequences of all caches."""
        return sum(cache.num_seqs for cache in self.caches)

    def stats(self) -> CacheStats:
        """Return the counters of all caches, added up.

        `peak_used_blocks` is the sum of the peaks, each at its own time. Tenants with the same name are added up too,
        with their guarantees and limits; the weight is that of the first cache.
        """
        each = [cache.stats() for cache in self.caches]
        names = [field.name for field in dataclasses.fields(CacheStats) if field.name != "tenants"]
        tenants: dict[str, TenantUse] = {}
        for use in (use for stats in each for use in stats.tenants):
            tenants[use.name] = add_tenant_uses(tenants[use.name], use) if use.name in tenants else use
        sums = {name: sum(getattr(stats, name) for stats in each) for name in names}
        return CacheStats(**sums, tenants=tuple(tenants.values()))

    def leak_report(self) -> list[tuple[int, Holding]]:
        """Return all holders of blocks, with their ranks. O(held blocks)."""
        return [(rank, holding) for rank, cache in enumerate(self.caches) for holding in cache.leak_report()]

    def reset_prefix_cache(self) -> None:
        """Reset every cache, after new weights. Raises `ConcurrentCall`, and resets none, while a call runs."""
        self._require_idle()
        for cache in self.caches:
            cache.reset_prefix_cache()

    def hint(self, target: int | str, *, over: bool = False) -> HintOutcome:
        """Signal that a session is over, to all caches that know it, or to a sequence's cache.

        Returns the best outcome of all ranks. Raises as `KVCacheManager.hint`.
        """
        self._require_idle()
        caches = self.caches if isinstance(target, str) else (self.caches[self.rank_of(target)],)
        found = {cache.hint(target, over=over) for cache in caches}
        return next(outcome for outcome in HintOutcome if outcome in found)

    def advance_time(self, now: float) -> None:
        """Set the time of every cache. Raises `InvalidArgument` for a time before that of one of them."""
        self._require_idle()
        for cache in self.caches:
            cache.advance_time(now)

    def _require_idle(self) -> None:
        for cache in self.caches:
            require_idle(cache.pool)

    def check(self) -> None:
        """Verify every invariant of every cache. Raises `InvariantError`."""
        for cache in self.caches:
            cache.check()


def add_tenant_uses(use: TenantUse, more: TenantUse) -> TenantUse:
    """Return the sum of a tenant's use and limits in two caches; no limit in one of them means no limit."""
    sums: dict[str, int | None] = {}
    for field in dataclasses.fields(TenantUse):
        ours, theirs = getattr(use, field.name), getattr(more, field.name)
        if field.name not in ("name", "group", "weight"):
            sums[field.name] = None if ours is None or theirs is None else ours + theirs
    return dataclasses.replace(use, **sums)  # type: ignore[arg-type]


def _sized(token_ids: object) -> object:
    """Return `token_ids` if they have a length: they are read once for each rank."""
    try:
        len(token_ids)  # type: ignore[arg-type]
    except Exception:
        raise InvalidArgument(f"token_ids is {shown(token_ids)}; it must be a list or array of integers") from None
    return token_ids
