"""A device with states: what plans say is carried out on memory that knows which tokens every state is of."""

from __future__ import annotations

from typing import Any

from blockyard import KVCacheManager, StepPlan

State = tuple[int, ...]


class StateMemory:
    """slots: the tokens that each working state is the sum of. blocks: what each block of the pool holds.

    Everything else is poison: a slot that was never filled, a block that keys and values were written to.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.slots: dict[int, State] = {}
        self.blocks: dict[int, tuple[State, int]] = {}
        self.num_saved = 0
        self.num_loaded = 0

    def prepare(self, plan: StepPlan) -> None:
        """What comes before the step, whether it is run or not."""
        moves = plan.states
        for source, target in moves.copies.tolist():
            self.slots[target] = self.slots[source]
        for slot in moves.clears.tolist():
            self.slots[slot] = ()
        for slot, blocks in zip(moves.loads.tolist(), moves.load_blocks.tolist(), strict=True):
            parts = [self.blocks[block] for block in blocks]
            assert [part for _, part in parts] == list(range(len(blocks)))
            assert len({state for state, _ in parts}) == 1
            self.slots[slot] = parts[0][0]
            self.num_loaded += 1

    def run(self, plan: StepPlan, seqs: list[int], known: dict[int, list[int]]) -> None:
        """The step itself: states are those of the tokens before, keys and values overwrite, and states are saved.

        known: the tokens of each sequence, those that are only drafted included.
        """
        starts, counts = plan.num_computed.tolist(), plan.num_scheduled.tolist()
        for number in range(len(plan.groups)):
            for table, count in zip(plan.groups[number].block_tables.tolist(), counts, strict=True):
                for block in table if count else []:
                    self.blocks.pop(block, None)
        saves: dict[int, list[tuple[int, list[int]]]] = {}
        moves = plan.states
        for slot, position, blocks in zip(
            moves.saves.tolist(), moves.save_positions.tolist(), moves.save_blocks.tolist(), strict=True
        ):
            saves.setdefault(slot, []).append((position, blocks))
        for row, seq, start, count in zip(plan.rows.tolist(), seqs, starts, counts, strict=True):
            if count == 0:
                assert row not in saves
                continue
            tokens = tuple(known[seq])
            assert self.slots[row] == tokens[:start], f"the state of sequence {seq} is that of others"
            self.slots[row] = tokens[: start + count]
            for position, blocks in saves.pop(row, []):
                assert start < position <= start + count
                for part, block in enumerate(blocks):
                    assert block not in {int(other) for other in self.cache.block_ids(seq)}
                    self.blocks[block] = (tokens[:position], part)
                self.num_saved += 1
        assert not saves

    def settle(self, row: int, tokens: list[int], num_computed: int) -> None:
        """What a commit asks of the engine: the slot has the state of what is computed."""
        self.slots[row] = tuple(tokens[:num_computed])


def compute(cache: KVCacheManager, memory: StateMemory, seq: int, tokens: list[int], output: list[int]) -> None:
    """Prefill and decode one sequence alone, step after step."""
    for token in [*output, None]:
        while cache.num_computed_tokens(seq) < len(tokens):
            plan = cache.reserve([seq])
            assert plan.all_fit
            memory.prepare(plan)
            memory.run(plan, [seq], {seq: tokens})
            count = int(plan.num_scheduled[0])
            is_last = plan.seq_lens.tolist() == [len(tokens)]
            new: Any = [token] if is_last and token is not None else None
            cache.commit([seq], count, new)
            cache.check()
        if token is not None:
            tokens.append(token)
