"""Stores computed blocks and states: when they are computed, when the pool evicts them, and for a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from blockyard.errors import InvalidArgument

from .context import Context
from .header import NameChain
from .snapshot import NamedBlock, Snapshot
from .state_names import keys_before, state_name
from .store_buffers import BufferedObject, StoreBuffers
from .tier import TransferResult
from .transfers import RequestRecord
from .uses import TierUse, choose_blocks
from .write_back import WriteBack

#: Transfers of a snapshot at once, so that requests can store in between.
_SNAPSHOT_TRANSFERS = 4


class Saver:
    """Copies the blocks and states that tiers want into host buffers, and stores them from there.

    Args:
        context: objects shared by storing and loading.
        rows: the buffers for stores.
    """

    def __init__(self, context: Context, rows: list[int]) -> None:
        self.buffers = StoreBuffers(context.blocks, rows, context.numbers, context.copies)
        self.snapshot: Snapshot | None = None
        self._snapshot_use: TierUse | None = None
        self._context = context
        self._cache, self._states, self._block_size = context.cache, context.states, context.block_size
        self._uses = context.uses
        self._back_uses = back = [use for use in context.uses if use.write == "back"]
        self._write_back: WriteBack | None = None
        if back:
            self._write_back = WriteBack(
                context.cache, self._store_evicted, lambda name: all(name in use.present for use in back)
            )

    def save(
        self, record: RequestRecord, seq: int, token_ids: Sequence[int], num_computed: int, states: Sequence[int]
    ) -> int:
        """Store the blocks that a step computed of a sequence, as `Offload.save`, and return the number of objects."""
        stop = num_computed // self._block_size
        computed = self._cache.num_computed_tokens(seq)
        if stop > record.num_offered or computed < record.num_offered * self._block_size:
            record.note_truncation(computed // self._block_size, token_ids, stop)
        if record.is_excluded:
            return 0
        if self._states is not None:
            record.token_ids = token_ids
            saved = (position for position in states if position <= num_computed)
            self.store_states(record, record.take_state_positions(saved))
        if record.num_offered >= stop:
            return 0
        record.chain.extend(token_ids, stop)
        if len(record.chain.names) < stop:
            raise InvalidArgument(
                f"num_computed is {num_computed}; token_ids has {len(token_ids)} tokens: pass all computed tokens"
            )
        first = record.num_offered
        if self._write_back is not None:
            self._write_back.note_computed(self._cache.block_ids(seq)[first:stop])
        wanted = choose_blocks(self._uses, record.chain.names, first, stop)
        stored = self._store(seq, record.chain, sorted(set().union(*wanted.values())), wanted) if wanted else 0
        record.num_offered = stop
        return stored

    def poll(self) -> None:
        """Store evicted blocks that found no buffer, and the next part of a snapshot. Called in `Offload.poll`."""
        if self._write_back is not None:
            self._write_back.name_computed(self._context.layout())
            if self.buffers.free:
                self._write_back.store_missing()
        if self.snapshot is not None and self._snapshot_use is not None:
            self._continue_snapshot(self.snapshot, self._snapshot_use)

    def begin_snapshot(self, snapshot: Snapshot, use: TierUse) -> None:
        """Store the objects of a snapshot in a tier, a part in each call of `poll`."""
        self.snapshot, self._snapshot_use = snapshot, use

    def end(self, result: TransferResult) -> None:
        """Process the result of a transfer."""
        transfer = self.buffers.end(result.id)
        if transfer is None:
            return
        use, names = transfer.use, transfer.names
        if self.snapshot is not None and result.id in self.snapshot.transfer_ids:
            self.snapshot.transfer_ids.discard(result.id)
            if not result.is_done:
                self.snapshot.fail(f"{use.tier.name}: {next(iter(result.causes.values())).value}")
        use.note_presence(names, result.is_done)
        if not result.is_done and use.write == "back" and self._write_back is not None:
            self._write_back.note_failed(names)

    def close(self) -> None:
        """Stop storing blocks that the pool evicts."""
        if self._write_back is not None:
            self._write_back.close()

    def _continue_snapshot(self, snapshot: Snapshot, use: TierUse) -> None:
        """Store the next part of a snapshot, in at most half of the free buffers."""
        if not snapshot.needs_stores():
            return
        if snapshot.is_read:
            if not snapshot.transfer_ids and not self._context.copies:
                snapshot.finish()
            return
        room = min(-(-len(self.buffers.free) // 2), self.buffers.transfer_objects)
        if not room or len(snapshot.transfer_ids) >= _SNAPSHOT_TRANSFERS:
            return
        position = snapshot.position
        try:
            objects = [each for each in snapshot.take(room) if each.name not in use.present]
            if objects:
                ids = np.array([[each.block] for each in objects], np.int32)
                wanted = {use: {each.block for each in objects}}
                self.buffers.copy_out(ids, objects, wanted, self._context.layout(), (snapshot, position))
        except BaseException:
            snapshot.go_back(position)
            raise

    def store_states(self, record: RequestRecord, positions: Iterable[int]) -> None:
        """Store the states at these positions of a prompt that the cache has and tiers want."""
        states, chain = self._states, record.chain
        for position in positions:
            block, keys = position // self._block_size - 1, keys_before(record.extra_keys, position)
            if states is None or keys is None or block >= len(chain.names):
                continue
            name = state_name(self._context.state_layout, chain.names[block])
            uses = [use for use in self._uses if use.wants(name)]
            if not uses:
                continue
            ids = self._cache.states.blocks(record.token_ids[:position], extra_keys=keys)
            if not len(ids):
                continue
            if len(self.buffers.free) < states.num_rows:
                for use in uses:
                    use.num_skipped += 1
                continue
            rows = self.buffers.take(states.num_rows)
            found = BufferedObject(name, chain.digests[block], states.buffers(rows), rows)
            is_copied = states.read(ids, rows)
            self.buffers.submit(rows, is_copied, [(use, [found]) for use in uses], self._context.state_layout)

    def _store(self, seq: int, chain: NameChain, positions: list[int], wanted: dict[TierUse, set[int]]) -> int:
        """Store blocks of a sequence in the tiers that want them, and return their number."""
        ids = self._context.block_ids(seq, positions)
        held = np.flatnonzero(ids.all(axis=1)).tolist()  # blocks before a window were released
        fitting = held[: len(self.buffers.free)]
        for use, blocks in wanted.items():
            use.num_skipped += sum(positions[at] in blocks for at in held[len(fitting) :])
        if not fitting:
            return 0
        objects = [
            NamedBlock(position, chain.names[position], chain.digests[position])
            for position in (positions[at] for at in fitting)
        ]
        self.buffers.copy_out(ids[fitting], objects, wanted, self._context.layout())
        return len(fitting)

    def _store_evicted(self, objects: list[NamedBlock]) -> list[bytes]:
        """Store evicted blocks, each after its prefix, in the tiers with write="back" that do not have them.

        Return the names of the blocks that found no free buffer.
        """
        assert self._write_back is not None
        try:
            return self._store_each(self._write_back, objects)
        except BaseException as error:
            self._context.note_failure(error)
            raise

    def _store_each(self, write_back: WriteBack, objects: list[NamedBlock]) -> list[bytes]:
        wanted = {use: {each.block for each in objects if each.name not in use.present} for use in self._back_uses}
        fitting = objects[: len(self.buffers.free)]
        if fitting:
            ids = np.array([[each.block] for each in fitting], np.int32)
            self.buffers.copy_out(ids, fitting, wanted, self._context.layout())
        rest = objects[len(fitting) :]
        for use, blocks in wanted.items():
            use.num_skipped += sum(each.block in blocks and each.name not in write_back for each in rest)
        write_back.note_failed(self.buffers.refused_names)
        self.buffers.refused_names = []
        return [each.name for each in rest]
