"""A finder says which tiers have what of a prompt, and how much of it is loaded, because that is sooner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from .costs import LinearCost
from .loads import Prompt, StateSearch
from .memory import States
from .states import early_positions, near_positions, state_name
from .uses import TierUse

#: Blocks of a prompt, from the second to the third, that a tier has.
Range = tuple[TierUse, int, int]
#: The tier that has a state, and after how many blocks it stands.
Kept = tuple[TierUse, int]
#: Seconds that a question or a load is waited for where it is not known how long computing takes.
_PATIENCE = 2.0
#: Seconds that the answer of a tier is waited for where one behind it has the blocks.
_ANSWER_SECONDS = 0.1
#: Positions of states that a tier is asked about at once, and how many such batches in one call.
_A_BATCH = 256
_BATCHES_A_CALL = 4


class Finder:
    """It asks tiers in their order, and compares what a load takes with what computing takes, as measured so far.

    object_bytes: of a block. step_tokens: the most that a step computes. states: of a hybrid model, which may stand at
    each `state_step` blocks.
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

    def find(self, names: list[bytes], first: int, usable: int) -> tuple[list[Range], list[TierUse]]:
        """Return which tier has which blocks, each from where the one before ends, and the tiers that know more later.

        A tier that does not answer does not hide those behind it.
        """
        found: list[Range] = []
        pending = []
        for use in self.uses:
            if first == usable:
                break
            prefix = use.tier.longest_prefix(names[first:usable])
            if prefix.num_found:
                found.append((use, first, first + prefix.num_found))
                first += prefix.num_found
            if not prefix.is_final:
                pending.append(use)
                continue
            use.is_silent = False
            for name in names[first:usable]:
                use.known.pop(name, None)  # what was evicted there is stored again when it is computed again
        return found, pending

    def should_wait(
        self, prompt: Prompt, pending: list[TierUse], best: TierUse | None, num_blocks: int, now: float
    ) -> bool:
        """Return whether to wait for the tiers that have not answered; when that was in vain, note them as silent.

        best: the last tier that has something, or has answered; None without one. A tier after it may have more, and
        is waited for until the num_blocks that are missing would have been computed; one before it is only nearer.
        """
        if not pending:
            return False
        patience = self.patience(num_blocks)
        if best is not None and self.uses.index(pending[-1]) < self.uses.index(best):
            patience = -1.0 if all(use.is_silent for use in pending) else min(patience, _ANSWER_SECONDS)
        if now - prompt.since <= patience:
            return True
        for use in pending:
            use.is_silent = True
        return False

    def choose(self, prompt: Prompt, found: list[Range], room: int, now: float) -> list[Range]:
        """Returns what is loaded: as far as there is `room`, and no tier is slower than computing."""
        chosen: list[Range] = []
        room -= 0 if self._states is None else self._states.num_rows
        for use, first, stop in found:
            loading = use.cost.seconds((stop - first) * self._object_bytes, now)
            computing = self.seconds_to_compute(stop - first)
            if loading is not None and computing is not None and loading > computing:
                prompt.cause = "not_worth"
                break
            if room > 0:
                chosen.append((use, first, min(stop, first + room)))
            room -= stop - first
            if room < 0:
                prompt.cause = "no_buffers"
                break
        return chosen

    def find_state(
        self, layout: bytes, prompt: Prompt, first: int, stop: int
    ) -> tuple[Kept | None, list[TierUse], bool]:
        """Return which tier has the last state after block `first`, up to block `stop`, and where it stands.

        Returns too which tiers know more later, and whether the search is over. The likeliest positions are searched
        first: those nearest to `stop`, and powers of two. The others follow, in batches, over several calls. A tier
        that is silent does not hold it up.
        """
        search, step = prompt.search, self._state_step
        near = near_positions(first, stop, step)
        early = early_positions(first, stop, step, self.block_size)
        if search is None or search.stop != stop:
            best, pending = self._find_state_in(
                layout, prompt, [*near, *(place for place in early if place not in near)]
            )
            if best is not None and best[1] in near:
                return best, pending, True
            if not all(use.is_silent for use in pending):
                return best, pending, False
            prompt.search = search = StateSearch(stop, near[-1] - step if near else 0, best)
        known = set(early)
        for _ in range(_BATCHES_A_CALL):
            least = first if search.fallback is None else search.fallback[1]
            batch = list(islice((place for place in range(search.at, least, -step) if place not in known), _A_BATCH))
            if not batch:
                return search.fallback, [], True
            best, pending = self._find_state_in(layout, prompt, batch)
            if best is not None:
                return best, pending, True
            if not all(use.is_silent for use in pending):
                return search.fallback, pending, False
            search.at = batch[-1] - step
        return search.fallback, [], False

    def _find_state_in(self, layout: bytes, prompt: Prompt, places: list[int]) -> tuple[Kept | None, list[TierUse]]:
        wanted = [state_name(layout, prompt.chain.names[place - 1]) for place in places]
        best, pending = None, []
        for use in self.uses if wanted else ():
            found = use.tier.first_of(wanted)
            if not found.is_final:
                pending.append(use)
                continue
            use.is_silent = False
            for name in wanted[: found.place]:
                use.known.pop(name, None)
            if found.place < len(wanted):
                best, wanted = (use, places[found.place]), wanted[: found.place]
        return best, pending

    def up_to_state(self, prompt: Prompt, chosen: list[Range], kept: Kept | None, now: float) -> list[Range]:
        """Returns what is loaded up to a state; nothing where there is none, or loading both is not sooner."""
        if kept is None or self._states is None:
            prompt.cause = "no_state"
            return []
        use, stop = kept
        prompt.cause = prompt.cause if stop == chosen[-1][2] else "no_state"
        chosen = [(each, first, min(end, stop)) for each, first, end in chosen if first < stop]
        loading = [each.cost.seconds((end - first) * self._object_bytes, now) for each, first, end in chosen]
        loading.append(use.cost.seconds(self._states.object_bytes, now))
        computing = self.seconds_to_compute(stop - chosen[0][1])
        if computing is not None and sum(seconds or 0.0 for seconds in loading) > computing:
            prompt.cause = "not_worth"
            return []
        return chosen

    def seconds_to_compute(self, num_blocks: int) -> float | None:
        """Returns the seconds that computing `num_blocks` takes, in steps of the most tokens; None if not known yet."""
        rounds, rest = divmod(num_blocks * self.block_size, self._step_tokens)
        whole, part = self.computing.seconds(self._step_tokens, 0.0), self.computing.seconds(rest, 0.0)
        return None if whole is None or part is None else rounds * whole + (part if rest else 0.0)

    def patience(self, num_blocks: int) -> float:
        """Returns for how long blocks are waited for: until they would have been computed."""
        computing = self.seconds_to_compute(num_blocks)
        return _PATIENCE if computing is None else computing
