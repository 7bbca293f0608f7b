"""Stores what is computed: as it is computed, when the pool evicts it, and for a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from blockyard.errors import InvalidArgument

from .context import Context
from .header import NameChain
from .loads import Prompt
from .snapshot import Snapshot
from .states import keys_before, state_name
from .stores import Stores
from .tier import Outcome
from .uses import TierUse, wanted_by
from .write_back import Evicted, WriteBack

#: Jobs of a snapshot at once: what requests store goes between.
_SNAPSHOT_JOBS = 4


class Saver:
    """Copies blocks and states that tiers want into host buffers, and gives them to the tiers.

    Args:
        context: what storing and loading share.
        rows: the buffers for stores.
    """

    def __init__(self, context: Context, rows: list[int]) -> None:
        self.stores = Stores(context.blocks, rows, context.numbers, context.copies)
        self.snapshot: Snapshot | None = None
        self._snapshot_use: TierUse | None = None
        self._context = context
        self._cache, self._states, self._block_size = context.cache, context.states, context.block_size
        self._uses = context.uses
        self._back = [use for use in context.uses if use.write == "back"]
        self._write_back = WriteBack(context.cache, self._store_evicted, self._is_stored_back) if self._back else None

    def save(self, prompt: Prompt, seq: int, token_ids: Sequence[int], num_computed: int, states: Sequence[int]) -> int:
        """Store what a step computed of a sequence, as `Offload.save`, and return the number of objects."""
        stop = num_computed // self._block_size
        computed = self._cache.num_computed_tokens(seq)
        if stop > prompt.num_saved or computed < prompt.num_saved * self._block_size:
            prompt.look_for_cut(computed // self._block_size, token_ids, stop)
        if prompt.is_lost:
            return 0
        if self._states is not None:
            prompt.token_ids = token_ids
            self.store_states(prompt, prompt.take_kept(boundary for boundary in states if boundary <= num_computed))
        if prompt.num_saved >= stop:
            return 0
        prompt.chain.extend(token_ids, stop)
        if len(prompt.chain.names) < stop:
            raise InvalidArgument(f"num_computed is {num_computed}; token_ids has {len(token_ids)} tokens")
        first, prompt.num_saved = prompt.num_saved, stop
        if self._write_back is not None:
            self._write_back.computed(self._cache.block_ids(seq)[first:stop])
        wanted = wanted_by(self._uses, prompt.chain.names, first, stop)
        return self._store(seq, prompt.chain, sorted(set().union(*wanted.values())), wanted) if wanted else 0

    def go_on(self) -> None:
        """Store evicted blocks that had no buffer, and the next part of a snapshot. Called in each `Offload.poll`."""
        if self._write_back is not None:
            self._write_back.learn(self._context.layout())
            if self.stores.free:
                self._write_back.store_missing()
        if self.snapshot is not None and self._snapshot_use is not None:
            self._go_on_with(self.snapshot, self._snapshot_use)

    def begin_snapshot(self, snapshot: Snapshot, use: TierUse) -> None:
        """Store the objects of a snapshot in a tier, a part in each call of `go_on`."""
        self.snapshot, self._snapshot_use = snapshot, use

    def end(self, outcome: Outcome) -> None:
        """Take in the outcome of a job."""
        stored = self.stores.end(outcome.id)
        if stored is None:
            return
        use, names = stored
        if self.snapshot is not None and outcome.id in self.snapshot.jobs:
            self.snapshot.jobs.discard(outcome.id)
            if not outcome.is_done:
                self.snapshot.fail(f"{use.tier.name}: {next(iter(outcome.causes.values())).value}")
        use.note_presence(names, outcome.is_done)
        if not outcome.is_done and use.write == "back" and self._write_back is not None:
            self._write_back.fail(names)

    def close(self) -> None:
        """Take no more blocks that the pool evicts."""
        if self._write_back is not None:
            self._write_back.close()

    def _go_on_with(self, snapshot: Snapshot, use: TierUse) -> None:
        """Store a part of what a snapshot has left, in half of the free buffers."""
        if not snapshot.require_going():
            return
        if snapshot.is_read:
            if not snapshot.jobs and not self._context.copies:
                snapshot.finish()
            return
        room = min(-(-len(self.stores.free) // 2), self.stores.job_objects)
        if not room or len(snapshot.jobs) >= _SNAPSHOT_JOBS:
            return
        place, objects = snapshot.take(room)
        objects = [each for each in objects if each[1] not in use.known]
        if objects:
            ids = np.array([[block] for block, _, _ in objects], np.int32)
            wanted = {use: {block for block, _, _ in objects}}
            self.stores.copy_out(ids, objects, wanted, self._context.layout(), (snapshot, place))

    def store_states(self, prompt: Prompt, boundaries: Iterable[int]) -> None:
        """Store the states at these boundaries of a prompt that tiers want, where they are kept."""
        states, chain = self._states, prompt.chain
        for boundary in boundaries:
            at, keys = boundary // self._block_size - 1, keys_before(prompt.extra_keys, boundary)
            if states is None or keys is None or at >= len(chain.names):
                continue
            name = state_name(self._context.state_layout, chain.names[at])
            uses = [use for use in self._uses if use.wants(name)]
            if not uses:
                continue
            ids = self._cache.states.blocks(prompt.token_ids[:boundary], extra_keys=keys)
            if not len(ids):
                continue
            if len(self.stores.free) < states.num_rows:
                for use in uses:
                    use.num_skipped += 1
                continue
            rows = self.stores.take(states.num_rows)
            found = (name, chain.digests[at], states.buffers(rows), rows)
            self.stores.give(rows, states.read(ids, rows), [(use, [found]) for use in uses], self._context.state_layout)

    def _store(self, seq: int, chain: NameChain, places: list[int], wanted: dict[TierUse, set[int]]) -> int:
        """Copy blocks of a sequence to rows and give them to the tiers that want them; returns how many."""
        ids = self._context.block_ids(seq, places)
        held = np.flatnonzero(ids.all(axis=1)).tolist()  # those behind a window are gone
        taken = held[: len(self.stores.free)]
        for use, blocks in wanted.items():
            use.num_skipped += sum(places[at] in blocks for at in held[len(taken) :])
        if not taken:
            return 0
        objects = [(places[at], chain.names[places[at]], chain.digests[places[at]]) for at in taken]
        self.stores.copy_out(ids[taken], objects, wanted, self._context.layout())
        return len(taken)

    def _is_stored_back(self, name: bytes) -> bool:
        return all(name in use.known for use in self._back)

    def _store_evicted(self, objects: list[Evicted]) -> list[bytes]:
        """Store blocks of the pool, each behind what it hangs on, where a tier that writes back does not have them.

        Return the names of those for which no buffer was free.
        """
        assert self._write_back is not None
        wanted = {use: {block for block, name, _ in objects if name not in use.known} for use in self._back}
        taken = objects[: len(self.stores.free)]
        if taken:
            ids = np.array([[block] for block, _, _ in taken], np.int32)
            self.stores.copy_out(ids, taken, wanted, self._context.layout())
        left = objects[len(taken) :]
        for use, blocks in wanted.items():
            use.num_skipped += sum(block in blocks and name not in self._write_back for block, name, _ in left)
        self._write_back.fail(self.stores.refused)
        self.stores.refused = []
        return [name for _, name, _ in left]
