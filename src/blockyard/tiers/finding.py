"""A finder says which tiers have what of a prompt, and how much of it is loaded, because that is sooner."""

from __future__ import annotations

from collections.abc import Sequence

from .costs import LinearCost
from .loads import Prompt
from .memory import States
from .states import places_between, state_name
from .uses import TierUse

#: Blocks of a prompt, from the second to the third, that a tier has.
Range = tuple[TierUse, int, int]
#: The tier that has a state, and after how many blocks it stands.
Kept = tuple[TierUse, int]
#: Seconds that a question or a load is waited for where it is not known how long computing takes.
_PATIENCE = 2.0


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

    def find(self, names: list[bytes], first: int, usable: int) -> tuple[list[Range], bool]:
        """Say which tier has which blocks, each from where the one before ends, and whether that is all they know."""
        found = []
        for use in self.uses:
            prefix = use.tier.longest_prefix(names[first:usable])
            if prefix.num_found:
                found.append((use, first, first + prefix.num_found))
                first += prefix.num_found
            if not prefix.is_final:
                return found, False
            for name in names[first:usable]:
                use.known.pop(name, None)  # what was evicted there is stored again when it is computed again
            if first == usable:
                break
        return found, True

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

    def find_state(self, layout: bytes, names: list[bytes], first: int, stop: int) -> tuple[Kept | None, bool]:
        """Say which tier has the state that stands furthest back behind block `first`, where, and whether that is all
        they know."""
        places = list(places_between(first, stop, self._state_step, self.block_size))
        wanted = [state_name(layout, names[place - 1]) for place in places]
        best = None
        for use in self.uses:
            found = use.tier.first_of(wanted)
            for name in wanted[: found.place]:
                use.known.pop(name, None)
            if not found.is_final:
                return best, False
            if found.place < len(wanted):
                best, wanted = (use, places[found.place]), wanted[: found.place]
        return best, True

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
