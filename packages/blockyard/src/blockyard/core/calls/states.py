"""States that leave the cache or come from outside: where they lie, and which ones are not to be kept."""

import numpy as np
import numpy.typing as npt
from mypy_extensions import i64

from ...errors import InvalidArgument, SequenceNotReady
from ..index.prompt import Prompt
from ..parts import Parts
from ..store.state_group import StateGroup
from .in_flight import require_nothing_reserved


class StateCalls:
    """Answers for the kept states of a cache with a state group; refuses to for one without."""

    def __init__(self, parts: Parts) -> None:
        self.token_blocks = parts.token_blocks
        self.sequences = parts.sequences
        self.states = parts.grouped.states if parts.grouped is not None else None

    def require(self, action: str) -> StateGroup:
        """Return the state group. Raises `InvalidArgument` where there is none."""
        if self.states is None:
            raise InvalidArgument(f"{action} needs a state group; groups has none")
        return self.states

    def blocks(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Return the blocks of the state that is kept behind all of a prompt, in order; empty where none is."""
        states = self.require("state_blocks")
        index = self.token_blocks.index
        count = prompt.num_tokens // states.block_size
        parts: list[int] = []
        if prompt.num_tokens % states.alignment == 0:
            root = index.known_root(prompt.keys)
            found = index.find_under(root, prompt, count)
            if i64(len(found)) == count:
                parts = states.parts_of(index.content_of(i64(found[count - 1])))
        return np.array(parts, dtype=np.int32)

    def skip(self, row: i64, num_tokens: i64, kept: i64) -> None:
        """Keep no state of a row before its first `num_tokens` tokens are computed but one at `kept`; 0 for none."""
        states = self.require("skip_states")
        require_nothing_reserved(self.sequences, row, "skip_states")
        least: i64 = 0 if states.lacks(row) else self.sequences.num_computed[row]
        if kept > 0 and (kept % states.alignment != 0 or kept <= least):
            raise InvalidArgument(
                f"kept is {kept}; it must be a multiple of {states.alignment}, above the {least} computed tokens"
            )
        states.skip(row, num_tokens, kept)

    def drop_saves(self, row: i64) -> None:
        """Keep none of the states that the open steps of a row save."""
        self.require("drop_saves").drop_saves(row)

    def slot(self, row: i64) -> i64:
        """Return the slot that has the state of a row now."""
        states = self.require("state_slot")
        require_nothing_reserved(self.sequences, row, "state_slot")
        if states.lacks(row):
            raise SequenceNotReady(f"state_slot: the state of {self.sequences.name(row)} is still to be brought")
        if not states.is_begun(row):
            raise SequenceNotReady(
                f"state_slot: {self.sequences.name(row)} has no state in a slot yet; its next step puts one there"
            )
        return states.source(row)
