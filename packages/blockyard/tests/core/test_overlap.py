"""Several steps in flight: which orders of calls are right while the data plane is behind.

The data plane here is a queue: what a plan says is copied out of it at once, and carried out later, in the order in
which plans were made. What attention would read is read back at that time and compared, token by token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import blockyard
from blockyard import SeqStatus
from blockyard_testing.seeds import draws, run_seed
from blockyard_testing.world import World
from blockyard_testing.world_memory import Seq

from ..support.checked import Checked, prompt


def test_two_steps_of_other_sequences_may_be_in_flight() -> None:
    """They may end in any order, and arrays read from a plan before the next call stay valid."""
    for order in ((0, 1), (1, 0)):
        cache = Checked()
        seqs = [cache.allocate(prompt(number, 6)) for number in (1, 2)]
        plans = []
        for seq in seqs:
            plan = cache.reserve([seq])
            plans.append((plan.slot_mapping.tolist(), plan.block_tables.tolist(), plan.input_ids.tolist()))
        assert plans[0] == ([4, 5, 6, 7, 8, 9], [[1, 2]], prompt(1, 6))
        assert plans[1] == ([12, 13, 14, 15, 16, 17], [[3, 4]], prompt(2, 6))
        for index in order:
            cache.commit([seqs[index]], 6, [7 + index])
        assert [cache.state(seq) for seq in seqs] == [(7, 6), (7, 6)]
        assert cache.reserve(seqs).input_ids.tolist() == [7, 8]


def test_a_step_that_needs_the_prefix_of_one_in_flight_waits() -> None:
    cache = Checked()
    owner, joiner = cache.allocate(prompt(1, 9)), cache.allocate(prompt(1, 9))
    cache.reserve([owner])
    assert cache.reserve([joiner]).status.tolist() == [SeqStatus.WAITS_FOR_PREFIX]
    cache.commit([owner], 9)
    assert cache.reserve([joiner]).all_fit


def test_chunks_of_one_prompt_may_follow_each_other_uncomputed() -> None:
    """Committed as soon as they are handed over, each begins where the one before ends."""
    cache = Checked(num_blocks=30)
    seq = cache.allocate(prompt(1, 40))
    ids, positions = [], []
    for _ in range(4):
        plan = cache.reserve([seq], 10)
        ids += plan.input_ids.tolist()
        positions += plan.positions.tolist()
        cache.commit([seq], 10)
    assert (ids, positions) == (prompt(1, 40), list(range(40)))


class LateWorld(World):
    """The random program, with a data plane that is up to `max_late` plans behind its cache, and a pipeline of steps.

    A step may be committed before it is carried out, and before it is committed the next one may be reserved for other
    sequences.
    """

    def __init__(self, package: Any, seed: int, max_late: int = 4) -> None:
        super().__init__(package, seed)
        self.max_late = max_late
        self.queue: deque[Callable[[], None]] = deque()

    def batch(self) -> list[Seq]:
        seqs = super().batch()
        return seqs[: self.random.randint(0, len(seqs))] if self.random.random() < 0.5 else seqs

    def later(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.counts["plans made ahead"] += len(self.queue) > 1
        while len(self.queue) > self.random.randint(0, self.max_late):
            self.queue.popleft()()

    def carry_out(self, plan: Any) -> None:
        moves = [(plan.swap_outs, plan.swap_out_groups, 0, 1), (plan.swap_ins, plan.swap_in_groups, 1, 0)]
        if hasattr(plan, "copies"):
            moves.append((plan.copies, plan.copy_groups, 0, 0))
        memories = (self.gpu, self.cpu)

        def work() -> None:
            for pairs, groups, source, target in moves:
                self.move(pairs, groups, memories[source], memories[target])

        self.later(work)

    def compute(self, plan: Any, seqs: list[Seq]) -> None:
        """Copy the plan out, let a step of others be reserved, commit; the writing and reading come later."""
        counts = plan.num_scheduled.tolist()
        self.later(self.step_work(plan, seqs))
        done = [(seq, count) for seq, count in zip(seqs, counts, strict=True) if count > 0]
        others = [seq for seq in self.seqs if seq not in seqs and not seq.is_swapped]
        if others and self.random.random() < 0.8:
            self.reserve_others(others, done)
        else:
            self.commit(done, False)

    def reserve_others(self, others: list[Seq], done: list[tuple[Seq, int]]) -> None:
        """A second step, made while the first is not committed; then both are, in either order."""
        cache = self.cache
        for seq in others:
            seq.drafts = []
        counts = [len(seq.tokens) - cache.num_computed_tokens(seq.handle) for seq in others]
        plan = cache.reserve([seq.handle for seq in others], counts)
        self.counts["steps in flight together"] += int(plan.num_tokens > 0 and len(done) > 0)
        self.carry_out(plan)
        self.later(self.step_work(plan, others))
        second = [(seq, n) for seq, n in zip(others, plan.num_scheduled.tolist(), strict=True) if n > 0]
        for part in self.random.sample([done, second], 2):
            self.commit(part, False)

    def step_work(self, plan: Any, seqs: list[Seq]) -> Callable[[], None]:
        """Write the new tokens, then read every context, from arrays that are taken now."""
        parts = [(part.slot_mapping, part.block_tables) for part in plan.groups]
        starts, counts = plan.num_computed.tolist(), plan.num_scheduled.tolist()
        tokens = [seq.tokens + seq.drafts for seq in seqs]
        names = [self.names(seq, known) for seq, known in zip(seqs, tokens, strict=True)]
        chunks = [known[start : start + n] for known, start, n in zip(tokens, starts, counts, strict=True)]
        ids = plan.input_ids
        assert ((ids == [token for chunk in chunks for token in chunk]) | (ids == -1)).all()

        def work() -> None:
            for group, (slots, tables) in enumerate(parts):
                self.write_late(group, slots, names, starts, counts)
                self.read_late(group, tables, names, starts, counts)

        return work

    def write_late(self, group: int, slots: Any, names: Any, starts: list[int], counts: list[int]) -> None:
        memory, filled = self.gpu.blocks[group].reshape(-1), 0
        for name, start, count in zip(names, starts, counts, strict=True):
            memory[slots[filled : filled + count]] = name[start : start + count]
            filled += count

    def read_late(self, group: int, tables: Any, names: Any, starts: list[int], counts: list[int]) -> None:
        size, window = self.sizes[group], self.windows[group]
        for table, name, start, count in zip(tables, names, starts, counts, strict=True):
            first = max(start + 1 - window, 0) if window else 0
            for position in range(first, start + count if count else 0):
                stored = int(self.gpu.blocks[group][table[position // size]][position % size])
                assert stored == name[position], f"{self.seed}: group {group}, position {position}: wrong keys"
        self.counts["contexts read late"] += len(counts)

    def commit(self, done: list[tuple[Seq, int]], fails: bool) -> None:
        super().commit(done, False)

    def finish(self) -> None:
        super().finish()
        while self.queue:
            self.queue.popleft()()


def test_late_data_plane_reads_the_written_bytes() -> None:
    """Frees, evictions, hits, forks, swaps and cuts in between: in order, no block's reuse is ever too early."""
    seed, num_worlds = run_seed(), draws(150, 15)
    totals: dict[str, int] = {}
    for number in range(num_worlds):
        world = LateWorld(blockyard, seed + number)
        world.run(150)
        for name, count in world.counts.items():
            totals[name] = totals.get(name, 0) + count
    for name in ("plans made ahead", "contexts read late", "steps in flight together"):
        assert totals[name] > num_worlds, name


def test_check_finds_steps_out_of_order() -> None:
    """The program itself can fail: the same with a data plane that takes its work in any order."""

    class Shuffled(LateWorld):
        def later(self, work: Callable[[], None]) -> None:
            self.queue.append(work)
            while len(self.queue) > self.max_late:
                self.queue.rotate(self.random.randint(0, self.max_late))
                self.queue.popleft()()

    seen = 0
    for number in range(20):
        world = Shuffled(blockyard, number)
        try:
            world.run(100)
        except AssertionError as error:
            seen += "wrong keys" in str(error)
    assert seen >= 10
