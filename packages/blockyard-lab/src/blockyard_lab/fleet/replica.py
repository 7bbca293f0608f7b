"""A simulated replica: a pool of blocks under LRU, and an engine with modelled step times."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .loads import Job


@dataclass(frozen=True, slots=True)
class Speed:
    """Step times of an engine in seconds, as in `replay.ServiceModel`, and the most tokens of a step."""

    step: float = 0.006
    prompt_token: float = 5e-5
    decode: float = 2e-5
    context_token: float = 2e-8
    max_num_batched_tokens: int = 8192


def num_usable(num_prompt: int, block_size: int) -> int:
    """Return the blocks of a prompt that can hit. The last token is always computed."""
    return (num_prompt - 1) // block_size


class Pool:
    """Blocks by content id: held by requests, or idle in LRU order.

    A request's blocks are held from its admission on, and can be hit once they are computed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.seen: set[int] = set()
        self._held: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.num_evicted = 0

    def num_seen(self, ids: Sequence[int]) -> int:
        """Return how many leading blocks can be hit. O(log blocks), since computed blocks form whole prefixes."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if ids[middle] in self.seen:
                low = middle + 1
            else:
                high = middle
        return low

    def fits(self, ids: Sequence[int]) -> bool:
        """Return whether a request's blocks can be held in addition to those of others."""
        num_new = sum(1 for name in ids if name not in self._held)
        return num_new <= self.capacity - len(self._held)

    def hold(self, ids: Sequence[int]) -> None:
        """Hold a request's blocks, evicting idle ones, the oldest first."""
        for name in ids:
            if name in self._held:
                self._held[name] += 1
            else:
                self._idle.pop(name, None)
                self._held[name] = 1
        while len(self._held) + len(self._idle) > self.capacity:
            self.seen.discard(self._idle.popitem(last=False)[0])
            self.num_evicted += 1

    def release(self, ids: Sequence[int]) -> None:
        """Release a request's blocks. A prompt's last block is evicted first; blocks never computed are freed."""
        for name in reversed(ids):
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
                if name in self.seen:
                    self._idle[name] = None

    def check(self) -> None:
        """Raise `AssertionError` if a block is both held and idle, or the pool is overfull."""
        assert not self._held.keys() & self._idle.keys()
        assert self._idle.keys() <= self.seen <= self._held.keys() | self._idle.keys()
        assert len(self._held) + len(self._idle) <= self.capacity


@dataclass(slots=True)
class Turn:
    """A request in progress. `given` counts tokens from a replica that died since."""

    number: int
    job: Job
    arrived: float
    given: int = 0
    first_token: float | None = None
    ends_at: float = 0.0

    @property
    def num_prompt(self) -> int:
        """Tokens needed before the next one: the prompt and those already given."""
        return self.job.num_prompt + self.given

    @property
    def num_left(self) -> int:
        """Tokens still to generate."""
        return self.job.num_output - self.given


@dataclass(slots=True)
class Engine:
    """Computes whole prompts one after another, and all decodes together at one speed.

    While a prompt is computed, each of its steps also gives every decode one token. `clock` counts the tokens that a
    decode would have received if it had run since the start. Each decode ends at a fixed value of the clock.
    """

    pool: Pool
    speed: Speed
    block_size: int
    waiting: deque[Turn] = field(default_factory=deque)
    prefill: Turn | None = None
    prefill_ends: float = 0.0
    decodes: list[tuple[float, int, Turn]] = field(default_factory=list)
    now: float = 0.0
    clock: float = 0.0
    rate: float = 0.0
    context: int = 0
    num_computed: int = 0

    def next_event(self) -> float:
        """Return when the next prompt or answer is finished; inf if nothing runs."""
        event = self.prefill_ends if self.prefill is not None else float("inf")
        if self.decodes:
            event = min(event, self.now + max(self.decodes[0][0] - self.clock, 0.0) / self.rate)
        return event

    def advance(self, now: float) -> tuple[list[Turn], list[Turn]]:
        """Advance to `now`, at most the next event; return turns whose prompts were computed, and turns that ended."""
        self.clock += self.rate * (now - self.now)
        self.now = now
        computed, ended = [], []
        if self.prefill is not None and self.prefill_ends <= now:
            computed.append(self._end_prefill(self.prefill))
        while self.decodes and self.decodes[0][0] <= self.clock + 1e-6:
            turn = heapq.heappop(self.decodes)[2]
            self.context -= turn.num_prompt
            self.pool.seen.update(turn.job.ids)
            self.pool.release(turn.job.ids)
            ended.append(turn)
        self.start()
        return computed, ended

    def _end_prefill(self, turn: Turn) -> Turn:
        """Record the turn's first token and start its decoding."""
        self.prefill = None
        self.pool.seen.update(turn.job.ids[: turn.num_prompt // self.block_size])
        if turn.first_token is None:
            turn.first_token = self.now
        turn.ends_at = self.clock + turn.num_left - 1
        heapq.heappush(self.decodes, (turn.ends_at, turn.number, turn))
        self.context += turn.num_prompt
        return turn

    def start(self) -> None:
        """Start the first waiting prompt if none runs and its blocks fit. Update the speed of decodes."""
        if self.prefill is not None:
            return
        speed = self.speed
        step = speed.step + speed.decode * len(self.decodes) + speed.context_token * self.context
        self.rate = 1 / step
        if self.waiting and self.pool.fits(self.waiting[0].job.ids):
            self.prefill = self.waiting.popleft()
            missing = self._admit(self.prefill)
            num_steps = -(-missing // max(speed.max_num_batched_tokens - len(self.decodes), 1))
            seconds = num_steps * step + missing * speed.prompt_token
            self.prefill_ends = self.now + seconds
            self.rate = num_steps / seconds

    def _admit(self, turn: Turn) -> int:
        """Hold the turn's blocks; return the prompt tokens to compute."""
        num_hit = self.pool.num_seen(turn.job.ids[: num_usable(turn.num_prompt, self.block_size)])
        self.pool.hold(turn.job.ids)
        missing = turn.num_prompt - num_hit * self.block_size
        self.num_computed += missing
        return missing

    def turns(self) -> list[Turn]:
        """Return all turns here, in order of arrival."""
        here = [*self.waiting, *([self.prefill] if self.prefill else []), *(turn for _, _, turn in self.decodes)]
        return sorted(here, key=lambda turn: turn.number)

    def is_idle(self) -> bool:
        return not (self.waiting or self.prefill or self.decodes)

    def die(self, now: float) -> list[Turn]:
        """Return all turns here, with the tokens that each had received."""
        self.clock += self.rate * (now - self.now)
        for ends_at, _, turn in self.decodes:
            turn.given += min(max(int(turn.num_left - (ends_at - self.clock)), 1), turn.num_left - 1)
        return self.turns()
