"""A cache with states beside a data plane that carries out its plans."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import blockyard
from blockyard import InvalidArgument, LayerGroup, StateHints, StateSpec

from .world import World
from .world_memory import NOTHING, Memory, Seq


class StatesOnADataPlane(World):
    """A world whose cache has states; a state has the name of the last token that it is the sum of."""

    def __init__(self, package: ModuleType, seed: int) -> None:
        super().__init__(package, seed)
        #: By slot, the name of its state, 0 of no tokens; and by block of the pool, that of a state and which part.
        self.slots: dict[int, int] = {}
        self.parts: dict[int, tuple[int, int]] = {}
        #: Of the step that is carried out, the row of each sequence.
        self.rows: dict[int, int] = {}
        #: Of sequences without a state, behind how many tokens one is brought.
        self.lacking: dict[int, int] = {}

    def choose_config(self) -> Any:
        choose = self.random
        while True:
            size = choose.choice((1, 2, 4))
            sizes = [size * choose.choice((1, 1, 2)) for _ in range(choose.choice((1, 1, 2, 3)))]
            windows = [choose.choice((0, 0, choose.randint(1, 9))) for _ in sizes]
            groups = [LayerGroup(s, w, token_bytes=choose.choice((8, 4))) for s, w in zip(sizes, windows, strict=True)]
            for _ in range(choose.choice((1, 1, 2))):
                state = StateSpec(
                    checkpoint_every=choose.choice(sizes), state_bytes=choose.choice((1, 8, 24, 60)) * size
                )
                groups.insert(choose.randrange(len(groups) + 1), state)
            settings = {**self.more_config(tuple(groups), size), "partial_hits": False}
            try:
                return blockyard.config.cache_config(
                    choose.choice((choose.randint(8, 20), choose.randint(20, 120))),
                    groups=tuple(groups),
                    max_num_seqs=choose.choice((1, 3, 8)),
                    max_model_len=choose.randint(4, 40) * size,
                    num_cpu_blocks=choose.choice((0, 0, choose.randint(3, 12), 60)),
                    keep_evicted=choose.random() < 0.7,
                    state_order=choose.choice(("index", "index", "lru")),
                    state_checkpoints=choose.choice(
                        (("branch", "ends", "pow2"), ("last",), ("every:8",), ("ends",), ())
                    ),
                    cut_chunks=choose.random() < 0.7,
                    **settings,
                )
            except InvalidArgument:  # a pool that is too small for one state
                continue

    def actors(self) -> list[tuple[Any, float]]:
        return [*super().actors(), (self.skip_states, 1), (self.state_blocks, 2), (self.bring, 3)]

    # The memory.

    def write_over(self, block: int, group: int) -> None:
        """What else stood in a block is gone."""
        self.parts.pop(block, None)
        for number, blocks in enumerate(self.gpu.blocks):
            if number != group:
                blocks[block] = NOTHING

    def move(self, pairs: Any, groups: Any, source: Memory, target: Memory) -> None:
        super().move(pairs, groups, source, target)
        if target is self.gpu:
            for block, group in zip(pairs[:, 1].tolist(), groups.tolist(), strict=True):
                self.write_over(block, group)

    def write(self, plan: Any, seqs: list[Seq], group: int, fails: bool) -> None:
        for block in {slot // self.sizes[group] for slot in plan.groups[group].slot_mapping.tolist()}:
            self.write_over(block, group)
        super().write(plan, seqs, group, fails)

    def carry_out(self, plan: Any) -> None:
        super().carry_out(plan)
        if not hasattr(plan, "states"):
            return
        moves = plan.states
        for source, target in moves.copies.tolist():
            self.slots[target] = self.slots[source]
        for slot in moves.clears.tolist():
            self.slots[slot] = 0
        for slot, blocks in zip(moves.loads.tolist(), moves.load_blocks.tolist(), strict=True):
            names = {self.parts[block][0] for block in blocks}
            assert [self.parts[block][1] for block in blocks] == list(range(len(blocks)))
            (self.slots[slot],) = names
            self.counts["states loaded"] += 1

    def read(self, plan: Any, index: int, seq: Seq, count: int) -> None:
        super().read(plan, index, seq, count)
        slot, start = int(plan.rows[index]), int(plan.num_computed[index])
        names = [0, *self.names(seq, seq.tokens + seq.drafts)]
        if start < self.lacking.get(seq.handle, 0):
            assert start + count >= self.lacking[seq.handle]
            self.slots[slot] = names[start]  # that behind the step is brought, as if it were computed
            self.counts["states brought"] += 1
        assert self.slots[slot] == names[start], f"{self.seed}: the state behind {start} tokens is another's"
        moves = plan.states
        saves = zip(moves.saves.tolist(), moves.save_positions.tolist(), moves.save_blocks.tolist(), strict=True)
        for position, blocks in ((position, blocks) for saved, position, blocks in saves if saved == slot):
            assert position <= start + count
            assert start < position or start < self.lacking.get(seq.handle, 0)
            for part, block in enumerate(blocks):
                self.write_over(block, NOTHING)
                self.parts[block] = names[position], part

    def compute(self, plan: Any, seqs: list[Seq]) -> None:
        self.rows = dict(zip([seq.handle for seq in seqs], plan.rows.tolist(), strict=True))
        super().compute(plan, seqs)

    def commit(self, done: list[tuple[Seq, int]], fails: bool) -> None:
        """Afterwards each slot has the state of what is computed, as a commit asks of the engine."""
        super().commit(done, fails)
        for seq, _ in done:
            computed = int(self.cache.num_computed_tokens(seq.handle))
            is_there = computed >= self.lacking.get(seq.handle, 0)
            self.slots[self.rows[seq.handle]] = [0, *self.names(seq, seq.tokens)][computed] if is_there else NOTHING

    # What else happens.

    def skip_states(self) -> None:
        seq = self.one()
        if seq is not None:
            count = self.random.randint(0, len(seq.tokens))
            self.cache.states.skip(seq.handle, count, checkpoint=self.random.choice((0, self.random.randint(0, count))))

    def bring(self) -> int:
        """A prompt whose state is to come from outside: in one of its steps, or never."""
        earlier = self.earlier()
        tokens, keys = self.prompt(earlier), self.keys(earlier)
        brought = self.random.randint(0, len(tokens))
        without = self.cache.num_cached_tokens(tokens, extra_keys=keys)
        seq = Seq(
            self.cache.allocate(tokens, extra_keys=keys, states=StateHints(external_state_tokens=brought)),
            tokens,
            keys,
            (),
            self.cache.generation,
        )
        self.add(seq)
        hit = int(self.cache.num_computed_tokens(seq.handle))
        assert hit == without or without < hit < brought
        if hit > without:
            self.lacking[seq.handle] = brought
        return hit

    def fork(self) -> int | None:
        known = {seq.handle for seq in self.seqs}
        result = super().fork()
        self.note_children(known)
        return result

    def regroup(self) -> Any:
        known = {seq.handle for seq in self.seqs}
        result = super().regroup()
        self.note_children(known)
        return result

    def note_children(self, known: set[int]) -> None:
        """A fork of a sequence without a state has none either."""
        for seq in self.seqs:
            if seq.handle not in known:
                alike = (self.lacking.get(each.handle, 0) for each in self.seqs if each.tokens == seq.tokens)
                self.lacking[seq.handle] = max(alike)

    def state_blocks(self) -> None:
        """What it finds is the state of these very tokens."""
        seq = self.earlier()
        if seq is None or seq.spans or seq.generation != self.cache.generation:
            return
        count = self.random.randint(1, len(seq.tokens))
        found = self.cache.states.blocks(seq.tokens[:count], extra_keys=seq.keys).tolist()
        name = self.names(seq, seq.tokens)[count - 1]
        assert [self.parts[block] for block in found] == [(name, part) for part in range(len(found))]
        self.counts["states found"] += len(found) > 0
