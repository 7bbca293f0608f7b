"""An offload takes computed blocks from a manager's KV storage to tiers, and brings back what prompts begin with.

Nothing is held in the pool for a load: objects come into host buffers of the offload's own, and are verified there.
When the request is admitted, its own blocks are reserved, written from the buffers, and committed as computed, the way
in which prompts handed over from another engine come in. A load that fails, is late or is not wanted any more is
therefore buffers that come back when their tier lets go of them, and no block anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..answers import SeqStatus
from ..core.manager import KVCacheManager
from ..core.plan import StepPlan
from ..errors import InvalidArgument, InvariantError
from ..keys import ExtraKey
from .costs import LinearCost
from .header import NameChain, layout_id
from .snapshot import Contents, Snapshot
from .tier import Job, Outcome, Tier
from .uses import TierReading, TierUse, remember
from .write_back import Evicted, WriteBack

#: Why prompt tokens that the pool did not have were computed and not loaded.
MISS_CAUSES = ("absent", "not_worth", "late", "failed", "no_buffers")
#: Tells whether a copy that was asked for is done.
IsDone = Callable[[], bool]
#: Jobs of a snapshot at once: what requests store goes between.
_SNAPSHOT_JOBS = 4
#: Bytes of a job: several run side by side, and one that fails takes no more with it.
_JOB_BYTES = 2**24
#: Seconds that a question or a load is waited for where it is not known how long computing takes.
_PATIENCE = 2.0
#: Waiting prompts that are looked up ahead of their turn.
MAX_PREFETCHED = 64


class Blocks(Protocol):
    """This is the KV storage as an offload sees it; `KVBlocks` is one over `blockyard.storage.KVCache`."""

    object_bytes: int
    num_rows: int

    def layout(self) -> Mapping[str, Any]:
        """Returns all that decides what an object's bytes mean, but for the model, as plain values."""

    def buffer(self, row: int) -> memoryview:
        """Returns the bytes of a row, `object_bytes`."""

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the blocks, (n, groups), into rows; None where it is done, else what tells it."""

    def write(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the rows into blocks, before all that the device is asked from now on; as `read`."""


@dataclass(frozen=True, slots=True)
class OffloadReading:
    """This is an offload as it was between two steps. missed: prompt tokens that were computed, by cause.
    num_waiting: prompts that wait for a tier. buffer_bytes: host memory for objects on their way; used_bytes of it hold
    some."""

    tiers: tuple[TierReading, ...]
    missed: dict[str, int]
    num_waiting: int
    buffer_bytes: int
    used_bytes: int


#: Blocks of a prompt, from the second to the third, that a tier has.
_Range = tuple[TierUse, int, int]


@dataclass(slots=True)
class _Measure:
    """This is what all pieces of a load from one tier take: they run together, so the longest is what they take."""

    num_running: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False, slots=True)
class _Piece:
    """A piece is what one job loads: blocks `first` to `stop` of a prompt. state: whether it is done; None while it
    runs."""

    use: TierUse
    first: int
    stop: int
    measure: _Measure
    rows: list[int] = field(default_factory=list)
    state: bool | None = None
    is_dropped: bool = False


@dataclass(eq=False, slots=True)
class _Load:
    """A load brings blocks `first` to `stop` of a prompt, for all prompts that begin alike."""

    names: list[bytes]
    first: int
    generation: int
    deadline: float
    pieces: list[_Piece] = field(default_factory=list)
    prompts: set[Hashable] = field(default_factory=set)

    @property
    def is_running(self) -> bool:
        return any(piece.state is None for piece in self.pieces)

    def done(self) -> list[_Piece]:
        """Returns the pieces that are there, up to the first that is not."""
        count = next((place for place, piece in enumerate(self.pieces) if not piece.state), len(self.pieces))
        return self.pieces[:count]


@dataclass(eq=False, slots=True)
class _Prompt:
    """This is known of a request: the names of its blocks, what it waits for, how much of it was offered to the tiers.

    found, chosen: up to which block the tiers have it, and up to which it is loaded. cause: why not all that they have.
    is_over: there is nothing to wait for. is_admitted: it has its sequence.
    """

    chain: NameChain
    generation: int
    since: float
    load: _Load | None = None
    found: int = 0
    chosen: int = 0
    cause: str = "late"
    num_saved: int = 0
    is_over: bool = False
    is_admitted: bool = False

    @property
    def is_waiting(self) -> bool:
        """Says whether a place is being asked, or a load runs."""
        return not self.is_over and (self.load is None or self.load.is_running)


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
            offload.save(key, seq, token_ids, num_computed_after)  # for each sequence of the step
            cache.commit(...)
            offload.forget(key)                                    # for each request that has ended

    cache: the manager. blocks: its storage (`KVBlocks`). tiers: in the order in which they are asked, nearest first.
    model: fingerprint of weights and config as a dict of plain values, or a function that makes one: it is asked again
    after `reset_prefix_cache`, which a change of the weights calls for. step_tokens: the most that a step computes.
    on_plan: called with each `StepPlan` made here, to carry out its moves at once (`KVCache.move_blocks`); needed with
    a CPU pool or partial hits. clock: seconds.

    Not safe for use by several threads. Raises `InvalidArgument` for tiers of one name, layer groups of several block
    sizes, state groups, context shards, and steps in flight.
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
    ) -> None:
        require_offloadable(cache)
        config = cache.config
        if on_plan is None and (config.num_cpu_blocks or config.partial_hits):
            raise InvalidArgument(
                "on_plan is None; a cache with a CPU pool or partial hits makes plans that move blocks"
            )
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
        self._make_model = model if callable(model) else lambda: model
        self._layout, self._generation = b"", -1
        self._step_tokens = step_tokens
        self._on_plan = on_plan
        self._clock = clock
        self._computing = LinearCost()
        half = max(blocks.num_rows // 2, 1)
        self._load_rows, self._store_rows = list(range(half)), list(range(half, blocks.num_rows))
        self._prompts: dict[Hashable, _Prompt] = {}
        self._loads: dict[bytes, _Load] = {}
        #: Jobs that tiers have: a piece of a load, or the names that are stored and their rows.
        self._jobs: dict[int, tuple[TierUse, _Piece | None, list[bytes]]] = {}
        self._last_job = 0
        self._stored_rows: dict[int, list[int]] = {}
        #: Jobs that read each row for a store.
        self._readers = [0] * blocks.num_rows
        self._back = [use for use in self.uses if use.write == "back"]
        self._write_back = WriteBack(cache, self._store_evicted) if self._back else None
        self._snapshot: tuple[TierUse, Snapshot] | None = None
        #: Copies that the device is still to do, and what follows them.
        self._copies: list[tuple[IsDone, Callable[[], None]]] = []

    # What an engine calls.

    def poll(self) -> None:
        """Take in what the tiers have done since the last call. O(jobs that ended)."""
        while self._copies and self._copies[0][0]():
            self._copies.pop(0)[1]()
        for tier in {id(use.tier): use.tier for use in self.uses}.values():
            for outcome in tier.finished():
                self._end_job(outcome)
        if self._write_back is not None:
            self._write_back.learn(self._layout_now())
        if self._snapshot is not None:
            self._go_on(*self._snapshot)

    def prepare(
        self,
        key: Hashable,
        token_ids: Sequence[int],
        extra_keys: tuple[ExtraKey, ...] = (),
        *,
        may_load: bool = True,
    ) -> bool:
        """Says whether a waiting request's blocks are on their way; asks for them, and begins to load, where it pays.

        key: of the request, until `forget`. may_load: False to look for nothing, and only make the request known.
        False is the answer at the latest when computing would have been done. Call it before `allocate`, every time.
        O(blocks not named yet) the first time, and O(blocks) while a place is asked.
        """
        prompt = self._prompt(key, extra_keys)
        if prompt.is_over:
            return False
        if not may_load:
            prompt.is_over = True
            return False
        now = self._clock()
        if prompt.load is None:
            prompt.chain.extend(token_ids)
            self._look_up(key, prompt, token_ids, extra_keys, now)
        if prompt.load is not None and now > prompt.load.deadline:
            prompt.is_over = prompt.load.is_running
        return prompt.is_waiting

    def fill(self, key: Hashable, seq: int) -> int:
        """Write what was loaded for a request that was just admitted into its sequence's blocks, as computed tokens.

        Returns the tokens. Call it right after `allocate`; after an error the sequence is still to be freed. O(bytes).
        """
        prompt = self._prompts.get(key)
        if prompt is None:
            return 0
        prompt.is_over = prompt.is_admitted = True
        filled, cause, is_copied = 0, "late", None
        load = prompt.load
        try:
            if load is not None:
                cause = "late" if load.is_running else "failed"
                filled, is_copied = self._fill(seq, prompt, load)
        finally:
            if load is not None:
                self._drop_load(load, is_copied)
        self._count_missed(prompt, seq, cause)
        return filled

    def save(self, key: Hashable, seq: int, token_ids: Sequence[int], num_computed: int) -> int:
        """Store the full blocks among the first num_computed tokens that the tiers want and were not offered before.

        Call it when a step was computed, before `commit`: then the sequence holds all that the step wrote. Bytes are
        copied to buffers here; what finds no buffer is not stored. Returns the objects that are. O(bytes of these).
        """
        stop = num_computed // self._block_size
        prompt = self._prompts.get(key)
        # What was computed before the cache was reset may be of other weights.
        if prompt is None or prompt.num_saved >= stop or prompt.generation != self.cache.generation:
            return 0
        prompt.chain.extend(token_ids, stop)
        names = prompt.chain.names
        first, prompt.num_saved = prompt.num_saved, stop
        if self._write_back is not None:
            self._write_back.computed(self.cache.block_ids(seq)[first:stop])
        wanted = {
            use: chosen
            for use in self.uses
            if (chosen := {block for block in range(first, stop) if use.wants(names[block])})
        }
        return self._store(seq, prompt.chain, sorted(set().union(*wanted.values())), wanted) if wanted else 0

    def fork(self, parent: Hashable, keys: Iterable[Hashable]) -> None:
        """Further requests go on from one that runs, as `cache.fork` makes them. O(blocks) each."""
        prompt = self._prompts.get(parent)
        if prompt is not None:
            for key in keys:
                self._prompts[key] = replace(prompt, chain=prompt.chain.copy(), load=None)

    def forget(self, key: Hashable) -> None:
        """A request has ended, or goes back to the queue to be prepared again. O(blocks of its load)."""
        prompt = self._prompts.pop(key, None)
        load = None if prompt is None else prompt.load
        if load is not None:
            load.prompts.discard(key)
            if not load.prompts:
                self._drop_load(load)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Tell how long a step of num_tokens took: loads are begun only where they are sooner."""
        if num_tokens > 0 and seconds > 0.0:
            self._computing.note(num_tokens, seconds, 0.0)

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
        snapshot, end = self.begin_snapshot(path), monotonic() + seconds
        while not snapshot.is_done and monotonic() < end:
            self.poll()
            sleep(0.0005)
        return snapshot

    def restore(self, path: str | PathLike[str], seconds: float = 60.0) -> int:
        """Load the contents of a snapshot into the pool, as much as is free, before requests come; returns the tokens.

        The order of eviction comes back too. What the tiers do not have any more is left out, and so is what is not
        loaded after so many seconds. Raises `InvalidArgument`, with the reason, for a file of another model, layout or
        version, or none; nothing was loaded then.
        """
        contents = Contents.of(path, self._layout_now(), self._block_size)
        counted = self.missed.copy(), [use.num_hit_tokens for use in self.uses]
        end, most = monotonic() + seconds, int(self.cache.config.max_model_len) - 1
        before = self.cache.num_cached_blocks
        for tokens, keys in contents.prompts(self.cache.num_free_blocks - before - 1, most):
            while self._restore([*tokens, 0], keys, end):
                pass
        self.missed, hits = counted
        for use, num_tokens in zip(self.uses, hits, strict=True):
            use.num_hit_tokens = num_tokens  # what nobody asked for is no hit
        return (self.cache.num_cached_blocks - before) * self._block_size

    def is_storing(self, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] = ()) -> bool:
        """Says whether a block of a prompt is still on its way to a tier: another engine does not find it yet.

        O(blocks + blocks that are being stored).
        """
        self.poll()
        chain = NameChain(self._layout_now(), self._block_size, extra_keys)
        chain.extend(token_ids)
        names = set(chain.names)
        stores = (stored for _, piece, stored in self._jobs.values() if piece is None)
        return bool(self._copies) or any(not names.isdisjoint(stored) for stored in stores)

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for a question or a load."""
        return sum(prompt.is_waiting for prompt in self._prompts.values())

    def read(self) -> OffloadReading:
        """Returns what it did so far, and what its tiers did. O(prompts + causes)."""
        tiers = tuple(
            TierReading(use.tier.name, use.tier.stats(), use.num_hit_tokens, use.num_skipped) for use in self.uses
        )
        size, free = self.blocks.object_bytes, len(self._load_rows) + len(self._store_rows)
        rows = self.blocks.num_rows
        return OffloadReading(tiers, dict(self.missed), self.num_waiting, rows * size, (rows - free) * size)

    def settle(self, seconds: float) -> bool:
        """Wait until all jobs have ended, for tests and at a stop; says whether they did."""
        end = monotonic() + seconds
        while True:
            self.poll()
            if not self._jobs and not self._copies:
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
        pieces = {id(piece): piece for load in self._loads.values() for piece in load.pieces}
        pieces |= {id(piece): piece for _, piece, _ in self._jobs.values() if piece is not None}
        rows = [*self._load_rows, *self._store_rows, *np.flatnonzero(self._readers).tolist()]
        rows += [row for piece in pieces.values() for row in piece.rows]
        if not self._copies and sorted(rows) != list(range(self.blocks.num_rows)):
            raise InvariantError(f"offload: {len(rows)} rows are free or in use; there are {self.blocks.num_rows}")
        for load in self._loads.values():
            if not load.prompts or any(self._prompts[key].load is not load for key in load.prompts):
                raise InvariantError("offload: a load has no prompt, or one that does not know it")
        for key, prompt in self._prompts.items():
            if prompt.load is not None and key not in prompt.load.prompts:
                raise InvariantError("offload: a prompt waits for a load that does not know it")

    # Snapshots.

    def _go_on(self, use: TierUse, snapshot: Snapshot) -> None:
        """Store a part of what a snapshot has left, with half of the buffers that are free."""
        if not snapshot.require_going():
            return
        if snapshot.is_read:
            if not snapshot.jobs and not self._copies:
                snapshot.finish()
            return
        room = min(-(-len(self._store_rows) // 2), max(_JOB_BYTES // self.blocks.object_bytes, 1))
        if not room or len(snapshot.jobs) >= _SNAPSHOT_JOBS:
            return
        place, objects = snapshot.take(room)
        objects = [each for each in objects if each[1] not in use.known]
        if objects:
            ids = np.array([[block] for block, _, _ in objects], np.int32)
            self._copy_out(ids, objects, {use: {block for block, _, _ in objects}}, (snapshot, place))

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

    def _prompt(self, key: Hashable, extra_keys: tuple[ExtraKey, ...]) -> _Prompt:
        """Returns what is known of a waiting request, made new after the cache was reset."""
        prompt = self._prompts.get(key)
        if prompt is not None and not prompt.is_admitted and prompt.generation == self.cache.generation:
            return prompt
        self.forget(key)
        chain = NameChain(self._layout_now(), self._block_size, extra_keys)
        self._prompts[key] = prompt = _Prompt(chain, self.cache.generation, self._clock())
        return prompt

    def _layout_now(self) -> bytes:
        if self._generation != self.cache.generation:
            fields = {"blocks": dict(self.blocks.layout()), "model": dict(self._make_model())}
            self._layout, self._generation = layout_id(**fields), self.cache.generation
        return self._layout

    def _look_up(
        self,
        key: Hashable,
        prompt: _Prompt,
        token_ids: Sequence[int],
        extra_keys: tuple[ExtraKey, ...],
        now: float,
    ) -> None:
        """Ask the tiers for what the pool does not have, and begin to load it, or join a load of the same blocks."""
        names, usable = prompt.chain.names, (len(token_ids) - 1) // self._block_size
        cached = self.cache.num_cached_tokens(token_ids, extra_keys) // self._block_size
        if cached >= usable:
            prompt.is_over = True
            return
        shared = self._loads.get(names[cached])
        if shared is not None and shared.generation != prompt.generation:
            self._drop_load(shared)
        elif shared is not None:
            prompt.found = prompt.chosen = shared.pieces[-1].stop
            self._join(key, prompt, shared)
            return
        found, is_final = self._find(names, cached, usable)
        if not is_final and now - prompt.since <= self._patience(usable - cached):
            return
        prompt.found = found[-1][2] if found else cached
        prompt.cause = "absent" if is_final else "late"
        chosen = self._choose(prompt, found, now)
        prompt.chosen = chosen[-1][2] if chosen else cached
        prompt.is_over = not chosen or not self._begin(key, prompt, cached, chosen, now)

    def _find(self, names: list[bytes], first: int, usable: int) -> tuple[list[_Range], bool]:
        """Say which tier has which blocks, each from where the one before ends, and whether that is all they know."""
        found = []
        for use in self.uses:
            prefix = use.tier.longest_prefix(names[first:usable])
            if prefix.num_found:
                found.append((use, first, first + prefix.num_found))
                first += prefix.num_found
            if not prefix.is_final:
                return found, False
            for name in names[first:usable]:
                use.known.pop(name, None)  # what was evicted there is stored again when it is computed again
            if first == usable:
                break
        return found, True

    def _choose(self, prompt: _Prompt, found: list[_Range], now: float) -> list[_Range]:
        """Returns what is loaded: as far as there are buffers, and no tier is slower than computing."""
        chosen: list[_Range] = []
        room = len(self._load_rows)
        for use, first, stop in found:
            loading = use.cost.seconds((stop - first) * self.blocks.object_bytes, now)
            computing = self._seconds_to_compute(stop - first)
            if loading is not None and computing is not None and loading > computing:
                prompt.cause = "not_worth"
                break
            if room > 0:
                chosen.append((use, first, min(stop, first + room)))
            room -= stop - first
            if room < 0:
                prompt.cause = "no_buffers"
                break
        return chosen

    def _seconds_to_compute(self, num_blocks: int) -> float | None:
        """Returns what computing so many blocks takes, in steps of the most tokens; None if it is not known yet."""
        rounds, rest = divmod(num_blocks * self._block_size, self._step_tokens)
        whole, part = self._computing.seconds(self._step_tokens, 0.0), self._computing.seconds(rest, 0.0)
        return None if whole is None or part is None else rounds * whole + (part if rest else 0.0)

    def _patience(self, num_blocks: int) -> float:
        """Returns for how long blocks are waited for: until they would have been computed."""
        computing = self._seconds_to_compute(num_blocks)
        return _PATIENCE if computing is None else computing

    def _begin(self, key: Hashable, prompt: _Prompt, cached: int, chosen: list[_Range], now: float) -> bool:
        """Give the tiers their jobs, and say whether they took any; where one is refused, the load ends there."""
        load = _Load(prompt.chain.names, cached, prompt.generation, now + self._patience(prompt.chosen - cached))
        each = max(_JOB_BYTES // self.blocks.object_bytes, 1)
        for use, start, end in chosen:
            measure = _Measure()
            for first in range(start, end, each):
                piece = _Piece(use, first, min(first + each, end), measure)
                if not self._load_piece(prompt.chain, piece):
                    break
                measure.num_running += 1
                load.pieces.append(piece)
            if not load.pieces or load.pieces[-1].stop < end:
                break
        if load.pieces:
            self._loads[load.names[cached]] = load
            self._join(key, prompt, load)
        return bool(load.pieces)

    def _load_piece(self, chain: NameChain, piece: _Piece) -> bool:
        names, digests = chain.names[piece.first : piece.stop], chain.digests[piece.first : piece.stop]
        piece.rows = [self._load_rows.pop() for _ in names]
        self._last_job += 1
        job = Job(self._last_job, self._layout, names, digests, [self.blocks.buffer(row) for row in piece.rows])
        if piece.use.tier.load(job) is not None:
            self._load_rows += piece.rows
            return False
        self._jobs[job.id] = (piece.use, piece, names)
        return True

    def _join(self, key: Hashable, prompt: _Prompt, load: _Load) -> None:
        prompt.load = load
        load.prompts.add(key)

    # Ends of loads.

    def _fill(self, seq: int, prompt: _Prompt, load: _Load) -> tuple[int, IsDone | None]:
        """Write what is there of a load and is this prompt's, from where the pool's hit ends."""
        size, computed, done = self._block_size, int(self.cache.num_computed_tokens(seq)), load.done()
        usable = (int(self.cache.num_tokens(seq)) - 1) // size
        stop = min(done[-1].stop if done else load.first, usable)
        while stop > load.first and load.names[stop - 1] != prompt.chain.names[stop - 1]:
            stop -= 1  # the load is another prompt's, which goes on differently
        # Blocks before the load may have been evicted since, and a load of older weights is of no use.
        if computed < load.first * size or load.generation != self.cache.generation or stop * size <= computed:
            return 0, None
        rows = {piece.first + at: row for piece in done for at, row in enumerate(piece.rows)}
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

    def _count_missed(self, prompt: _Prompt, seq: int, cause: str) -> None:
        """Count the tokens that are to be computed though whole blocks of them could have been loaded, by cause."""
        size = self._block_size
        at, usable = int(self.cache.num_computed_tokens(seq)) // size, (int(self.cache.num_tokens(seq)) - 1) // size
        for stop, why in ((prompt.chosen, cause), (prompt.found, prompt.cause), (usable, "absent")):
            missing = min(stop, usable) - at
            if missing > 0:
                self.missed[why] += missing * size
                at += missing

    def _drop_load(self, load: _Load, is_copied: IsDone | None = None) -> None:
        """Give its rows back, those of jobs that run when `finished` names them; its prompts are on their own again.

        is_copied: tells when the device has read the rows.
        """
        if self._loads.get(load.names[load.first]) is not load:
            return
        del self._loads[load.names[load.first]]
        rows = []
        for piece in load.pieces:
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
        job = self._jobs.pop(outcome.id, None)
        if job is None:
            return
        use, piece, names = job
        if self._snapshot is not None and outcome.id in self._snapshot[1].jobs:
            self._snapshot[1].jobs.discard(outcome.id)
            if not outcome.is_done:
                self._snapshot[1].fail(f"{use.tier.name}: {next(iter(outcome.causes.values())).value}")
        if outcome.is_done:
            remember(use.known, names)
        else:
            for name in names:
                use.known.pop(name, None)
        if piece is None:
            self._release(self._stored_rows.pop(outcome.id))
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

    def _store(self, seq: int, chain: NameChain, places: list[int], wanted: dict[TierUse, set[int]]) -> int:
        """Copy blocks of a sequence to rows and give them to the tiers that want them; returns how many."""
        ids = self._block_ids(seq, places)
        held = np.flatnonzero(ids.all(axis=1)).tolist()  # those behind a window are gone
        taken = held[: len(self._store_rows)]
        for use, blocks in wanted.items():
            use.num_skipped += sum(places[at] in blocks for at in held[len(taken) :])
        if not taken:
            return 0
        objects = [(places[at], chain.names[places[at]], chain.digests[places[at]]) for at in taken]
        self._copy_out(ids[taken], objects, wanted)
        return len(taken)

    def _store_evicted(self, evicted: list[Evicted]) -> None:
        """Store what the pool has just evicted, where a tier that writes back does not have it."""
        evicted = list({each[1]: each for each in evicted}.values())  # equal blocks are one object
        wanted = {use: {block for block, name, _ in evicted if name not in use.known} for use in self._back}
        chosen = [each for each in evicted if any(each[0] in blocks for blocks in wanted.values())]
        taken = chosen[: len(self._store_rows)]
        for use, blocks in wanted.items():
            use.num_skipped += sum(each[0] in blocks for each in chosen[len(taken) :])
        if taken:
            self._copy_out(np.array([[block] for block, _, _ in taken], np.int32), taken, wanted)

    def _copy_out(
        self,
        ids: npt.NDArray[np.int32],
        objects: Sequence[tuple[int, bytes, bytes]],
        wanted: dict[TierUse, set[int]],
        taken_by: tuple[Snapshot, int] | None = None,
    ) -> None:
        """Copy blocks to rows and give each to the tiers that want it by its number, the first item of its object."""
        rows = [self._store_rows.pop() for _ in objects]
        self._hold(rows)
        is_copied = self.blocks.read(ids, rows)
        layout = self._layout

        def submit() -> None:
            for use, chosen in wanted.items():
                pairs = zip(objects, rows, strict=True)
                some = [(name, tokens, row) for (at, name, tokens), row in pairs if at in chosen]
                self._submit(use, layout, some, taken_by)
            self._release(rows)

        if is_copied is None:
            submit()
        else:
            self._copies.append((is_copied, submit))

    def _submit(
        self,
        use: TierUse,
        layout: bytes,
        objects: list[tuple[bytes, bytes, int]],
        taken_by: tuple[Snapshot, int] | None = None,
    ) -> None:
        each = max(_JOB_BYTES // self.blocks.object_bytes, 1)
        for first in range(0, len(objects), each):
            part = objects[first : first + each]
            names, rows = [name for name, _, _ in part], [row for _, _, row in part]
            self._last_job += 1
            buffers = [self.blocks.buffer(row) for row in rows]
            job = Job(self._last_job, layout, names, [digest for _, digest, _ in part], buffers)
            if use.tier.store(job) is not None:
                if taken_by is not None:
                    taken_by[0].go_back(taken_by[1])
                else:
                    use.num_skipped += len(names)
                continue
            if taken_by is not None:
                taken_by[0].jobs.add(job.id)
            self._jobs[job.id] = (use, None, names)
            self._stored_rows[job.id] = rows
            self._hold(rows)
            remember(use.known, names)

    def _hold(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._readers[row] += 1

    def _release(self, rows: Iterable[int]) -> None:
        """A job, or the copy before it, reads these rows no more."""
        for row in rows:
            self._readers[row] -= 1
            if not self._readers[row]:
                self._store_rows.append(row)

    def _block_ids(self, seq: int, places: Sequence[int]) -> npt.NDArray[np.int32]:
        """Returns the blocks at some places of a sequence, (n, groups); 0 where one is gone."""
        columns = [self.cache.block_ids(seq, group)[list(places)] for group in range(self._num_groups)]
        return np.stack(columns, axis=1)


def require_offloadable(cache: KVCacheManager) -> None:
    """Raise `InvalidArgument` for a cache whose blocks an offload cannot name or fill yet."""
    config = cache.config
    if not config.enable_prefix_caching:
        raise InvalidArgument("enable_prefix_caching is False; tiers need it: what they bring is a prefix")
    if config.state_group is not None:
        raise InvalidArgument(f"tiers keep no states yet; groups has the state group {config.state_group.name!r}")
    for number, group in enumerate(config.layer_groups):
        if group.shards > 1:
            raise InvalidArgument(f"tiers need whole blocks; groups[{number}] has {group.shards} shards")
        if group.block_size != config.layer_groups[0].block_size:
            raise InvalidArgument(
                f"tiers need one block size; groups[0] has {config.layer_groups[0].block_size} tokens a block, "
                f"groups[{number}] {group.block_size}"
            )
    if config.max_steps_in_flight > 1:
        raise InvalidArgument(f"max_steps_in_flight is {config.max_steps_in_flight}; with tiers it must be 1")
