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
from os import PathLike
from time import monotonic, sleep
from typing import Any

from blockyard import KVCacheManager, StepPlan
from blockyard.arguments import require_int, require_number, shown
from blockyard.errors import InvalidArgument, InvariantError
from blockyard.keys import ExtraKey

from .context import Context
from .finding import Finder
from .header import NameChain
from .loading import Loader
from .loads import Prompt
from .memory import Blocks, States
from .offload_arguments import require_arguments, require_key
from .saving import Saver
from .snapshot import Contents, Snapshot
from .tier import Tier
from .uses import OffloadReading, TierReading, TierUse

#: Why prompt tokens that the pool did not have were computed and not loaded.
MISS_CAUSES = ("absent", "not_worth", "late", "failed", "no_buffers", "no_state")


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
        make_model = model if callable(model) else lambda: model
        self._context = context = Context(cache, blocks, states, self.uses, make_model, clock)
        self._clock, self._block_size, self._prompts = clock, context.block_size, context.prompts
        half = max(blocks.num_rows // 2, 1)
        step = config.hit_alignment // context.block_size
        self._finder = Finder(self.uses, context.block_size, blocks.object_bytes, step_tokens, states, step)
        self._loader = Loader(context, list(range(half)), self._finder, on_plan, self.missed)
        self._saver = Saver(context, list(range(half, blocks.num_rows)))

    # What an engine calls.

    def poll(self) -> None:
        """Take in what the tiers have done since the last call. O(jobs that ended)."""
        self._loader.begin_turn()
        self._context.end_copies()
        for tier in {id(use.tier): use.tier for use in self.uses}.values():
            for outcome in tier.finished():
                if not self._loader.end(outcome):
                    self._saver.end(outcome)
        self._saver.go_on()

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
        self._loader.prepare(key, prompt, token_ids, extra_keys, will_start)
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
        if self._context.states is not None:
            hit, num_tokens = int(self.cache.num_computed_tokens(seq)), int(self.cache.num_tokens(seq))
            prompt.kept, prompt.last = ([hit] if hit else []), num_tokens - 1
        return self._loader.fill(seq, prompt)

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
        prompt = self._prompts.get(require_key("key", key))
        # What was computed before the cache was reset may be of other weights.
        if prompt is None or prompt.generation != self.cache.generation:
            return 0
        return self._saver.save(prompt, require_int("seq", seq, 0, 2**63 - 1), token_ids, num_computed, states)

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
        if prompt is None:
            return
        if prompt.kept and prompt.generation == self.cache.generation:
            self._saver.store_states(prompt, prompt.take_kept() + prompt.kept)
        self._loader.leave(key, prompt)

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
        running = self._saver.snapshot
        if running is not None and not running.is_done:
            raise InvalidArgument(f"a snapshot at {str(running.path)!r} is being taken; one at a time")
        snapshot = Snapshot(path, self.cache, self._context.layout())
        self._saver.begin_snapshot(snapshot, use)
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
        contents = Contents.of(path, self._context.layout(), self._block_size)
        counted = self.missed.copy(), [use.num_hit_tokens for use in self.uses]
        end, most = monotonic() + limit, int(self.cache.config.max_model_len) - 1
        before = self.cache.num_cached_blocks
        try:
            for tokens, keys in contents.prompts(self.cache.num_free_blocks - before - 1, most):
                while self._restore([*tokens, 0], keys, end):
                    pass
        finally:
            self.cache.pool.publish_events()
        self.missed.clear()
        self.missed.update(counted[0])
        for use, num_tokens in zip(self.uses, counted[1], strict=True):
            use.num_hit_tokens = num_tokens  # what was not asked for is no hit
        return (self.cache.num_cached_blocks - before) * self._block_size

    def is_storing(self, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...] = ()) -> bool:
        """Says whether a block or state of a prompt is still on its way to a tier: another engine does not find it yet.

        O(blocks + blocks that are being stored).
        """
        self.poll()
        chain = NameChain(self._context.layout(), self._block_size, extra_keys)
        chain.extend(token_ids)
        return bool(self._context.copies) or not self._context.names(chain).isdisjoint(self._saver.stores.names())

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for a question or a load."""
        return sum(prompt.is_waiting for prompt in self._prompts.values())

    def read(self) -> OffloadReading:
        """Returns what it did so far, and what its tiers did. O(prompts + causes)."""
        tiers = tuple(
            TierReading(use.tier.name, use.tier.stats(), use.num_hit_tokens, use.num_skipped) for use in self.uses
        )
        size, free = self.blocks.object_bytes, len(self._loader.free) + len(self._saver.stores.free)
        rows = self.blocks.num_rows
        return OffloadReading(tiers, dict(self.missed), self.num_waiting, rows * size, (rows - free) * size)

    def settle(self, seconds: float) -> bool:
        """Wait until all jobs have ended, for tests and at a stop; says whether they did."""
        end = monotonic() + require_number("seconds", seconds)
        while True:
            self.poll()
            if not self._loader.jobs and not self._saver.stores.jobs and not self._context.copies:
                return True
            if monotonic() >= end:
                return False
            sleep(0.001)

    def close(self, seconds: float = 5.0) -> bool:
        """Let what is being stored end, for so long, then close the tiers; says whether all ended. Twice is once."""
        for key in list(self._prompts):
            self.forget(key)
        settled = self.settle(seconds)
        self._saver.close()
        closed = [use.tier.close() for use in self.uses]
        self.poll()
        return settled and all(closed)

    def check(self) -> None:
        """Raise `InvariantError` unless each row is free, or a load's, or read by stores, and loads know their prompts.

        O(rows + prompts).
        """
        rows = [*self._loader.rows(), *self._saver.stores.rows()]
        if not self._context.copies and sorted(rows) != list(range(self.blocks.num_rows)):
            raise InvariantError(f"offload: {len(rows)} rows are free or in use; there are {self.blocks.num_rows}")
        self._loader.check()

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

    # Requests.

    def _prompt(self, key: Hashable, extra_keys: tuple[ExtraKey, ...]) -> Prompt:
        """Return the record of a waiting request; a new one after the cache was reset."""
        prompt = self._prompts.get(require_key("key", key))
        if prompt is not None and not prompt.is_admitted and prompt.generation == self.cache.generation:
            return prompt
        chain = NameChain(self._context.layout(), self._block_size, extra_keys)
        self.forget(key)
        self._prompts[key] = prompt = Prompt(chain, self.cache.generation, self._clock(), extra_keys=extra_keys)
        return prompt
