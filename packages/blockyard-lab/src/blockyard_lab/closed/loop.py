"""Runs sessions through the simulated engine: in a closed loop, or at the trace's own arrivals."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from blockyard.arguments import require_int, require_number
from blockyard.cache_options import MAX_BLOCKS
from blockyard.config import MAX_SEQS
from blockyard.errors import InvalidArgument

from ..policy_names import PolicyName
from ..replay.timed import ServiceModel
from .loop_result import LoopResult, Served, summarise
from .simulated_engine import Request, SimulatedEngine, parse_admission
from .throughput_bounds import alone_seconds, closed_bounds, warm_seconds
from .turns import SessionLoad, Turn

#: Turns with more than this fraction of the pool are skipped.
MOST_OF_POOL = 0.6
MAX_SESSIONS = 2**20
MAX_HOURS = 10_000.0
#: Sessions begin within this many seconds.
_BEGIN_WITHIN = 120.0


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Options of a run.

    Args:
        num_blocks: blocks of the pool, including the null block, of the load's block size.
        admission: order of admission; see `parse_admission`.
        device: step times and the most tokens in a step. `speedup` applies to `run_open`.
        policy: eviction policy, as in `ReplayOptions`.
        max_num_seqs: most running requests.
        watermark: fraction of the blocks to keep free at admission.
        hours: simulated hours that are measured; `run_open` runs to the end of the trace.
        warm_up: simulated hours before them.
        seed: seed of the choice of sessions and of where they begin.
    """

    num_blocks: int
    admission: str = "arrival"
    device: ServiceModel = field(default_factory=ServiceModel)
    policy: PolicyName = "lru"
    max_num_seqs: int = 64
    watermark: float = 0.01
    hours: float = 3.0
    warm_up: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("num_blocks", self.num_blocks, 4, MAX_BLOCKS)
        parse_admission(self.admission)
        require_int("max_num_seqs", self.max_num_seqs, 1, MAX_SEQS)
        require_int("seed", self.seed, 0, 2**63 - 1)
        for name in ("hours", "warm_up"):
            value = require_number(name, getattr(self, name))
            if not (0 <= value <= MAX_HOURS and (value or name == "warm_up")):
                raise InvalidArgument(f"{name} is {value}; it must be from 0 to {MAX_HOURS:g}, and hours above 0")


@dataclass(slots=True)
class _Slot:
    """One of the sessions at once: its turns, the next of them, and the ids of its blocks."""

    load: SessionLoad
    group: int
    turns: list[Turn]
    place: int
    first_id: int
    name: str


class _Loop:
    """The engine, and turns that arrive at known times."""

    def __init__(self, loads: Sequence[tuple[SessionLoad, int]], options: LoopOptions) -> None:
        sizes = {load.block_size for load, _ in loads}
        if len(sizes) != 1:
            raise InvalidArgument(f"loads have blocks of {sorted(sizes)} tokens; they must have one block size")
        self.loads, self.options, self.size = loads, options, sizes.pop()
        self.num_tokens = (options.num_blocks - 1) * self.size
        self.most_tokens = MOST_OF_POOL * self.num_tokens
        for load, _ in loads:
            if not any(turn.num_tokens <= self.most_tokens for session in load.sessions for turn in session):
                raise InvalidArgument(
                    f"num_blocks is {options.num_blocks}; {load.name} has no turn of at most {MOST_OF_POOL:.0%} of it"
                )
        self.engine = SimulatedEngine(
            options.device, options.num_blocks, self.size, options.admission, options.policy, options.max_num_seqs,
            options.watermark,
        )  # fmt: skip
        #: Times and numbers of the next arrivals.
        self.events: list[tuple[float, int]] = []
        self.num_skipped = 0
        self.served = Served([count for _, count in loads])

    def run(self, start: float, stop: float) -> None:
        """Run until `stop`, or until nothing is left. Turns count from `start` on."""
        engine = self.engine
        while engine.now < stop and (self.events or engine.waiting or engine.running):
            if engine.now < start:
                self.served.before = dataclasses.replace(engine.counters)
            while self.events and self.events[0][0] <= engine.now:
                self.arrive(*heapq.heappop(self.events))
            due = min(self.events[0][0] if self.events else stop, stop)
            ended = engine.step(due)
            if ended is None:
                engine.now = max(min(due, engine.next_wake()), engine.now + 1e-4)
            for request in ended or ():
                self.finish(request, start)
        engine.cache.check()

    def arrive(self, now: float, number: int) -> None:
        """Send the turn of an event to the engine."""
        raise NotImplementedError

    def finish(self, request: Request, start: float) -> None:
        """Count a turn that ended, and say when the next one comes."""
        raise NotImplementedError

    def send(self, turn: Turn, arrived: float, session: str, first_id: int, shared_from: int, slot: int) -> Request:
        """Add a turn to the engine. Its own ids count up from `first_id`, shared ones from `shared_from`."""
        ids = np.append(turn.ids, np.array(turn.answer, np.int32))
        tokens = np.where(ids >= 0, ids + first_id, shared_from - 1 - ids).astype(np.int32)
        blocks, answer = tokens[: len(turn.ids)], tokens[len(turn.ids) :].tolist()
        request = Request(slot, session, arrived, turn.num_prompt, turn.num_output, blocks, answer)
        self.engine.add(request)
        return request


class _ClosedLoop(_Loop):
    """Sessions at once. A session's next turn comes its pause after the answer."""

    def __init__(self, loads: Sequence[tuple[SessionLoad, int]], options: LoopOptions) -> None:
        super().__init__(loads, options)
        self._random = random.Random(options.seed)
        #: Ids from 0 are those that sessions share, load by load.
        self._shared_from = np.cumsum([0, *(load.num_shared for load, _ in loads)]).tolist()
        self._next_id = self._shared_from[-1]
        self._drawn: list[list[int]] = [[] for _ in loads]
        self._slots: list[_Slot] = []
        self._num_begun = 0
        for group, (load, count) in enumerate(loads):
            require_int("the number of sessions", count, 1, MAX_SESSIONS)
            lengths = [len(session) for session in load.sessions]
            for _ in range(count):
                number = self._random.choices(range(len(lengths)), lengths)[0]
                heapq.heappush(self.events, (self._random.random() * _BEGIN_WITHIN, len(self._slots)))
                self._slots.append(self._begin(load, group, number, self._random.randrange(lengths[number])))

    def _begin(self, load: SessionLoad, group: int, number: int, place: int) -> _Slot:
        first_id = self._next_id
        self._next_id += load.num_ids[number]
        self._num_begun += 1
        return _Slot(load, group, load.sessions[number], place, first_id, str(self._num_begun))

    def _draw(self, slot: _Slot) -> _Slot:
        """Return the session that follows the one that ended."""
        rest = self._drawn[slot.group]
        if not rest:
            rest.extend(range(len(slot.load.sessions)))
            self._random.shuffle(rest)
        return self._begin(slot.load, slot.group, rest.pop(), 0)

    def arrive(self, now: float, number: int) -> None:
        """Send the session's next turn, or the first of the session that follows it."""
        slot = self._slots[number]
        while slot.place >= len(slot.turns) or slot.turns[slot.place].num_tokens > self.most_tokens:
            if slot.place >= len(slot.turns):
                slot = self._slots[number] = self._draw(slot)
            else:
                slot.place += 1
                self.num_skipped += 1
        turn, shared_from = slot.turns[slot.place], self._shared_from[slot.group]
        request = self.send(turn, now, slot.name, slot.first_id, shared_from, number)
        request.is_last = slot.place + 1 == len(slot.turns)

    def finish(self, request: Request, start: float) -> None:
        slot, now = self._slots[request.slot], self.engine.now
        if now >= start:
            alone = alone_seconds(slot.turns[slot.place], self.options.device, self.size)
            self.served.finish(request, slot.group, now, start, alone)
        slot.place += 1
        pause = slot.turns[slot.place].pause if slot.place < len(slot.turns) else 0.0
        heapq.heappush(self.events, (now + pause, request.slot))

    def result(self) -> LoopResult:
        """Run for the warm-up and the measured time, and return the result."""
        options = self.options
        start, stop = 3600 * options.warm_up, 3600 * (options.warm_up + options.hours)
        self.run(start, stop)
        self.served.leave(self.engine, [slot.group for slot in self._slots], start)
        bounds = [
            closed_bounds(load, options.device, self.num_tokens, count, self.most_tokens) for load, count in self.loads
        ]
        # With several loads, each one's bound has the whole device.
        known, aged = sum(known for known, _ in bounds), sum(aged for _, aged in bounds)
        return summarise(options, self.loads, self.served, self.engine, self.num_skipped, (known, aged))


class _OpenLoop(_Loop):
    """Turns that arrive at the trace's own times."""

    def __init__(self, load: SessionLoad, options: LoopOptions) -> None:
        super().__init__([(load, 0)], options)
        first_ids = np.cumsum([load.num_shared, *load.num_ids]).tolist()
        rows = [(turn, first_ids[number]) for number, session in enumerate(load.sessions) for turn in session]
        self._rows = [row for row in rows if row[0].num_tokens <= self.most_tokens]
        self.num_skipped = len(rows) - len(self._rows)
        begin = min(turn.arrival for turn, _ in self._rows)
        speedup = options.device.speedup
        self.events = sorted(((turn.arrival - begin) / speedup, n) for n, (turn, _) in enumerate(self._rows))
        self._last = self.events[-1][0]

    def arrive(self, now: float, number: int) -> None:
        turn, first_id = self._rows[number]
        self.send(turn, now, str(turn.conversation), first_id, 0, 0)

    def finish(self, request: Request, start: float) -> None:
        self.served.finish(request, 0, self.engine.now, start, 0.0)

    def result(self) -> LoopResult:
        """Run to the end of the trace and return the result."""
        self.run(0.0, math.inf)
        compute = sum(warm_seconds(turn, self.options.device, self.size) for turn, _ in self._rows)
        bound = 3600 * len(self._rows) / max(compute, self._last, 1e-9)
        return summarise(self.options, self.loads, self.served, self.engine, self.num_skipped, (bound, bound))


def run_closed(loads: Sequence[tuple[SessionLoad, int]], options: LoopOptions) -> LoopResult:
    """Run a number of sessions of each load at once, for `warm_up` and `hours`, and return the result.

    A session's next turn comes its pause after the answer. When a session ends, another of the load, drawn at random
    without repetition, takes its place. The first ones begin at a random turn within two minutes; longer sessions are
    likelier, as at any moment. Each time that a session is replayed, its own blocks are new.

    Args:
        loads: loads with equal block sizes, and how many sessions of each run at once.
        options: how to run them.

    Raises:
        InvalidArgument: for loads of different block sizes, or without a turn that fits.
    """
    return _ClosedLoop(loads, options).result()


def run_open(load: SessionLoad, options: LoopOptions) -> LoopResult:
    """Run a load at its own arrivals, `options.device.speedup` times faster, to the end of the last answer.

    Raises:
        InvalidArgument: for a load without a turn that fits.
    """
    return _OpenLoop(load, options).result()
