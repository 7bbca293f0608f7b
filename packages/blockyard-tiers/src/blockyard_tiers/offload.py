"""Stores computed blocks of a manager's KV storage in tiers, and loads prefixes of prompts from them.

The pool holds nothing for a load: objects are read into host buffers of the offload and verified there. When the
request is admitted, its blocks are reserved, written from the buffers, and committed as computed, like a prompt that is
handed over from another engine. If a load fails, is late or is no longer wanted, only its buffers are in use, until the
tier releases them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from os import PathLike
from time import monotonic, sleep
from typing import Any, Concatenate, ParamSpec, TypeVar

from blockyard import KVCacheManager, StepPlan
from blockyard.arguments import require_int, require_number, shown
from blockyard.errors import InvalidArgument, InvariantError
from blockyard.keys import ExtraKey

from .context import Context
from .engine_memory import Blocks, States
from .finder import Finder
from .header import NameChain
from .loader import Loader
from .offload_arguments import require_arguments, require_key
from .saver import Saver
from .snapshot import Contents, Snapshot
from .tier import Cause, Tier, TransferResult
from .transfers import RequestRecord
from .uses import OffloadReading, TierReading, TierUse

#: Why prompt tokens that the pool did not have were computed instead of loaded.
MISS_CAUSES = ("absent", "not_worth", "late", "failed", "no_buffers", "no_state")

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


def _mended(call: Callable[Concatenate[Offload, _Given], _Answer]) -> Callable[Concatenate[Offload, _Given], _Answer]:
    """Mend rows and loads after a call that was interrupted or failed, before the next call at the latest."""

    @wraps(call)
    def run(offload: Offload, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Answer:
        if offload._context.is_torn:
            offload._mend()
        try:
            return call(offload, *args, **kwargs)
        except BaseException as error:
            offload._context.note_failure(error)
            offload._mend()
            raise

    return run


class Offload:
    """Stores computed blocks in tiers and loads prefixes from them. The engine never waits for a tier.

        while True:
            offload.poll()
            for each waiting request, in order:
                if offload.prepare(key, token_ids, extra_keys):   # it waits for a load: others overtake it
                    continue
                seq = cache.allocate(token_ids, extra_keys=extra_keys)
                offload.fill(key, seq)
            ...reserve, compute...
            offload.save(key, seq, token_ids, num_computed_after)  # for each sequence of the step, and its states
            cache.commit(...)
            offload.forget(key)                                    # for each request that has ended

    Not thread-safe.

    Args:
        cache: the manager.
        blocks: its KV storage (`KVBlocks`).
        tiers: the tiers, nearest first.
        model: fingerprint of weights and config as a dict of plain values, or a function that returns one. It is called
            again after `reset_prefix_cache`, which new weights require.
        step_tokens: most tokens that a step computes.
        on_plan: called with each `StepPlan` made here, to carry out its moves at once (`KVCache.move_blocks`,
            `StateSlots.move`). Required with a CPU pool, partial hits or states.
        clock: returns the time in seconds.
        states: states of a cache with states (`StateObjects`).

    Raises:
        InvalidArgument: two tiers have one name, layer groups differ in block size, `blocks` lacks a context shard,
            several steps may be in flight, or the buffers are too small for a state and a block.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        blocks: Blocks,
        tiers: Iterable[Tier | TierUse],
        model: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        step_tokens: int = 512,
        on_plan: Callable[[StepPlan], None] | None = None,
        clock: Callable[[], float] = monotonic,
        states: States | None = None,
    ) -> None:
        require_arguments(cache, blocks, tiers, model, on_plan, clock, states)
        step_tokens = require_int("step_tokens", step_tokens, 1, 2**31 - 1)
        config = cache.config
        self.cache = cache
        self.blocks = blocks
        self.uses = [use if isinstance(use, TierUse) else TierUse(use) for use in tiers]
        names = Counter(use.tier.name for use in self.uses)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise InvalidArgument(
                f"tiers has {twice!r} twice; names of tiers must differ, since metrics use them: pass each backend once"
            )
        #: Prompt tokens that were computed instead of loaded, by cause.
        self.missed_tokens: Counter[str] = Counter(dict.fromkeys(MISS_CAUSES, 0))
        make_model = model if callable(model) else lambda: model
        self._context = context = Context(cache, blocks, states, self.uses, make_model, clock)
        self._clock, self._block_size, self._records = clock, context.block_size, context.records
        half = max(blocks.num_rows // 2, 1)
        step = config.hit_alignment // context.block_size
        self._finder = Finder(self.uses, context.block_size, blocks.object_bytes, step_tokens, states, step)
        self._loader = Loader(context, list(range(half)), self._finder, on_plan, self.missed_tokens)
        self._saver = Saver(context, list(range(half, blocks.num_rows)))

    # What an engine calls.

    @_mended
    def poll(self) -> None:
        """Process the results of transfers that ended since the last call. O(transfers)."""
        self._loader.begin_poll()
        self._context.end_copies()
        doubtful, self._context.may_miss_results = self._context.may_miss_results, False
        try:
            for tier in {id(use.tier): use.tier for use in self.uses}.values():
                is_quiet = doubtful and tier.stats().num_waiting == 0
                for result in tier.take_results():
                    self._end(result)
                if is_quiet:
                    self._end_lost(tier)
                elif doubtful:
                    self._context.may_miss_results = True
        except BaseException:
            self._context.may_miss_results = True
            raise
        self._saver.poll()

    @_mended
    def prepare(
        self,
        key: Hashable,
        token_ids: Sequence[int],
        extra_keys: tuple[ExtraKey, ...] = (),
        *,
        may_load: bool = True,
        will_start: bool = False,
    ) -> bool:
        """Look up a waiting request's blocks and start loading them if that is faster than recomputing.

        Return True while the request should keep waiting: at most as long as computing takes. Call it before every
        `allocate`. A request that cannot start yet loads ahead only into free buffers, and gives them up to one that
        can. O(blocks not named yet) the first time, and O(blocks) during a lookup.

        Args:
            key: identifies the request until `forget`.
            token_ids: the request's tokens.
            extra_keys: the request's extra keys, as for `allocate`.
            may_load: False to search for nothing, and only register the request.
            will_start: whether the request starts now even if `can_allocate` refuses it: within a tenant's guarantee.
        """
        record = self._record(key, extra_keys)
        if record.is_settled:
            return False
        if not may_load:
            record.is_settled = True
            return False
        self._loader.prepare(key, record, token_ids, extra_keys, will_start)
        return record.is_waiting

    @_mended
    def fill(self, key: Hashable, seq: int) -> int:
        """Write a request's loaded blocks into its sequence, as computed tokens. O(bytes).

        Return the number of tokens. Call it right after `allocate`. If it raises, the sequence is still to be freed.
        """
        record = self._records.get(require_key("key", key))
        if record is None:
            return 0
        self.cache.num_tokens(require_int("seq", seq, 0, 2**63 - 1))  # raises before anything has changed
        record.is_settled = record.is_admitted = True
        if self._context.states is not None:
            hit, num_tokens = int(self.cache.num_computed_tokens(seq)), int(self.cache.num_tokens(seq))
            record.state_positions, record.prompt_end = ([hit] if hit else []), num_tokens - 1
        return self._loader.fill(seq, record)

    @_mended
    def save(
        self, key: Hashable, seq: int, token_ids: Sequence[int], num_computed: int, states: Sequence[int] = ()
    ) -> int:
        """Store the full blocks among the first `num_computed` tokens that tiers want and were not offered before.

        Call it after computing a step, before `commit`: then the sequence holds everything that the step wrote. Bytes
        are copied to buffers here; blocks without a free buffer are not stored. After a truncation (`cache.truncate`)
        blocks get new names, O(tokens), and nothing more is stored of a prompt with spans. O(bytes stored).

        Args:
            key: the request.
            seq: its sequence.
            token_ids: its tokens, at least `num_computed`.
            num_computed: tokens that are computed after the step.
            states: token counts at which the step saved states of the sequence. They are stored in a later call; of the
                output only the last one is, by `forget`.

        Returns:
            The number of block objects that are being stored.
        """
        num_computed = require_int("num_computed", num_computed, 0, 2**31 - 1)
        record = self._records.get(require_key("key", key))
        # Blocks computed before the cache was reset may be of other weights.
        if record is None or record.generation != self.cache.generation:
            return 0
        return self._saver.save(record, require_int("seq", seq, 0, 2**63 - 1), token_ids, num_computed, states)

    @_mended
    def fork(self, parent: Hashable, keys: Iterable[Hashable]) -> None:
        """Register requests that `cache.fork` split from a running one. O(blocks) each."""
        record = self._records.get(require_key("parent", parent))
        if not isinstance(keys, Iterable):
            raise InvalidArgument(f"keys is {shown(keys)}; it must be an iterable of request keys")
        if record is not None:
            for key in [require_key("keys", each) for each in keys]:
                self._records[key] = replace(record, chain=record.chain.copy(), load=None, state_positions=[])

    @_mended
    def forget(self, key: Hashable) -> None:
        """Remove a request that has ended or goes back to the queue. O(blocks of its load).

        Its remaining states are stored, O(bytes).
        """
        record = self._records.pop(require_key("key", key), None)
        if record is None:
            return
        if record.state_positions and record.generation == self.cache.generation:
            self._saver.store_states(record, record.take_state_positions() + record.state_positions)
        self._loader.leave(key, record)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step of `num_tokens`: loads are started only if they are faster than computing."""
        count, took = require_int("num_tokens", num_tokens, 0, 2**62), require_number("seconds", seconds)
        if count > 0 and took > 0.0:
            self._finder.computing.note(count, took, 0.0)

    @_mended
    def begin_snapshot(self, path: str | PathLike[str]) -> Snapshot:
        """Store the pool's cached blocks in the nearest writable tier, and list their prompts in a file.

        It continues in each `poll`, while requests run, until the snapshot's `is_done`. Prompts with spans are left
        out. Raises `InvalidArgument` if no tier is written, for layer groups, windows or a CPU pool, and while another
        snapshot is being taken.
        """
        use = next((use for use in self.uses if use.write != "never"), None)
        if use is None:
            raise InvalidArgument("all tiers have write=never; a snapshot needs one that is written")
        running = self._saver.snapshot
        if running is not None and not running.is_done:
            raise InvalidArgument(f"a snapshot at {str(running.path)!r} is still being taken; wait until it is done")
        snapshot = Snapshot(path, self.cache, self._context.layout())
        self._saver.begin_snapshot(snapshot, use)
        return snapshot

    def snapshot(self, path: str | PathLike[str], seconds: float = 60.0) -> Snapshot:
        """Take a snapshot as `begin_snapshot` does, and wait for it up to `seconds`. Check its `is_done`."""
        end = monotonic() + require_number("seconds", seconds)
        snapshot = self.begin_snapshot(path)
        while not snapshot.is_done and monotonic() < end:
            self.poll()
            sleep(0.0005)
        return snapshot

    @_mended
    def restore(self, path: str | PathLike[str], seconds: float = 60.0) -> int:
        """Load a snapshot into the pool, as much as fits into free blocks; return the tokens.

        Call it before the first request. The order of eviction is restored too. Blocks that the tiers no longer have
        are left out, as are those not loaded within `seconds`. Raises `InvalidArgument`, with the reason, if the file
        is missing or is of another model, layout or version; nothing was loaded then.
        """
        limit = require_number("seconds", seconds)
        contents = Contents.of(path, self._context.layout(), self._block_size)
        counted = self.missed_tokens.copy(), [use.num_hit_tokens for use in self.uses]
        end, most = monotonic() + limit, int(self.cache.config.max_model_len) - 1
        before, running = self.cache.num_cached_blocks, set(self.cache.running())
        try:
            for tokens, keys in contents.prompts(self.cache.num_free_blocks - before - 1, most):
                while self._restore([*tokens, 0], keys, end):
                    pass
        finally:
            self.cache.free([seq for seq in self.cache.running() if seq not in running])
            self.cache.pool.publish_events()
            self.missed_tokens.clear()
            self.missed_tokens.update(counted[0])
            for use, num_tokens in zip(self.uses, counted[1], strict=True):
                use.num_hit_tokens = num_tokens  # restored blocks are no hits
        return (self.cache.num_cached_blocks - before) * self._block_size

    @_mended
    def is_storing(self, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] = ()) -> bool:
        """Return whether a block or state of a prompt is still being stored, so that other engines do not find it yet.

        O(blocks + blocks that are being stored).
        """
        self.poll()
        chain = NameChain(self._context.layout(), self._block_size, extra_keys)
        chain.extend(token_ids)
        return bool(self._context.copies) or not self._context.names(chain).isdisjoint(self._saver.buffers.names())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a lookup or a load."""
        return sum(record.is_waiting for record in self._records.values())

    @_mended
    def read(self) -> OffloadReading:
        """Return the statistics of the offload and its tiers. O(requests + causes)."""
        tiers = tuple(
            TierReading(use.tier.name, use.tier.stats(), use.num_hit_tokens, use.num_skipped) for use in self.uses
        )
        size, free = self.blocks.object_bytes, len(self._loader.free) + len(self._saver.buffers.free)
        rows = self.blocks.num_rows
        return OffloadReading(tiers, dict(self.missed_tokens), self.num_waiting, rows * size, (rows - free) * size)

    def settle(self, seconds: float) -> bool:
        """Wait until all transfers have ended, for tests and shutdown; return whether they have."""
        end = monotonic() + require_number("seconds", seconds)
        while True:
            self.poll()
            if not self._loader.transfers and not self._saver.buffers.transfers and not self._context.copies:
                return True
            if monotonic() >= end:
                return False
            sleep(0.001)

    def close(self, seconds: float = 5.0) -> bool:
        """Wait up to `seconds` for stores, then close the tiers; return whether everything ended.

        May be called twice.
        """
        for key in list(self._records):
            self.forget(key)
        settled = self.settle(seconds)
        self._saver.close()
        closed = [use.tier.close() for use in self.uses]
        self.poll()
        return settled and all(closed)

    @_mended
    def check(self) -> None:
        """Raise `InvariantError` unless each row is free or in use exactly once, and loads and requests agree.

        O(rows + requests).
        """
        rows = [*self._loader.rows(), *self._saver.buffers.rows()]
        if sorted(rows) != list(range(self.blocks.num_rows)):
            raise InvariantError(f"offload: {len(rows)} rows are free or in use, of {self.blocks.num_rows}")
        self._loader.check()

    def _restore(self, token_ids: list[int], keys: tuple[ExtraKey, ...], end: float) -> int:
        """Load a prompt, as far as the buffers hold it, into cached blocks of the pool; return the number of tokens."""
        key, seq = object(), None
        try:
            self.poll()  # `prepare` needs the rechecks that a poll allows
            while self.prepare(key, token_ids, keys) and monotonic() < end:
                load = self._records[key].load
                if load is not None:
                    load.deadline = float("inf")
                sleep(0.0002)
                self.poll()
            seq = None if monotonic() >= end else self.cache.try_allocate(token_ids, extra_keys=keys, resumed=True)
            return self.fill(key, seq) if isinstance(seq, int) else 0
        finally:
            if isinstance(seq, int):
                self.cache.free(seq)
            self.forget(key)

    # Results, and what interrupted calls leave.

    def _end(self, result: TransferResult) -> None:
        if not self._loader.end(result):
            self._saver.end(result)

    def _end_lost(self, tier: Tier) -> None:
        """End the transfers of a tier that has none left: their results are lost, so they count as failed."""
        for transfers in (self._loader.transfers, self._saver.buffers.transfers):
            for number in [number for number, each in transfers.items() if each.use.tier is tier]:
                self._end(TransferResult(number, {0: Cause.CLOSED}, 0, 0.0))

    def _mend(self) -> None:
        """Make rows, loads and requests agree again. O(rows + requests)."""
        self._loader.mend()
        self._saver.buffers.mend()
        self._context.is_torn = False

    # Requests.

    def _record(self, key: Hashable, extra_keys: tuple[ExtraKey, ...]) -> RequestRecord:
        """Return the record of a waiting request; a new one after the cache was reset."""
        record = self._records.get(require_key("key", key))
        if record is not None and not record.is_admitted and record.generation == self.cache.generation:
            return record
        chain = NameChain(self._context.layout(), self._block_size, extra_keys)
        self.forget(key)
        self._records[key] = record = RequestRecord(chain, self.cache.generation, self._clock(), extra_keys=extra_keys)
        return record
