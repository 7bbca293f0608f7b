"""The parts that storing and loading of an offload share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager
from blockyard.arguments import shown
from blockyard.errors import InvalidArgument

from .engine_memory import Blocks, IsDone, States
from .header import NameChain, layout_id
from .state_names import state_name
from .transfers import RequestRecord
from .uses import TierUse


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
        #: Copies that the device has not finished, each with the function to call after it.
        self.copies: list[tuple[IsDone, Callable[[], None]]] = []
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

    def end_copies(self) -> None:
        """Call the functions of the copies that the device has finished. O(copies)."""
        while self.copies and self.copies[0][0]():
            self.copies.pop(0)[1]()

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
