"""The parts that storing and loading of an offload share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager
from blockyard.arguments import shown
from blockyard.errors import BlockyardError, InvalidArgument

from .engine_memory import Blocks, IsDone, States
from .header import NameChain, layout_id
from .state_names import state_name
from .transfers import RequestRecord
from .uses import TierUse


class PendingCopy(NamedTuple):
    """A copy that the device has not finished: a function that reports its end, its rows, and what to call then."""

    is_done: IsDone
    rows: list[int]
    finish: Callable[[], None]


class Context:
    """The cache, storage, tiers and request records of an `Offload`.

    Args:
        cache: the manager.
        blocks: its KV storage.
        states: its states; None for a cache without states.
        uses: the tiers, nearest first.
        make_model: returns the fingerprint of weights and config.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        blocks: Blocks,
        states: States | None,
        uses: Sequence[TierUse],
        make_model: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        self.cache, self.blocks, self.states, self.uses, self.clock = cache, blocks, states, uses, clock
        self.block_size = cache.config.layer_groups[0].block_size
        #: Request records by key.
        self.records: dict[Hashable, RequestRecord] = {}
        #: Ids for transfers.
        self.numbers = count(1)
        #: Copies that the device has not finished, the oldest first.
        self.copies: list[PendingCopy] = []
        #: Whether a call was interrupted or failed, so that rows and loads must be mended.
        self.is_torn = False
        #: Whether such a call may have lost results of transfers, or the queueing of one.
        self.may_miss_results = False
        self.state_layout = b""
        self._make_model = make_model
        self._layout, self._generation = b"", -1

    def layout(self) -> bytes:
        """Return the layout's id. After a reset of the prefix cache, compute it again from the model's fingerprint."""
        if self._generation != self.cache.generation:
            model = self._make_model()
            if not isinstance(model, Mapping):
                raise InvalidArgument(f"model returned {shown(model)}; it must return a dict of plain values")
            fields = {"blocks": dict(self.blocks.layout()), "model": dict(model)}
            self._layout, self._generation = layout_id(**fields), self.cache.generation
            if self.states is not None:
                self.state_layout = layout_id(states=self.states.layout(), **fields)
        return self._layout

    def note_failure(self, error: BaseException) -> None:
        """Note that a call was interrupted or failed."""
        self.is_torn = True
        if not isinstance(error, BlockyardError):
            self.may_miss_results = True

    def end_copies(self) -> None:
        """Call the functions of the copies that the device has finished. O(copies)."""
        while self.copies and self.copies[0].is_done():
            self.copies.pop(0).finish()

    def rows_of_copies(self) -> set[int]:
        """Return the rows that unfinished copies read or write."""
        return {row for copy in self.copies for row in copy.rows}

    def names(self, chain: NameChain) -> set[bytes]:
        """Return the names of a prompt's objects, including those of states."""
        names = set(chain.names)
        if self.states is not None:
            names |= {state_name(self.state_layout, name) for name in chain.names}
        return names

    def block_ids(self, seq: int, positions: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return the blocks at these positions of a sequence, (n, groups); 0 for a block that was released."""
        num_groups = len(self.cache.config.layer_groups)
        columns = [self.cache.block_ids(seq, group)[list(positions)] for group in range(num_groups)]
        return np.stack(columns, axis=1)
