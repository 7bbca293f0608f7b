"""Objects are stored when the pool evicts their blocks, before anything is written over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager
from blockyard.errors import InvalidArgument

from .pool_names import PoolNames, require_plain

#: Of a block that was evicted: its id, name and digest.
Evicted = tuple[int, bytes, bytes]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a block of the pool caches: its content's id, name and digest, and the name of the block before it."""

    content: int
    name: bytes
    digest: bytes
    before: bytes


class WriteBack:
    """It knows the names of the blocks whose bytes were computed, and hands over those that the pool evicts.

    A block is known from the step that computed it until the pool says that it lost its content (`pool.on_evict`, at
    the end of the call that took it): then its bytes are still there. What is named is what the index says then, so a
    block that was given away unseen belongs to none.

    A prompt's last blocks are evicted first, and what it begins with may stay in the pool for good, where a killed
    process loses it. So an evicted block is handed over behind all before it that are not stored yet.

    on_evicted: takes the objects, each behind what it hangs on, and returns those of them that are to be stored later.
    is_stored: whether an object of this name was stored. Raises `InvalidArgument` for a cache with layer groups or a
    CPU pool, and where `pool.on_evict` is taken.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        on_evicted: Callable[[list[Evicted]], list[bytes]],
        is_stored: Callable[[bytes], bool],
    ) -> None:
        require_plain('write "back"', cache)
        if cache.pool.on_evict is not None:
            raise InvalidArgument(f"cache.pool.on_evict is {cache.pool.on_evict!r}; a tier that writes back needs it")
        self._cache = cache
        self._on_evicted = on_evicted
        self._is_stored = is_stored
        self._generation = -1
        self._names: PoolNames | None = None
        self._computed: list[int] = []
        self._held: dict[int, _Held] = {}
        #: A block of each name among them.
        self._blocks: dict[bytes, int] = {}
        #: Names of objects that were not stored while the pool had them: for want of buffers, or because a tier failed.
        self._missing: dict[bytes, None] = {}
        self._failed: dict[bytes, None] = {}
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
            self._blocks.clear()
            self._missing.clear()
            self._failed.clear()
            self._generation = self._cache.generation
        computed, self._computed = self._computed, []
        blocks = np.array([block for block in computed if self._cache.block(block).is_computed], np.int32)
        if not len(blocks):
            return
        identities = np.concatenate([self._cache.contents.identities(block, block + 1) for block in blocks.tolist()])
        blocks, identities = blocks[identities[:, 0] != 0], identities[identities[:, 0] != 0]
        found = self._names.learn(blocks, identities)
        for block, (content, before), named in zip(blocks.tolist(), identities.tolist(), found, strict=True):
            if named is not None:
                self._held[block] = _Held(content, *named, self._names.name_of(before))
                self._blocks[named[0]] = block

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def fail(self, names: Iterable[bytes]) -> None:
        """Note that a tier did not store objects: those that the pool has are tried again at the next eviction."""
        self._failed.update(dict.fromkeys(name for name in names if name in self._blocks))

    def store_missing(self) -> None:
        """Hand over what had no buffer and is still in the pool. O(objects)."""
        if self._missing:
            names, self._missing = self._missing, {}
            self._hand_over(self._unstored(names))

    def _hand_over(self, objects: list[Evicted]) -> None:
        if objects:
            self._missing.update(dict.fromkeys(name for name in self._on_evicted(objects) if name in self._blocks))

    def _unstored(self, names: Iterable[bytes]) -> list[Evicted]:
        """Return the objects of these names that the pool has, each behind all before it that are not stored."""
        seen: dict[bytes, Evicted] = {}
        for last in names:
            chain, name = [], last
            while name in self._blocks and name not in seen and not self._is_stored(name):
                block = self._blocks[name]
                chain.append((block, name, self._held[block].digest))
                name = self._held[block].before
            seen.update({each[1]: each for each in reversed(chain)})
        return list(seen.values())

    def _take(self, blocks: npt.NDArray[np.int32]) -> None:
        """The pool says which blocks lost their content in its last call."""
        if self._generation != self._cache.generation or self._names is None:
            return
        lost = {block: self._held[block] for block in blocks.tolist() if block in self._held}
        if not lost:
            return
        found = self._unstored([*self._missing, *self._failed, *(held.name for held in lost.values())])
        self._missing, self._failed = {}, {}
        for block, held in lost.items():
            del self._held[block]
            if self._blocks.get(held.name) == block:
                del self._blocks[held.name]
                self._names.forget(held.content)
        self._hand_over(found)

    def close(self) -> None:
        """Let go of the pool."""
        self._cache.pool.on_evict = None
