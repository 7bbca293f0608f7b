"""Rules that choose the checkpoint positions of a prompt."""

from typing import Final

from mypy_extensions import i64

from .checkpoint import BRANCH, OUTPUT_END, PROMPT_END, REGULAR, REQUESTED, WAITING

#: The first power of two at which `pow2` takes a checkpoint, in tokens.
FIRST_POWER: Final[i64] = 256


class CheckpointRules:
    """The checkpoint rules of a cache, applied to one prompt after another.

    Args:
        names: "last" (the last position of a prompt), "branch" (the branch point: where the known part of a prompt
            ends), "ends" (the last positions of a prompt and of its output), "pow2" (256, 512, 1,024, ... tokens),
            "every:N" (multiples of N tokens).
        alignment: checkpoint positions are multiples of this many tokens.
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
        #: The positions of the latest prompt, each once, and the kind of each.
        self.positions: list[int] = []
        self.kinds: list[int] = []

    def choose(self, hit: i64, known: i64, last: i64, total: i64, requested: list[int], waiting: list[int]) -> None:
        """Set `positions` and `kinds` for a prompt. O(positions ** 2).

        A position that several rules choose has the kind of the first of: waiting, branch, output end, prompt end,
        requested, every:N, pow2.

        Args:
            hit: tokens that the prompt hits; no position is chosen up to there.
            known: tokens of it that were known.
            last: the longest hit that a later request can have of it.
            total: its tokens, those of the output included; 0 while they are unknown.
            requested: positions that the application named.
            waiting: where the prompt parts from others that wait.
        """
        self.positions = []
        self.kinds = []
        for position in waiting:
            self._add(position, WAITING, hit, last)
        if self.takes_branch:
            self._add(known, BRANCH, hit, last)
        if self.takes_output_end:
            self._add(total, OUTPUT_END, hit, total)
        if self.takes_prompt_end:
            self._add(last, PROMPT_END, hit, last)
        for position in requested:
            self._add(position, REQUESTED, hit, max(last, total))
        if self.every > 0:
            position = (hit // self.every + 1) * self.every
            while position <= last:
                self._add(position, REGULAR, hit, last)
                position += self.every
        if self.takes_powers:
            position = FIRST_POWER
            while position <= last:
                self._add(position, REGULAR, hit, last)
                position *= 2

    def _add(self, position: i64, kind: i64, hit: i64, limit: i64) -> None:
        position -= position % self.alignment
        if hit < position <= limit and int(position) not in self.positions:
            self.positions.append(int(position))
            self.kinds.append(int(kind))
