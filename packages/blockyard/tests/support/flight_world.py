"""The random program with several steps in flight, on a data plane that carries them out in any order it may.

What plans move is carried out late, in the order of the plans. What a step writes comes at any time after its moves and
before it is committed; only where two steps are of one sequence, or write one slot, the later one comes later. A step
of a sequence that was freed meanwhile is still carried out. Until a step has ended its contexts are read again. A block
that is given to another before that shows as a wrong name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from blockyard_testing.world import World
from blockyard_testing.world_memory import NOTHING, Seq


class Item:
    """The part of a step that computes one sequence."""

    def __init__(self, seq: Seq, start: int, count: int, names: list[int], is_doomed: bool) -> None:
        self.seq = seq
        self.start = start
        self.count = count
        #: Of all tokens up to the last that the step computes.
        self.names = names
        #: Whether it fails, or begins behind what an earlier step left out: it writes what nobody may read.
        self.is_doomed = is_doomed
        #: Whether nothing is reserved any more.
        self.is_settled = count == 0
        #: How far the context stays what it was: the sequence may be cut, and go on in another way.
        self.num_valid = start + count


class Flight:
    """A step that is reserved and not ended, with what its plan gave out, and after how many plans' moves it comes."""

    def __init__(self, plan: Any, items: list[Item], num_moves: int) -> None:
        self.step = plan.step
        self.items = items
        self.num_moves = num_moves
        self.is_written = False
        self.has_ended = False
        runs = list(pairwise(plan.query_start_loc.tolist()))
        self.slots = [[part.slot_mapping[a:b] for a, b in runs] for part in plan.groups]
        self.tables = [part.block_tables for part in plan.groups]

    def comes_after(self, other: Flight) -> bool:
        """Whether both are of one sequence, or write one slot."""
        if {id(item.seq) for item in self.items} & {id(item.seq) for item in other.items}:
            return True
        mine, others = ({(g, s) for g, runs in enumerate(f.slots) for r in runs for s in r} for f in (self, other))
        return bool(mine & others)


class FlightWorld(World):
    """Random calls, among them the parts of a step's life: reserve, write, commit, read again, end."""

    def __init__(self, package: Any, seed: int) -> None:
        super().__init__(package, seed)
        self.flights: list[Flight] = []
        self.moves: list[Callable[[], None]] = []
        self.num_moved = 0
        #: What the model will sample after a sequence's tokens, as far as that was asked.
        self.coming: dict[int, list[int]] = {}

    def more_config(self, groups: tuple[Any, ...], size: int) -> dict[str, Any]:
        depth = self.random.choice((2, 2, 3, 5))
        return {**super().more_config(groups, size), "max_steps_in_flight": depth}

    def actors(self) -> list[tuple[Any, float]]:
        return [*super().actors(), (self.go_on, 60)]

    def require_hope(self, answer: str) -> None:
        assert answer != "LATER" or self.seqs or self.cache.num_fenced_blocks, "LATER, and nothing to wait for"

    # ------------------------------------------------------------------ reserving

    def open_items(self, seq: Seq) -> list[Item]:
        """The open reservations of a sequence, oldest first."""
        return [item for flight in self.flights for item in flight.items if item.seq is seq and not item.is_settled]

    def start_of(self, seq: Seq) -> int:
        opened = self.open_items(seq)
        return opened[-1].start + opened[-1].count if opened else self.cache.num_computed_tokens(seq.handle)

    def tokens_to(self, seq: Seq, length: int) -> list[int]:
        """The tokens of a sequence, and those that will be sampled."""
        coming = self.coming.setdefault(seq.handle, [])
        while len(seq.tokens) + len(coming) < length:
            coming.append(self.random.choice((1, 2)))
        return (seq.tokens + coming)[:length]

    def step(self) -> Any:
        """Reserve for some sequences, also for tokens that are not sampled yet; nothing is carried out yet."""
        choose, cache = self.random, self.cache
        seqs, counts = self.batch(), []
        for seq in seqs:
            room = max(self.config.max_model_len - self.start_of(seq), 0)
            full = max(len(seq.tokens) - self.start_of(seq), 0) + choose.choice((0, 0, 1, 1, 1, 3))
            counts.append(min(full, choose.choice((full, full, full, 1, 3)), room))
        handles = [seq.handle for seq in seqs]
        fits = cache.can_append(handles, counts)
        plan = cache.reserve(handles, counts)
        assert plan.all_fit or not fits, "can_append said yes"
        self.check_starts(plan, seqs)
        self.check_inputs(plan, seqs)
        self.carry_out(plan)
        self.fly(plan, seqs)
        return plan.step, plan.status.tolist()

    def check_starts(self, plan: Any, seqs: list[Seq]) -> None:
        """Each begins behind its open reservations; where the owner of a prefix was freed, those have ended."""
        for seq, start in zip(seqs, plan.num_computed.tolist(), strict=True):
            if start != self.start_of(seq):
                assert start == self.cache.num_computed_tokens(seq.handle), self.seed
                self.counts["reservations that ended with an owner"] += 1
                self.cut(seq, start)
                for item in self.open_items(seq):
                    item.is_settled = item.is_doomed = True

    def fly(self, plan: Any, seqs: list[Seq]) -> None:
        fails, items = self.random.random() < 0.1, []
        for seq, start, count in zip(seqs, plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True):
            before = self.open_items(seq)
            names = self.names(seq, self.tokens_to(seq, start + count)) if count else []
            items.append(Item(seq, start, count, names, fails or any(item.is_doomed for item in before)))
            self.counts["reserved behind a reservation"] += bool(before) and count > 0
            self.counts["tokens not sampled yet"] += bool(before) and start + count > len(seq.tokens)
        self.flights.append(Flight(plan, items, len(self.moves)))
        self.counts["steps in flight together"] += len(self.flights) > 1

    def carry_out(self, plan: Any) -> None:
        """Later, in the order of the plans."""
        moves = [(plan.swap_outs, plan.swap_out_groups, 0, 1), (plan.swap_ins, plan.swap_in_groups, 1, 0)]
        if hasattr(plan, "copies"):
            moves.append((plan.copies, plan.copy_groups, 0, 0))

        def work() -> None:
            memories = (self.gpu, self.cpu)
            for pairs, groups, source, target in moves:
                self.move(pairs, groups, memories[source], memories[target])

        self.moves.append(work)

    def move_up_to(self, number: int) -> None:
        while self.num_moved < number:
            self.moves[self.num_moved]()
            self.num_moved += 1

    # ------------------------------------------------------------------ the life of a step

    def go_on(self) -> Any:
        """One of the things that happen to steps in flight."""
        if not self.flights:
            return None
        flight = self.random.choice(self.flights)
        happens = self.random.choice((self.write_late, self.write_late, self.settle, self.settle, self.end))
        return happens.__name__, flight.step, happens(flight)

    def write_late(self, flight: Flight) -> None:
        """Its keys and values are written, and what it attends to is read."""
        if flight.is_written:
            return
        for other in self.flights[: self.flights.index(flight)]:
            if not other.is_written and flight.comes_after(other):
                self.write_late(other)
        self.move_up_to(flight.num_moves)
        for group, runs in enumerate(flight.slots):
            memory = self.gpu.blocks[group].reshape(-1)
            for item, slots in zip(flight.items, runs, strict=True):
                memory[slots] = NOTHING if item.is_doomed else item.names[item.start :]
        flight.is_written = True
        self.spoil_earlier(flight)
        is_late = any(not other.is_written for other in self.flights[: self.flights.index(flight)])
        self.counts["steps that overtook others"] += is_late
        self.read_again(flight)

    def spoil_earlier(self, flight: Flight) -> None:
        """A step that fails may write over what an earlier one wrote for nothing, and has read by then.

        It may also be that of a joiner whose owner was freed: it computes the prefix again, in blocks that a step of
        the owner still reads for nobody.
        """
        spoilt = {
            (group, slot)
            for group, runs in enumerate(flight.slots)
            for item, slots in zip(flight.items, runs, strict=True)
            if item.is_doomed
            for slot in slots.tolist()
        }
        earlier = self.flights[: self.flights.index(flight)] if spoilt else []
        for other in earlier:
            is_read = not flight.comes_after(other)
            for group, size in enumerate(self.sizes):
                for item, table in zip(other.items, other.tables[group].tolist(), strict=True):
                    if is_read and self.is_live(item):
                        continue
                    places = range(min(item.num_valid, len(table) * size))
                    hit = (place for place in places if (group, table[place // size] * size + place % size) in spoilt)
                    item.num_valid = next(hit, item.num_valid)

    def read_again(self, flight: Flight) -> None:
        """All that the step attends to stands where its tables said."""
        for index, item in enumerate(flight.items):
            for group, (size, window) in enumerate(zip(self.sizes, self.windows, strict=True)):
                table = flight.tables[group][index]
                first = max(item.start + 1 - window, 0) if window else 0
                last = 0 if item.is_doomed or item.count == 0 else min(item.start + item.count, item.num_valid)
                for position in range(first, last):
                    stored = int(self.gpu.blocks[group][table[position // size]][position % size])
                    assert stored == item.names[position], (
                        f"{self.seed}: step {flight.step}, group {group}, position {position}: wrong keys and values"
                    )
            self.counts["contexts read"] += 1

    def is_live(self, item: Item) -> bool:
        return any(seq is item.seq for seq in self.seqs)

    def settle(self, flight: Flight) -> Any:
        """Commit what is written and comes first in its sequence."""
        items = [item for item in flight.items if not item.is_settled and self.is_live(item)]
        items = [item for item in items if self.open_items(item.seq)[0] is item]
        if not flight.is_written or not items:
            return None
        numbers, appended = [], []
        for item in items:
            number = (
                0 if item.is_doomed else self.random.choice((*[item.count] * 5, self.random.randint(0, item.count)))
            )
            known, reached = len(item.seq.tokens), item.start + number
            more = reached >= known and reached < self.config.max_model_len and self.random.random() < 0.8
            wanted = max(reached + (more and not item.is_doomed), known)
            numbers.append(number)
            appended.append(self.tokens_to(item.seq, wanted)[known:])
        width = max([1, *map(len, appended)])
        rows = np.array([new + [-1] * (width - len(new)) for new in appended], dtype=np.int64).reshape(-1, width)
        handles = [item.seq.handle for item in items]
        try:
            ended = self.cache.commit(handles, numbers, rows, step=flight.step)
        except self.package.BlockyardError as error:
            # A joiner's owner did not get as far, or a token has no place: the step counts for nothing then.
            self.counts[f"commit: {type(error).__name__}"] += 1
            numbers, appended = [0] * len(items), [[] for _ in items]
            ended = self.cache.commit(handles, numbers, None, step=flight.step)
        for place, item in enumerate(items):
            if item.seq.handle in ended:  # the owner of its prefix was freed, and nothing of it is taken
                numbers[place], appended[place] = 0, []
                self.counts["commits without a sequence whose owner was freed"] += 1
        for item, number, new in zip(items, numbers, appended, strict=True):
            self.note_settled(item, number, new)
        return numbers, appended

    def note_settled(self, item: Item, number: int, new: list[int]) -> None:
        seq = item.seq
        coming = self.coming[seq.handle]
        assert coming[: len(new)] == new
        seq.tokens, self.coming[seq.handle] = seq.tokens + new, coming[len(new) :]
        item.is_settled = True
        if number < item.count:
            self.cut(seq, item.start + number)
            for later in self.open_items(seq):
                later.is_settled = later.is_doomed = True
                self.counts["reservations that an earlier commit ended"] += 1

    def cut(self, seq: Seq, length: int) -> None:
        """From here on the sequence may go on in another way."""
        for flight in self.flights:
            for item in flight.items:
                if item.seq is seq:
                    item.num_valid = min(item.num_valid, length)

    def can_end(self, flight: Flight) -> bool:
        earlier = self.flights[: self.flights.index(flight) + 1]
        return all(item.is_settled or not self.is_live(item) for other in earlier for item in other.items)

    def end(self, flight: Flight) -> bool:
        """The step, and those before it, are over, on every device and for the cache."""
        if not self.can_end(flight):
            return False
        place = self.flights.index(flight)
        for other in self.flights[: place + 1]:
            self.write_late(other)
        for other in self.flights[: place + 1]:
            self.read_again(other)
        self.counts["blocks that waited for a step"] += self.cache.num_fenced_blocks
        if not flight.has_ended:
            self.cache.end_step(flight.step)
        self.flights = self.flights[place + 1 :]
        return True

    # ------------------------------------------------------------------ what else happens to sequences

    def append(self) -> None:
        super().append()
        for seq in self.seqs:
            if not self.open_items(seq):
                self.coming.pop(seq.handle, None)

    def truncate(self) -> None:
        lengths = {seq.handle: len(seq.tokens) for seq in self.seqs}
        super().truncate()
        for seq in self.seqs:
            if len(seq.tokens) < lengths[seq.handle]:
                self.coming.pop(seq.handle, None)
                self.cut(seq, len(seq.tokens))

    def finish(self) -> None:
        while self.flights:
            flight = self.flights[0]
            self.write_late(flight)
            while not self.can_end(flight):
                self.settle(flight)
            self.end(flight)
        self.move_up_to(len(self.moves))
        assert self.cache.num_fenced_blocks == 0
        super().finish()


class HastyWorld(FlightWorld):
    """A world whose cache is notified of a step's end as soon as it is committed, while it still runs."""

    def go_on(self) -> Any:
        for flight in self.flights:
            if not flight.has_ended and self.can_end(flight):
                self.cache.end_step(flight.step)
                flight.has_ended = True
        return super().go_on()

    def end(self, flight: Flight) -> bool:
        return self.random.random() < 0.1 and super().end(flight)

    def finish(self) -> None:
        for flight in self.flights:
            self.write_late(flight)
            self.read_again(flight)
