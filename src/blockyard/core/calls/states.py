"""States that leave the cache or come from outside: where a kept one lies, and which ones are not to be kept."""

import numpy as np
import numpy.typing as npt
from mypy_extensions import i64

from ...errors import InvalidArgument
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

    def skip(self, row: i64, num_tokens: i64) -> None:
        """Keep no state of a row before its first `num_tokens` tokens are computed."""
        states = self.require("skip_states")
        require_nothing_reserved(self.sequences, row, "skip_states")
        states.skip(row, num_tokens)
