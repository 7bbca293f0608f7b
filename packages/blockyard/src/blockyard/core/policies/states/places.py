"""A place is a boundary of a prompt that gets a state."""

from typing import Final

from mypy_extensions import i64

from .state import JUNCTION, OUTPUT_END, PROMPT_END, QUEUED, REGULAR, TOLD

#: The first power of two at which `pow2` takes a state, in tokens.
FIRST_POWER: Final[i64] = 256


class Places:
    """The rules in force name places in a prompt, and all of them together are a set.

    names: of "last" (the last boundary of a prompt), "branch" (where what is known ends), "ends" (the last boundary
    of a prompt and of its output), "pow2" (256, 512, 1,024, ... tokens), "every:N" (multiples of N tokens).
    alignment: tokens between the boundaries at which a state can stand.
    """

    def __init__(self, names: tuple[str, ...], alignment: i64) -> None:
        self.alignment = alignment
        self.takes_branch = "branch" in names
        self.takes_prompt_end = "ends" in names or "last" in names
        self.takes_output_end = "ends" in names
        self.takes_powers = "pow2" in names
        self.every: i64 = 0
        for name in names:
            if name.startswith("every:"):
                self.every = int(name[6:])
        self.positions: list[int] = []
        self.kinds: list[int] = []
        self._hit: i64 = 0

    def find(self, hit: i64, known: i64, last: i64, total: i64, told: list[int], queued: list[int]) -> None:
        """Set `positions` and `kinds` to what a request should leave, in tokens.

        hit: where it began to compute. known: where what is known of it ended. last: its longest useful hit. total: its
        end, with what it was answered, or 0 where that is not known. A position is named once, by the first rule of:
        queue, junction, output end, prompt end, told, multiples, powers. O(positions ** 2).
        """
        self.positions = []
        self.kinds = []
        self._hit = hit
        for position in queued:
            self._want(position, QUEUED, last)
        if self.takes_branch:
            self._want(known, JUNCTION, last)
        if self.takes_output_end:
            self._want(total, OUTPUT_END, total)
        if self.takes_prompt_end:
            self._want(last, PROMPT_END, last)
        for position in told:
            self._want(position, TOLD, max(last, total))
        if self.every > 0:
            position = (hit // self.every + 1) * self.every
            while position <= last:
                self._want(position, REGULAR, last)
                position += self.every
        if self.takes_powers:
            position = FIRST_POWER
            while position <= last:
                self._want(position, REGULAR, last)
                position *= 2

    def _want(self, position: i64, kind: i64, limit: i64) -> None:
        """Add a position that is computed now and not wanted yet."""
        position -= position % self.alignment
        if self._hit < position <= limit and int(position) not in self.positions:
            self.positions.append(int(position))
            self.kinds.append(int(kind))
