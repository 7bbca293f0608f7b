"""An offload takes computed blocks from a manager's KV storage to tiers, and brings back what prompts begin with.

Nothing is held in the pool for a load: objects come into host buffers of the offload's own, and are verified there.
When the request is admitted, its own blocks are reserved, written from the buffers, and committed as computed, the way
in which prompts handed over from another engine come in. A load that fails, is late or is not wanted any more is
therefore buffers that come back when their tier lets go of them, and no block anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from os import PathLike
from time import monotonic, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from ..answers import SeqStatus
from ..arguments import require_int, require_number, shown
from ..core.manager import KVCacheManager
from ..core.plan import StepPlan
from ..errors import InvalidArgument, InvariantError
from ..keys import ExtraKey
from .finding import Finder, Kept, Range
from .header import NameChain, layout_id
from .loads import Load, Measure, Piece, Prompt, check_loads
from .memory import Blocks, IsDone, States
from .offload_arguments import require_arguments, require_key
from .snapshot import Contents, Snapshot
from .states import keys_before, state_name
from .stores import JOB_BYTES, Stores
from .tier import Job, Outcome, Tier
from .uses import OffloadReading, TierReading, TierUse, remember, wanted_by
from .write_back import Evicted, WriteBack

#: Why prompt tokens that the pool did not have were computed and not loaded.
MISS_CAUSES = ("absent", "not_worth", "late", "failed", "no_buffers", "no_state")
#: Jobs of a snapshot at once: what requests store goes between.
_SNAPSHOT_JOBS = 4
#: Waiting prompts that are looked at again between two calls of `poll`: each costs a lookup of its tokens.
_MOST_RECHECKS = 16


class Offload:
    """Stores what is computed and loads what prompts begin with, beside an engine that never waits for it.

        while True:
            offload.poll()
            for each waiting request, in order:
                if offload.prepare(key, token_ids, extra_keys):   # its blocks are on their way: others go first
                    continue
                seq = cache.allocate(token_ids, extra_keys=extra_keys)
                offload.fill(key, seq)
            ...reserve, compute...
            offload.save(key, seq, token_ids, num_computed_after)  # for each sequence of the step, and its states
            cache.commit(...)
            offload.forget(key)                                    # for each request that has ended

    cache: the manager. blocks: its storage (`KVBlocks`). tiers: in the order in which they are asked, nearest first.
    model: fingerprint of weights and config as a dict of plain values, or a function that makes one: it is asked again
    after `reset_prefix_cache`, which a change of the weights calls for. step_tokens: the most that a step computes.
    on_plan: called with each `StepPlan` made here, to carry out its moves at once (`KVCache.move_blocks`,
    `StateSlots.move`); needed with a CPU pool, partial hits or states. clock: seconds. states: of a cache with a state
    group, its states (`StateObjects`).

    Not safe for use by several threads. Raises `InvalidArgument` for tiers of one name, layer groups of several block
    sizes, context shards that `blocks` has not all of, steps in flight, and buffers that hold no state with a block.
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
            raise InvalidArgument(f"tiers has {twice} twice; each place is one tier, and its figures have its name")
        #: Prompt tokens that were computed because no tier brought them, by cause.
        self.missed: Counter[str] = Counter(dict.fromkeys(MISS_CAUSES, 0))
        self._block_size = config.layer_groups[0].block_size
        self._num_groups = len(config.layer_groups)
        self._states = states
        self._make_model = model if callable(model) else lambda: model
        self._layout, self._state_layout, self._generation = b"", b"", -1
        step = config.hit_alignment // self._block_size
        self._finder = Finder(self.uses, self._block_size, blocks.object_bytes, step_tokens, states, step)
        self._on_plan = on_plan
        self._clock = clock
        half = max(blocks.num_rows // 2, 1)
        self._load_rows = list(range(half))
        #: Copies that the device is still to do, and what follows them.
        self._copies: list[tuple[IsDone, Callable[[], None]]] = []
        self._numbers = count(1)
        self._stores = Stores(blocks, list(range(half, blocks.num_rows)), self._numbers, self._copies)
        self._prompts: dict[Hashable, Prompt] = {}
        self._loads: dict[bytes, Load] = {}
        self._num_rechecks = self._num_polls = 0
        #: Loads that tiers have.
        self._jobs: dict[int, tuple[Piece, list[bytes]]] = {}
        self._back = [use for use in self.uses if use.write == "back"]
        self._write_back = WriteBack(cache, self._store_evicted, self._is_stored_back) if self._back else None
        self._snapshot: tuple[TierUse, Snapshot] | None = None

    # What an engine calls.

    def poll(self) -> None:
        """Take in what the tiers have done since the last call. O(jobs that ended)."""
        self._num_rechecks, self._num_polls = _MOST_RECHECKS, self._num_polls + 1
        while self._copies and self._copies[0][0]():
            self._copies.pop(0)[1]()
        for tier in {id(use.tier): use.tier for use in self.uses}.values():
            for outcome in tier.finished():
                self._end_job(outcome)
        if self._write_back is not None:
            self._write_back.learn(self._layout_now())
            if self._stores.free:
                self._write_back.store_missing()
        if self._snapshot is not None:
            self._go_on(*self._snapshot)

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

        Return True while the request should keep waiting: at most as long as computing takes. Call it before
        `allocate`, every time. A request that cannot start yet loads ahead only into free buffers, and gives them up
        to one that can. O(blocks not named yet) the first time, and O(blocks) while a tier is asked.

        Args:
            key: names the request until `forget`.
            token_ids: the request's tokens.
            extra_keys: the request's extra keys, as for `allocate`.
            may_load: False to look for nothing, and only make the request known.
            will_start: whether the request starts now even though `can_allocate` says no, as by a tenant's guarantee.
        """
        prompt = self._prompt(key, extra_keys)
        if prompt.is_over:
            return False
        if not may_load:
            prompt.is_over = True
            return False
        now = self._clock()
        if prompt.load is not None and not prompt.load.is_running:
            self._offer(prompt, prompt.load, token_ids, extra_keys)
        if prompt.needs_turn and self._can_start(token_ids, extra_keys, will_start):
            prompt.needs_turn, prompt.since, prompt.search = False, now, None
        if prompt.load is None and not prompt.needs_turn:
            prompt.chain.extend(token_ids)
            prompt.token_ids = token_ids
            self._look_up(key, prompt, token_ids, extra_keys, now, will_start)
        if prompt.load is not None and now > prompt.load.deadline:
            prompt.is_over = prompt.load.is_running
        return prompt.is_waiting

    def fill(self, key: Hashable, seq: int) -> int:
        """Write what was loaded for a request that was just admitted into its sequence's blocks, as computed tokens.

        Returns the tokens. Call it right after `allocate`; after an error the sequence is still to be freed. O(bytes).
        """
        prompt = self._prompts.get(require_key("key", key))
        if prompt is None:
            return 0
        self.cache.num_tokens(require_int("seq", seq, 0, 2**63 - 1))  # raises before anything has changed
        prompt.is_over = prompt.is_admitted = True
        if self._states is not None:
            hit, num_tokens = int(self.cache.num_computed_tokens(seq)), int(self.cache.num_tokens(seq))
            prompt.kept, prompt.last = ([hit] if hit else []), num_tokens - 1
        filled, cause, is_copied = 0, "late", None
        load = prompt.load
        try:
            if load is not None:
                cause = "late" if load.is_running else "failed"
                filled, is_copied = self._fill(seq, prompt, load)
            if filled and self._states is not None:
                prompt.kept.append(int(self.cache.num_computed_tokens(seq)))
        finally:
            if load is not None:
                self._drop_load(load, is_copied)
        self._count_missed(prompt, seq, cause)
        return filled

    def save(
        self, key: Hashable, seq: int, token_ids: Sequence[int], num_computed: int, states: Sequence[int] = ()
    ) -> int:
        """Store the full blocks among the first num_computed tokens that the tiers want and were not offered before.

        Call it when a step was computed, before `commit`: then the sequence holds all that the step wrote. Bytes are
        copied to buffers here; what finds no buffer is not stored. Returns the objects that are. O(bytes of these).
        Blocks behind a cut (`cache.truncate`) get new names, O(tokens); nothing more of a prompt with spans is stored.

        states: after how many tokens the step saved states of the sequence. They are stored when they are kept, in a
        later call; of an output the last one is, by `forget`.
        """
        num_computed = require_int("num_computed", num_computed, 0, 2**31 - 1)
        stop = num_computed // self._block_size
        prompt = self._prompts.get(require_key("key", key))
        # What was computed before the cache was reset may be of other weights.
        if prompt is None or prompt.generation != self.cache.generation:
            return 0
        computed = self.cache.num_computed_tokens(require_int("seq", seq, 0, 2**63 - 1))
        if stop > prompt.num_saved or computed < prompt.num_saved * self._block_size:
            prompt.look_for_cut(computed // self._block_size, token_ids, stop)
        if prompt.is_lost:
            return 0
        if self._states is not None:
            prompt.token_ids = token_ids
            self._store_states(prompt, prompt.take_kept(boundary for boundary in states if boundary <= num_computed))
        if prompt.num_saved >= stop:
            return 0
        prompt.chain.extend(token_ids, stop)
        if len(prompt.chain.names) < stop:
            raise InvalidArgument(f"num_computed is {num_computed}; token_ids has {len(token_ids)} tokens")
        first, prompt.num_saved = prompt.num_saved, stop
        if self._write_back is not None:
            self._write_back.computed(self.cache.block_ids(seq)[first:stop])
        wanted = wanted_by(self.uses, prompt.chain.names, first, stop)
        return self._store(seq, prompt.chain, sorted(set().union(*wanted.values())), wanted) if wanted else 0

    def fork(self, parent: Hashable, keys: Iterable[Hashable]) -> None:
        """Further requests go on from one that runs, as `cache.fork` makes them. O(blocks) each."""
        prompt = self._prompts.get(require_key("parent", parent))
        if not isinstance(keys, Iterable):
            raise InvalidArgument(f"keys is {shown(keys)}; the names of requests are needed")
        if prompt is not None:
            for key in [require_key("keys", each) for each in keys]:
                self._prompts[key] = replace(prompt, chain=prompt.chain.copy(), load=None, kept=[])

    def forget(self, key: Hashable) -> None:
        """A request has ended, or goes back to the queue to be prepared again. O(blocks of its load).

        What is kept of its states is stored, O(bytes).
        """
        prompt = self._prompts.pop(require_key("key", key), None)
        if prompt is not None and prompt.kept and prompt.generation == self.cache.generation:
            self._store_states(prompt, prompt.take_kept() + prompt.kept)
        if prompt is not None and (load := prompt.load) is not None:
            load.prompts.discard(key)
            if not load.prompts:
                self._drop_load(load)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Tell how long a step of num_tokens took: loads are begun only where they are sooner."""
        count, took = require_int("num_tokens", num_tokens, 0, 2**62), require_number("seconds", seconds)
        if count > 0 and took > 0.0:
            self._finder.computing.note(count, took, 0.0)

    def begin_snapshot(self, path: str | PathLike[str]) -> Snapshot:
        """Store what the pool caches in the nearest tier that is written, and write down at `path` what it was.

        It goes on in each `poll`, while requests run: ask the snapshot whether it is done. Prompts with spans are not
        in it. Raises `InvalidArgument` where no tier is written, for layer groups, windows or a CPU pool, and while
        another is taken.
        """
        use = next((use for use in self.uses if use.write != "never"), None)
        if use is None:
            raise InvalidArgument("tiers has none that is written; a snapshot needs one")
        if self._snapshot is not None and not self._snapshot[1].is_done:
            raise InvalidArgument(f"a snapshot at {str(self._snapshot[1].path)!r} is being taken; one at a time")
        snapshot = Snapshot(path, self.cache, self._layout_now())
        self._snapshot = (use, snapshot)
        return snapshot

    def snapshot(self, path: str | PathLike[str], seconds: float = 60.0) -> Snapshot:
        """Take a snapshot and wait for it, at most so long, as `begin_snapshot`: for a stop. See its `is_done`."""
        end = monotonic() + require_number("seconds", seconds)
        snapshot = self.begin_snapshot(path)
        while not snapshot.is_done and monotonic() < end:
            self.poll()
            sleep(0.0005)
        return snapshot

    def restore(self, path: str | PathLike[str], seconds: float = 60.0) -> int:
        """Load the contents of a snapshot into the pool, as much as is free, before requests come; returns the tokens.

        The order of eviction comes back too. What the tiers do not have any more is left out, and so is what is not
        loaded after `seconds`. Raises `InvalidArgument`, with the reason, for a file of another model, layout or
        version, or none; nothing was loaded then.
        """
        limit = require_number("seconds", seconds)
        contents = Contents.of(path, self._layout_now(), self._block_size)
        counted = self.missed.copy(), [use.num_hit_tokens for use in self.uses]
        end, most = monotonic() + limit, int(self.cache.config.max_model_len) - 1
        before = self.cache.num_cached_blocks
        try:
            for tokens, keys in contents.prompts(self.cache.num_free_blocks - before - 1, most):
                while self._restore([*tokens, 0], keys, end):
                    pass
        finally:
            self.cache.pool.publish_events()
        self.missed, hits = counted
        for use, num_tokens in zip(self.uses, hits, strict=True):
            use.num_hit_tokens = num_tokens  # what was not asked for is no hit
        return (self.cache.num_cached_blocks - before) * self._block_size

    def is_storing(self, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] = ()) -> bool:
        """Says whether a block or state of a prompt is still on its way to a tier: another engine does not find it yet.

        O(blocks + blocks that are being stored).
        """
        self.poll()
        chain = NameChain(self._layout_now(), self._block_size, extra_keys)
        chain.extend(token_ids)
        names = set(chain.names)
        if self._states is not None:
            names |= {state_name(self._state_layout, name) for name in chain.names}
        return bool(self._copies) or not names.isdisjoint(self._stores.names())

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for a question or a load."""
        return sum(prompt.is_waiting for prompt in self._prompts.values())

    def read(self) -> OffloadReading:
        """Returns what it did so far, and what its tiers did. O(prompts + causes)."""
        tiers = tuple(
            TierReading(use.tier.name, use.tier.stats(), use.num_hit_tokens, use.num_skipped) for use in self.uses
        )
        size, free = self.blocks.object_bytes, len(self._load_rows) + len(self._stores.free)
        rows = self.blocks.num_rows
        return OffloadReading(tiers, dict(self.missed), self.num_waiting, rows * size, (rows - free) * size)

    def settle(self, seconds: float) -> bool:
        """Wait until all jobs have ended, for tests and at a stop; says whether they did."""
        end = monotonic() + require_number("seconds", seconds)
        while True:
            self.poll()
            if not self._jobs and not self._stores.jobs and not self._copies:
                return True
            if monotonic() >= end:
                return False
            sleep(0.001)

    def close(self, seconds: float = 5.0) -> bool:
        """Let what is being stored end, for so long, then close the tiers; says whether all ended. Twice is once."""
        for key in list(self._prompts):
            self.forget(key)
        settled = self.settle(seconds)
        if self._write_back is not None:
            self._write_back.close()
        closed = [use.tier.close() for use in self.uses]
        self.poll()
        return settled and all(closed)

    def check(self) -> None:
        """Raise `InvariantError` unless each row is free, or a load's, or read by stores, and loads know their prompts.

        O(rows + prompts).
        """
        pieces = {id(piece): piece for load in self._loads.values() for piece in load.all_pieces()}
        pieces |= {id(piece): piece for piece, _ in self._jobs.values()}
        rows = [*self._load_rows, *self._stores.rows()]
        rows += [row for piece in pieces.values() for row in piece.rows]
        if not self._copies and sorted(rows) != list(range(self.blocks.num_rows)):
            raise InvariantError(f"offload: {len(rows)} rows are free or in use; there are {self.blocks.num_rows}")
        check_loads(self._loads.values(), self._prompts)

    # Snapshots.

    def _go_on(self, use: TierUse, snapshot: Snapshot) -> None:
        """Store a part of what a snapshot has left, with half of the buffers that are free."""
        if not snapshot.require_going():
            return
        if snapshot.is_read:
            if not snapshot.jobs and not self._copies:
                snapshot.finish()
            return
        room = min(-(-len(self._stores.free) // 2), self._stores.job_objects)
        if not room or len(snapshot.jobs) >= _SNAPSHOT_JOBS:
            return
        place, objects = snapshot.take(room)
        objects = [each for each in objects if each[1] not in use.known]
        if objects:
            ids = np.array([[block] for block, _, _ in objects], np.int32)
            wanted = {use: {block for block, _, _ in objects}}
            self._stores.copy_out(ids, objects, wanted, self._layout, (snapshot, place))

    def _restore(self, token_ids: list[int], keys: tuple[ExtraKey, ...], end: float) -> int:
        """Bring as much of a prompt as the buffers hold into the pool, held by none; returns the tokens."""
        key = object()
        while self.prepare(key, token_ids, keys) and monotonic() < end:
            load = self._prompts[key].load
            if load is not None:
                load.deadline = float("inf")
            sleep(0.0002)
            self.poll()
        seq = None if monotonic() >= end else self.cache.try_allocate(token_ids, extra_keys=keys, resumed=True)
        try:
            return self.fill(key, seq) if isinstance(seq, int) else 0
        finally:
            if isinstance(seq, int):
                self.cache.free(seq)
            self.forget(key)

    # Looking for a prompt's blocks.

    def _prompt(self, key: Hashable, extra_keys: tuple[ExtraKey, ...]) -> Prompt:
        """Returns what is known of a waiting request, made new after the cache was reset."""
        prompt = self._prompts.get(require_key("key", key))
        if prompt is not None and not prompt.is_admitted and prompt.generation == self.cache.generation:
            return prompt
        chain = NameChain(self._layout_now(), self._block_size, extra_keys)
        self.forget(key)
        self._prompts[key] = prompt = Prompt(chain, self.cache.generation, self._clock(), extra_keys=extra_keys)
        return prompt

    def _layout_now(self) -> bytes:
        if self._generation != self.cache.generation:
            model = self._make_model()
            if not isinstance(model, Mapping):
                raise InvalidArgument(f"model gives {shown(model)}; it must be a dict of plain values")
            fields = {"blocks": dict(self.blocks.layout()), "model": dict(model)}
            self._layout, self._generation = layout_id(**fields), self.cache.generation
            if self._states is not None:
                self._state_layout = layout_id(states=self._states.layout(), **fields)
        return self._layout

    def _look_up(
        self,
        key: Hashable,
        prompt: Prompt,
        token_ids: Sequence[int],
        extra_keys: tuple[ExtraKey, ...],
        now: float,
        will_start: bool,
    ) -> None:
        """Ask the tiers for what the pool does not have, and begin to load it, or join a load of the same blocks."""
        names, usable = prompt.chain.names, (len(token_ids) - 1) // self._block_size
        cached = self.cache.num_cached_tokens(token_ids, extra_keys) // self._block_size
        if cached >= usable:
            prompt.needs_turn = True  # until then the pool may evict them
            return
        shared = self._loads.get(names[cached])
        if shared is not None and shared.generation != prompt.generation:
            self._drop_load(shared)
        elif shared is not None:
            stop = shared.pieces[-1].stop
            if shared.kept is None or (stop <= usable and names[stop - 1] == shared.names[stop - 1]):
                prompt.found = prompt.chosen = stop
                self._join(key, prompt, shared)
            else:  # a state behind other tokens is of no use here; what is loaded before it may be in the pool soon
                prompt.is_over = now - prompt.since > self._finder.patience(usable - cached)
            return
        found, pending = self._finder.find(names, cached, usable)
        best, stop = (found[-1][0], found[-1][2]) if found else (None, cached)
        if self._finder.should_wait(prompt, pending, best, usable - stop or usable - cached, now):
            return
        prompt.found, prompt.chosen = stop, cached
        prompt.cause = prompt.rest = self._rest_cause(pending)
        chosen = self._finder.choose(prompt, found, len(self._load_rows), now)
        if prompt.cause == "no_buffers":
            if not self._can_start(token_ids, extra_keys, will_start):
                prompt.needs_turn = True
                return
            self._take_back(stop - cached + (0 if self._states is None else self._states.num_rows))
            prompt.cause = prompt.rest
            chosen = self._finder.choose(prompt, found, len(self._load_rows), now)
            if prompt.cause == "no_buffers" and self._has_rows_out() and self._is_patient(prompt, usable - cached, now):
                return
            if prompt.cause == "no_buffers" and self._loads:
                prompt.needs_turn = True  # others are ahead, and start first
                return
        kept: Kept | None = None
        if self._states is not None and chosen:
            kept, pending, is_searched = self._finder.find_state(self._state_layout, prompt, cached, chosen[-1][2])
            best = next((use for use in reversed(self.uses) if use not in pending), None)
            if self._finder.should_wait(prompt, pending, best, usable - cached, now):
                return
            if not is_searched and self._is_patient(prompt, usable - cached, now):
                return
            chosen = self._finder.up_to_state(prompt, chosen, kept, now)
            if kept is None and (pending or not is_searched):
                prompt.cause = "late"
        prompt.chosen = chosen[-1][2] if chosen else cached
        prompt.is_over = not chosen or not self._begin(key, prompt, chosen, kept, now)

    def _is_patient(self, prompt: Prompt, num_blocks: int, now: float) -> bool:
        return now - prompt.since <= self._finder.patience(num_blocks)

    def _rest_cause(self, pending: list[TierUse]) -> str:
        """Return why no tier has more: it has not answered, it is failing, or it has no more."""
        if pending:
            return "late"
        return "failed" if any(use.tier.stats().is_load_open for use in self.uses) else "absent"

    # Buffers of requests that wait.

    def _can_start(self, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...], will_start: bool) -> bool:
        """Return whether a waiting request would start now. O(tokens), and False after the most of such lookups."""
        if will_start:
            return True
        self._num_rechecks -= 1
        return self._num_rechecks >= 0 and bool(self.cache.can_allocate(token_ids, extra_keys))

    def _offer(self, prompt: Prompt, load: Load, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...]) -> None:
        """Note that a request may start with what was loaded. Drop it if the pool has evicted what is before it."""
        if load.offered_at and load.first and not prompt.is_over and self._num_rechecks > 0:
            self._num_rechecks -= 1
            if self.cache.num_cached_tokens(token_ids, extra_keys) < load.first * self._block_size:
                self._drop_load(load)
        load.offered_at = self._num_polls

    def _take_back(self, num_rows: int) -> None:
        """Drop finished loads of requests that did not start with them, the latest first, until rows are free.

        Requests that were asked about since `poll` are ahead of this one: those that can start keep theirs.
        """
        for load in reversed(list(self._loads.values())):
            if len(self._load_rows) >= num_rows or self._num_rechecks <= 0:
                return
            prompts = [self._prompts[key] for key in load.prompts]
            if load.is_running or not load.offered_at:
                continue
            is_ahead = load.offered_at == self._num_polls
            if is_ahead and any(self._can_start(each.token_ids, each.extra_keys, False) for each in prompts):
                continue
            for prompt in prompts:
                prompt.needs_turn = True
            self._drop_load(load)

    def _has_rows_out(self) -> bool:
        """Return whether rows of loads come back by themselves: a job or a copy still has some."""
        return bool(self._copies) or any(piece.state is None for piece, _ in self._jobs.values())

    def _begin(self, key: Hashable, prompt: Prompt, chosen: list[Range], kept: Kept | None, now: float) -> bool:
        """Give the tiers their jobs, and say whether they took any; where one is refused, the load ends there.

        With a state it has to be whole: the state is asked for first, and is of use behind all the rest alone.
        """
        cached = chosen[0][1]
        load = Load(prompt.chain.names, cached, prompt.generation, now + self._finder.patience(prompt.chosen - cached))
        each = max(JOB_BYTES // self.blocks.object_bytes, 1)
        if kept is not None:
            load.kept = Piece(kept[0], kept[1], kept[1], Measure(1))
            if not self._load_state(prompt.chain, load.kept):
                return False
        for use, start, end in chosen:
            measure = Measure()
            for first in range(start, end, each):
                piece = Piece(use, first, min(first + each, end), measure)
                if not self._load_piece(prompt.chain, piece):
                    break
                measure.num_running += 1
                load.pieces.append(piece)
            if not load.pieces or load.pieces[-1].stop < end:
                break
        is_of_use = bool(load.pieces) and (kept is None or load.pieces[-1].stop == kept[1])
        if is_of_use:
            self._loads[load.names[cached]] = load
            self._join(key, prompt, load)
        else:
            for piece in load.all_pieces():
                piece.is_dropped = True
        return is_of_use

    def _load_piece(self, chain: NameChain, piece: Piece) -> bool:
        names, digests = chain.names[piece.first : piece.stop], chain.digests[piece.first : piece.stop]
        piece.rows = [self._load_rows.pop() for _ in names]
        buffers = [self.blocks.buffer(row) for row in piece.rows]
        return self._load_objects(piece, self._layout, names, digests, buffers)

    def _load_state(self, chain: NameChain, piece: Piece) -> bool:
        if self._states is None:
            return False
        name = state_name(self._state_layout, chain.names[piece.stop - 1])
        piece.rows = [self._load_rows.pop() for _ in range(self._states.num_rows)]
        buffers = [self._states.buffers(piece.rows)]
        return self._load_objects(piece, self._state_layout, [name], [chain.digests[piece.stop - 1]], buffers)

    def _load_objects(
        self, piece: Piece, layout: bytes, names: list[bytes], digests: list[bytes], buffers: list[Any]
    ) -> bool:
        job = Job(next(self._numbers), layout, names, digests, buffers)
        if piece.use.tier.load(job) is not None:
            self._load_rows += piece.rows
            return False
        self._jobs[job.id] = (piece, names)
        return True

    def _join(self, key: Hashable, prompt: Prompt, load: Load) -> None:
        prompt.load = load
        load.prompts.add(key)

    # Ends of loads.

    def _fill(self, seq: int, prompt: Prompt, load: Load) -> tuple[int, IsDone | None]:
        """Write what is there of a load and is this prompt's, from where the pool's hit ends."""
        size, computed, done = self._block_size, int(self.cache.num_computed_tokens(seq)), load.done()
        usable = (int(self.cache.num_tokens(seq)) - 1) // size
        stop = min(done[-1].stop if done else load.first, usable)
        while stop > load.first and load.names[stop - 1] != prompt.chain.names[stop - 1]:
            stop -= 1  # the load is another prompt's, which goes on differently
        # Blocks before the load may have been evicted since, and a load of older weights is of no use.
        if computed < load.first * size or load.generation != self.cache.generation or stop * size <= computed:
            return 0, None
        # So is one for tokens that the request does not have any more.
        if not prompt.chain.is_of(self.cache.token_ids(seq), 0, stop):
            return 0, None
        rows = {piece.first + at: row for piece in done for at, row in enumerate(piece.rows)}
        if load.kept is not None:
            filled, is_copied = self._write_with_state(seq, computed, stop * size, rows, load.kept)
        else:
            filled, is_copied = self._write(seq, computed, stop * size, rows)
        for piece in done:
            blocks = min(piece.stop, (computed + filled) // size) - max(piece.first, computed // size)
            piece.use.num_hit_tokens += max(blocks, 0) * size
        return filled, is_copied

    def _write(self, seq: int, computed: int, stop: int, rows: dict[int, int]) -> tuple[int, IsDone | None]:
        """Reserve, write and commit, in smaller parts where a window is short of blocks; returns the tokens."""
        size, begun, part = self._block_size, computed, stop - computed
        is_copied = None
        while computed < stop:
            count = min(part, stop - computed)
            plan = self.cache.reserve([seq], [count])
            status = int(plan.status[0])
            if self._on_plan is not None:
                self._on_plan(plan)
            if status == SeqStatus.NO_BLOCKS.value and count > size:
                part = max(count // 2 // size * size, size)
                continue
            if status != SeqStatus.SCHEDULED.value:
                break
            places = range(computed // size, -(-(computed + count) // size))
            ids = self._block_ids(seq, places)
            is_copied = self.blocks.write(ids, [rows[place] for place in places])
            self.cache.commit([seq], [count])
            computed += count
        return computed - begun, is_copied

    def _write_with_state(
        self, seq: int, computed: int, stop: int, rows: dict[int, int], kept: Piece
    ) -> tuple[int, IsDone | None]:
        """Reserve, write and commit all up to a state in one step, or nothing: in between there is no state."""
        size, count = self._block_size, stop - computed
        if self._states is None or not kept.state or kept.stop * size != stop:
            return 0, None
        if not self.cache.can_append([seq], [count]):
            return 0, None
        self.cache.skip_states(seq, stop)
        plan = self.cache.reserve([seq], [count])
        if self._on_plan is not None:
            self._on_plan(plan)
        if int(plan.num_scheduled[0]) != count:
            return 0, None
        places = range(computed // size, stop // size)
        self.blocks.write(self._block_ids(seq, places), [rows[place] for place in places])
        is_copied = self._states.write(int(plan.rows[0]), kept.rows, plan.states.save_blocks)
        self.cache.commit([seq], [count])
        return count, is_copied

    def _count_missed(self, prompt: Prompt, seq: int, cause: str) -> None:
        """Count the tokens that are to be computed though whole blocks of them could have been loaded, by cause."""
        size = self._block_size
        at, usable = int(self.cache.num_computed_tokens(seq)) // size, (int(self.cache.num_tokens(seq)) - 1) // size
        for stop, why in ((prompt.chosen, cause), (prompt.found, prompt.cause), (usable, prompt.rest)):
            missing = min(stop, usable) - at
            if missing > 0:
                self.missed[why] += missing * size
                at += missing

    def _drop_load(self, load: Load, is_copied: IsDone | None = None) -> None:
        """Give its rows back, those of jobs that run when `finished` names them; its prompts are on their own again.

        is_copied: tells when the device has read the rows.
        """
        if self._loads.get(load.names[load.first]) is not load:
            return
        del self._loads[load.names[load.first]]
        rows = []
        for piece in load.all_pieces():
            piece.is_dropped = True
            if piece.state is not None:
                rows += piece.rows
        if is_copied is None:
            self._load_rows += rows
        else:
            self._copies.append((is_copied, lambda: self._load_rows.extend(rows)))
        for key in load.prompts:
            self._prompts[key].load = None
            self._prompts[key].since = self._clock()
        load.prompts.clear()

    def _end_job(self, outcome: Outcome) -> None:
        piece, names = self._jobs.pop(outcome.id, (None, []))
        if piece is not None:
            use = piece.use
        elif (stored := self._stores.end(outcome.id)) is not None:
            use, names = stored
        else:
            return
        if self._snapshot is not None and outcome.id in self._snapshot[1].jobs:
            self._snapshot[1].jobs.discard(outcome.id)
            if not outcome.is_done:
                self._snapshot[1].fail(f"{use.tier.name}: {next(iter(outcome.causes.values())).value}")
        if outcome.is_done:
            remember(use.known, names)
        else:
            for name in names:
                use.known.pop(name, None)
            if piece is None and use.write == "back" and self._write_back is not None:
                self._write_back.fail(names)
        if piece is None:
            return
        piece.state = outcome.is_done
        if piece.is_dropped:
            self._load_rows += piece.rows
        measure = piece.measure
        measure.num_running -= 1
        if outcome.is_done:
            measure.num_bytes += outcome.num_bytes
            measure.seconds = max(measure.seconds, outcome.seconds)
        if measure.num_running == 0 and measure.num_bytes:
            use.cost.note(measure.num_bytes, measure.seconds, self._clock())

    # Stores.

    def _store_states(self, prompt: Prompt, boundaries: Iterable[int]) -> None:
        """Store the states at these boundaries of a prompt that tiers want, where they are kept."""
        states, chain = self._states, prompt.chain
        for boundary in boundaries:
            at, keys = boundary // self._block_size - 1, keys_before(prompt.extra_keys, boundary)
            if states is None or keys is None or at >= len(chain.names):
                continue
            name = state_name(self._state_layout, chain.names[at])
            uses = [use for use in self.uses if use.wants(name)]
            if not uses:
                continue
            ids = self.cache.state_blocks(prompt.token_ids[:boundary], keys)
            if not len(ids):
                continue
            if len(self._stores.free) < states.num_rows:
                for use in uses:
                    use.num_skipped += 1
                continue
            rows = self._stores.take(states.num_rows)
            found = (name, chain.digests[at], states.buffers(rows), rows)
            self._stores.give(rows, states.read(ids, rows), [(use, [found]) for use in uses], self._state_layout)

    def _store(self, seq: int, chain: NameChain, places: list[int], wanted: dict[TierUse, set[int]]) -> int:
        """Copy blocks of a sequence to rows and give them to the tiers that want them; returns how many."""
        ids = self._block_ids(seq, places)
        held = np.flatnonzero(ids.all(axis=1)).tolist()  # those behind a window are gone
        taken = held[: len(self._stores.free)]
        for use, blocks in wanted.items():
            use.num_skipped += sum(places[at] in blocks for at in held[len(taken) :])
        if not taken:
            return 0
        objects = [(places[at], chain.names[places[at]], chain.digests[places[at]]) for at in taken]
        self._stores.copy_out(ids[taken], objects, wanted, self._layout)
        return len(taken)

    def _is_stored_back(self, name: bytes) -> bool:
        return all(name in use.known for use in self._back)

    def _store_evicted(self, objects: list[Evicted]) -> list[bytes]:
        """Store blocks of the pool, each behind what it hangs on, where a tier that writes back does not have them.

        Return the names of those for which no buffer was free.
        """
        assert self._write_back is not None
        wanted = {use: {block for block, name, _ in objects if name not in use.known} for use in self._back}
        taken = objects[: len(self._stores.free)]
        if taken:
            ids = np.array([[block] for block, _, _ in taken], np.int32)
            self._stores.copy_out(ids, taken, wanted, self._layout)
        left = objects[len(taken) :]
        for use, blocks in wanted.items():
            use.num_skipped += sum(block in blocks and name not in self._write_back for block, name, _ in left)
        self._write_back.fail(self._stores.refused)
        self._stores.refused = []
        return [name for _, name, _ in left]

    def _block_ids(self, seq: int, places: Sequence[int]) -> npt.NDArray[np.int32]:
        """Returns the blocks at some places of a sequence, (n, groups); 0 where one is gone."""
        columns = [self.cache.block_ids(seq, group)[list(places)] for group in range(self._num_groups)]
        return np.stack(columns, axis=1)
