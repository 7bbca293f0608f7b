"""A bound that no router can beat, and a search for a good assignment with knowledge of the future."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .loads import Load
from .replica import Pool, num_usable

#: Most moves of a search.
MAX_MOVES = 10**6


def endless_pool(load: Load) -> int:
    """Return the prompt tokens that one unlimited cache would compute. No router computes fewer. O(blocks)."""
    seen: set[int] = set()
    total = 0
    for job in load.jobs:
        usable = job.ids[: num_usable(job.num_prompt, load.block_size)]
        num_hit = next((place for place, name in enumerate(usable) if name not in seen), len(usable))
        total += job.num_prompt - num_hit * load.block_size
        seen.update(job.ids)
    return total


class AssignmentSearch:
    """Local search for the assignment of conversations to replicas that computes the fewest tokens.

    It moves and exchanges conversations. Requests run one after another, so running requests take no room from others,
    and the whole load is known. A router has neither advantage; but the search may miss the best assignment, so this is
    no bound. An assignment is better if it computes less and its balance is at most `most_balance`, or gets closer to
    that.

    Args:
        load: the load.
        num_replicas: number of replicas.
        num_blocks: blocks of each.
        assignments: start of the search: (job, replica) in order of time; a conversation's first one counts.
        most_balance: largest allowed ratio of a replica's tokens to the mean.
    """

    def __init__(
        self,
        load: Load,
        num_replicas: int,
        num_blocks: int,
        assignments: Sequence[tuple[int, int]],
        most_balance: float,
    ) -> None:
        self._load, self._num_blocks, self._most_balance = load, num_blocks, most_balance
        self._order = list(dict.fromkeys(job for job, _ in assignments))
        self._group_of = {job: load.jobs[job].session or f"job {job}" for job in self._order}
        first = dict(reversed([(self._group_of[job], replica) for job, replica in assignments]))
        self._place: dict[str, int] = first
        self._groups = sorted(first)
        self._computed = np.array([self._replay(replica) for replica in range(num_replicas)])

    @property
    def num_computed(self) -> int:
        """Tokens computed by the best assignment so far."""
        return int(self._computed.sum())

    @property
    def balance(self) -> float:
        """Largest number of tokens of a replica, divided by the mean."""
        return float(self._computed.max() / max(self._computed.mean(), 1))

    def _replay(self, replica: int) -> int:
        pool, size, total = Pool(self._num_blocks), self._load.block_size, 0
        for number in self._order:
            job = self._load.jobs[number]
            if self._place[self._group_of[number]] == replica and len(job.ids) <= self._num_blocks:
                num_hit = pool.num_seen(job.ids[: num_usable(job.num_prompt, size)])
                total += job.num_prompt - num_hit * size
                pool.hold(job.ids)
                pool.seen.update(job.ids)
                pool.release(job.ids)
        return total

    def improve(self, num_moves: int, seed: int) -> None:
        """Try random moves, every second one an exchange. Each replays two replicas: O(blocks of both)."""
        draw = np.random.default_rng(seed)
        for number in range(num_moves):
            group, other = (self._groups[place] for place in draw.integers(len(self._groups), size=2).tolist())
            source, target = self._place[group], int(draw.integers(len(self._computed)))
            target = self._place[other] if number % 2 else target
            if source != target:
                self._try({group: target, other: source} if number % 2 else {group: target}, source, target)

    def _try(self, moves: dict[str, int], source: int, target: int) -> None:
        before = {group: self._place[group] for group in moves}
        self._place.update(moves)
        found = self._computed.copy()
        found[source], found[target] = self._replay(source), self._replay(target)
        if self._is_better(found):
            self._computed = found
        else:
            self._place.update(before)

    def _is_better(self, found: NDArray[np.int64]) -> bool:
        balance, before = float(found.max() / max(found.mean(), 1)), self.balance
        if balance > self._most_balance and balance > before:
            return False
        if before > self._most_balance:
            return balance < before
        return int(found.sum()) <= self.num_computed  # an equal one too: an improvement may need two moves
