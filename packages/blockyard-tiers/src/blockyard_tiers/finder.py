"""Searches tiers for the blocks and states of a prompt, and decides how much of them is worth loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from .costs import LinearCost
from .engine_memory import States
from .state_names import early_positions, near_positions, state_name
from .transfers import RequestRecord, Segment, StateSearch
from .uses import TierUse

#: Seconds to wait for an answer or a load as long as the time for computing is unknown.
_PATIENCE = 2.0
#: Seconds to wait for a tier's answer if a later tier has the blocks.
_ANSWER_SECONDS = 0.1
#: State positions per question to a tier, and such questions per call.
_POSITIONS_PER_QUESTION = 256
_QUESTIONS_PER_CALL = 4


class Finder:
    """Searches the tiers in their order, and compares the measured times for loading and for computing.

    Args:
        uses: the tiers, nearest first.
        block_size: tokens of a block.
        object_bytes: bytes of a block's object.
        step_tokens: most tokens that a step computes.
        states: states of a hybrid model; None for other models.
        state_step: blocks between two checkpoint positions.
    """

    def __init__(
        self,
        uses: Sequence[TierUse],
        block_size: int,
        object_bytes: int,
        step_tokens: int,
        states: States | None,
        state_step: int,
    ) -> None:
        self.uses = uses
        self.block_size = block_size
        self._object_bytes = object_bytes
        self._step_tokens = step_tokens
        self._states = states
        self._state_step = state_step
        self.computing = LinearCost()

    def find(self, names: list[bytes], first: int, usable: int) -> tuple[list[Segment], list[TierUse]]:
        """Return the segments that tiers have, each beginning where the one before ends, and the unfinished tiers.

        An unfinished tier has not answered yet; the tiers after it are searched all the same.
        """
        found: list[Segment] = []
        pending = []
        for use in self.uses:
            if first == usable:
                break
            prefix = use.tier.longest_prefix(names[first:usable])
            if prefix.num_found:
                found.append(Segment(use, first, first + prefix.num_found))
                first += prefix.num_found
            if not prefix.is_final:
                pending.append(use)
                continue
            use.is_silent = False
            use.note_presence(names[first:usable], False)  # evicted objects are stored again when computed again
        return found, pending

    def should_wait(
        self, record: RequestRecord, pending: list[TierUse], best: TierUse | None, num_blocks: int, now: float
    ) -> bool:
        """Return whether to wait longer for tiers that have not answered. If not, mark them as silent.

        A pending tier may have the missing blocks: wait as long as computing them would take. If all pending tiers are
        nearer than `best`, they can only save transfer time: wait at most `_ANSWER_SECONDS`, and not if all are silent.

        Args:
            record: the waiting request.
            pending: the tiers that have not answered.
            best: the last tier that has blocks or has answered; None without one.
            num_blocks: blocks that are missing.
            now: current time.
        """
        if not pending:
            return False
        patience = self.patience(num_blocks)
        if best is not None and self.uses.index(pending[-1]) < self.uses.index(best):
            patience = -1.0 if all(use.is_silent for use in pending) else min(patience, _ANSWER_SECONDS)
        if now - record.waiting_since <= patience:
            return True
        for use in pending:
            use.is_silent = True
        return False

    def choose(self, record: RequestRecord, found: list[Segment], room: int, now: float) -> list[Segment]:
        """Return the segments to load: as far as `room` buffers reach and no tier is slower than computing."""
        chosen: list[Segment] = []
        room -= 0 if self._states is None else self._states.num_rows
        for segment in found:
            count = segment.stop - segment.first
            loading = segment.use.cost.seconds(count * self._object_bytes, now)
            computing = self.seconds_to_compute(count)
            if loading is not None and computing is not None and loading > computing:
                record.cause = "not_worth"
                break
            if room > 0:
                chosen.append(replace(segment, stop=min(segment.stop, segment.first + room)))
            room -= count
            if room < 0:
                record.cause = "no_buffers"
                break
        return chosen

    def find_state(
        self, layout: bytes, record: RequestRecord, first: int, stop: int
    ) -> tuple[Segment | None, list[TierUse], bool]:
        """Search for the prompt's last state after block `first`, up to block `stop`.

        The likeliest positions are searched first: those nearest to `stop`, and powers of two. The others follow in
        batches, over several calls. A silent tier does not delay the search.

        Returns:
            The state that was found, the tiers that have not answered, and whether the search is complete.
        """
        search, step = record.search, self._state_step
        near = near_positions(first, stop, step)
        early = early_positions(first, stop, step, self.block_size)
        if search is None or search.stop != stop:
            best, pending = self._find_state_at(layout, record, [*near, *(each for each in early if each not in near)])
            if best is not None and best.stop in near:
                return best, pending, True
            if not all(use.is_silent for use in pending):
                return best, pending, False
            record.search = search = StateSearch(stop, near[-1] - step if near else 0, best)
        searched = set(early)
        for _ in range(_QUESTIONS_PER_CALL):
            least = first if search.fallback is None else search.fallback.stop
            positions = (position for position in range(search.at, least, -step) if position not in searched)
            batch = list(islice(positions, _POSITIONS_PER_QUESTION))
            if not batch:
                return search.fallback, [], True
            best, pending = self._find_state_at(layout, record, batch)
            if best is not None:
                return best, pending, True
            if not all(use.is_silent for use in pending):
                return search.fallback, pending, False
            search.at = batch[-1] - step
        return search.fallback, [], False

    def _find_state_at(
        self, layout: bytes, record: RequestRecord, positions: list[int]
    ) -> tuple[Segment | None, list[TierUse]]:
        wanted = [state_name(layout, record.chain.names[position - 1]) for position in positions]
        best, pending = None, []
        for use in self.uses if wanted else ():
            found = use.tier.first_present(wanted)
            if not found.is_final:
                pending.append(use)
                continue
            use.is_silent = False
            use.note_presence(wanted[: found.position], False)
            if found.position < len(wanted):
                stop = positions[found.position]
                best, wanted = Segment(use, stop, stop), wanted[: found.position]
        return best, pending

    def choose_up_to_state(
        self, record: RequestRecord, chosen: list[Segment], state: Segment | None, now: float
    ) -> list[Segment]:
        """Return the segments to load before a state; none without a state, or if computing is faster."""
        if state is None or self._states is None:
            record.cause = "no_state"
            return []
        stop = state.stop
        record.cause = record.cause if stop == chosen[-1].stop else "no_state"
        chosen = [replace(each, stop=min(each.stop, stop)) for each in chosen if each.first < stop]
        loading = [each.use.cost.seconds((each.stop - each.first) * self._object_bytes, now) for each in chosen]
        loading.append(state.use.cost.seconds(self._states.object_bytes, now))
        computing = self.seconds_to_compute(stop - chosen[0].first)
        if computing is not None and sum(seconds or 0.0 for seconds in loading) > computing:
            record.cause = "not_worth"
            return []
        return chosen

    def seconds_to_compute(self, num_blocks: int) -> float | None:
        """Return the time for computing `num_blocks` in steps of the most tokens; None if not measured yet."""
        rounds, rest = divmod(num_blocks * self.block_size, self._step_tokens)
        whole, part = self.computing.seconds(self._step_tokens, 0.0), self.computing.seconds(rest, 0.0)
        return None if whole is None or part is None else rounds * whole + (part if rest else 0.0)

    def patience(self, num_blocks: int) -> float:
        """Return how long to wait for blocks: as long as computing them would take."""
        computing = self.seconds_to_compute(num_blocks)
        return _PATIENCE if computing is None else computing
