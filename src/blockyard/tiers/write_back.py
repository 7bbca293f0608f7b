"""Objects are stored when the pool evicts their blocks, before anything is written over them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..core.manager import KVCacheManager
from ..errors import InvalidArgument
from .pool_names import PoolNames, require_plain

#: Of a block that was evicted: its id, name and digest.
Evicted = tuple[int, bytes, bytes]


class WriteBack:
    """It knows the names of the blocks whose bytes were computed, and hands over those that the pool evicts.

    A block is known from the step that computed it until the pool says that it lost its content (`pool.on_evict`, at
    the end of the call that took it): then its bytes are still there. What is named is what the index says then, so a
    block that was given away unseen belongs to none.

    on_evicted: takes what goes. Raises `InvalidArgument` for a cache with layer groups or a CPU pool, and where
    `pool.on_evict` is taken.
    """

    def __init__(self, cache: KVCacheManager, on_evicted: Callable[[list[Evicted]], None]) -> None:
        require_plain('write "back"', cache)
        if cache.pool.on_evict is not None:
            raise InvalidArgument(f"cache.pool.on_evict is {cache.pool.on_evict!r}; a tier that writes back needs it")
        self._cache = cache
        self._on_evicted = on_evicted
        self._generation = -1
        self._names: PoolNames | None = None
        self._computed: list[int] = []
        #: Of each block whose content is known: the content's id, name and digest.
        self._held: dict[int, tuple[int, bytes, bytes]] = {}
        cache.pool.on_evict = self._take

    def __len__(self) -> int:
        return len(self._held)

    def computed(self, blocks: npt.NDArray[np.int32]) -> None:
        """Take blocks in that a step computed, in the order of their prompt; `learn` names them after its commit."""
        self._computed += [block for block in blocks.tolist() if block not in self._held]

    def learn(self, layout: bytes) -> None:
        """Name what was computed since the last call, as the index knows it now. O(blocks)."""
        if self._generation != self._cache.generation or self._names is None:
            self._names = PoolNames(self._cache, layout)
            self._held.clear()
            self._generation = self._cache.generation
        computed, self._computed = self._computed, []
        blocks = np.array([block for block in computed if self._cache.block(block).is_computed], np.int32)
        if not len(blocks):
            return
        identities = np.concatenate([self._cache.contents.identities(block, block + 1) for block in blocks.tolist()])
        blocks, identities = blocks[identities[:, 0] != 0], identities[identities[:, 0] != 0]
        found = self._names.learn(blocks, identities)
        for block, content, named in zip(blocks.tolist(), identities[:, 0].tolist(), found, strict=True):
            if named is not None:
                self._held[block] = (content, *named)

    def _take(self, blocks: npt.NDArray[np.int32]) -> None:
        """The pool says which blocks lost their content in its last call."""
        if self._generation != self._cache.generation or self._names is None:
            return
        gone = []
        for block in blocks.tolist():
            held = self._held.pop(block, None)
            if held is not None:
                self._names.forget(held[0])
                gone.append((block, held[1], held[2]))
        if gone:
            self._on_evicted(gone)

    def close(self) -> None:
        """Let go of the pool."""
        self._cache.pool.on_evict = None
