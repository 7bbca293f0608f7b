"""Stores objects when the pool evicts their blocks, before the blocks are overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager
from blockyard.errors import InvalidArgument

from .pool_names import PoolNames, require_plain
from .snapshot import NamedBlock


@dataclass(frozen=True, slots=True)
class _Cached:
    """The content of a cached block: its id, name and digest, and the name of the block before it."""

    content: int
    name: bytes
    digest: bytes
    previous: bytes


class WriteBack:
    """Names the blocks that were computed, and stores those that the pool evicts.

    A block is tracked from the step that computed it until the pool reports that it lost its content (`pool.on_evict`,
    at the end of the call that took the block): its bytes are still intact then. Names are taken from the index at the
    next poll, so a block that was reused in between is not tracked.

    The pool evicts a prompt's last blocks first, and its beginning may stay in the pool for good, where a killed
    process loses it. So an evicted block is stored after all blocks of its prefix that are not stored yet.

    Args:
        cache: the manager; one layer group and no CPU pool.
        on_evicted: stores the objects, each after its prefix, and returns the names to be stored later.
        is_stored: returns whether an object of this name was stored.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        on_evicted: Callable[[list[NamedBlock]], list[bytes]],
        is_stored: Callable[[bytes], bool],
    ) -> None:
        require_plain('write="back"', cache)
        if cache.pool.on_evict is not None:
            raise InvalidArgument(
                f"cache.pool.on_evict is {cache.pool.on_evict!r}; a tier with write=back needs it: leave it None"
            )
        self._cache = cache
        self._on_evicted = on_evicted
        self._is_stored = is_stored
        self._generation = -1
        self._names: PoolNames | None = None
        self._computed: list[int] = []
        self._cached: dict[int, _Cached] = {}
        #: A block of each name among them.
        self._blocks: dict[bytes, int] = {}
        #: Names of cached objects that were not stored: no buffer was free, or a tier failed.
        self._missing: dict[bytes, None] = {}
        self._failed: dict[bytes, None] = {}
        self._num_failures = cache.pool.num_on_evict_failures
        cache.pool.on_evict = self._store_lost

    def __len__(self) -> int:
        return len(self._cached)

    def note_computed(self, blocks: npt.NDArray[np.int32]) -> None:
        """Record blocks that a step computed, in the order of their prompt, to be named after the commit."""
        self._computed += [block for block in blocks.tolist() if block not in self._cached]

    def name_computed(self, layout: bytes) -> None:
        """Name the blocks that were computed since the last call, as the index has them now. O(blocks)."""
        if self._generation != self._cache.generation or self._names is None:
            self._names = PoolNames(self._cache, layout)
            self._forget_all()
            self._generation = self._cache.generation
        self._forget_missed()
        computed, self._computed = self._computed, []
        blocks = np.array([block for block in computed if self._cache.block(block).is_computed], np.int32)
        if not len(blocks):
            return
        identities = np.concatenate([self._cache.contents.identities(block, block + 1) for block in blocks.tolist()])
        blocks, identities = blocks[identities[:, 0] != 0], identities[identities[:, 0] != 0]
        found = self._names.name_blocks(blocks, identities)
        for block, (content, previous), named in zip(blocks.tolist(), identities.tolist(), found, strict=True):
            if named is not None:
                self._cached[block] = _Cached(content, *named, self._names.name_of(previous))
                self._blocks[named[0]] = block

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def note_failed(self, names: Iterable[bytes]) -> None:
        """Note that a tier did not store objects. Those still in the pool are tried again at the next eviction."""
        self._failed.update(dict.fromkeys(name for name in names if name in self._blocks))

    def _forget_all(self) -> None:
        for known in (self._cached, self._blocks, self._missing, self._failed):
            known.clear()

    def _forget_missed(self) -> None:
        """Forget all blocks if `_store_lost` was interrupted or could not be called: some may have other content."""
        if self._num_failures != self._cache.pool.num_on_evict_failures:
            self._forget_all()
            self._num_failures = self._cache.pool.num_on_evict_failures

    def store_missing(self) -> None:
        """Store objects that found no buffer before and are still in the pool. O(objects)."""
        self._forget_missed()
        if self._missing:
            names, self._missing = self._missing, {}
            self._store(self._unstored(names))

    def _store(self, objects: list[NamedBlock]) -> None:
        if objects:
            self._missing.update(dict.fromkeys(name for name in self._on_evicted(objects) if name in self._blocks))

    def _unstored(self, names: Iterable[bytes]) -> list[NamedBlock]:
        """Return the cached objects of these names, each after all of its prefix that is not stored."""
        found: dict[bytes, NamedBlock] = {}
        for last in names:
            chain, name = [], last
            while name in self._blocks and name not in found and not self._is_stored(name):
                block = self._blocks[name]
                chain.append(NamedBlock(block, name, self._cached[block].digest))
                name = self._cached[block].previous
            found.update({each.name: each for each in reversed(chain)})
        return list(found.values())

    def _store_lost(self, blocks: npt.NDArray[np.int32]) -> None:
        """Store the blocks that lost their content in the pool's last call, and those that failed before."""
        if self._generation != self._cache.generation or self._names is None:
            return
        self._forget_missed()
        lost = {block: self._cached[block] for block in blocks.tolist() if block in self._cached}
        if not lost:
            return
        found = self._unstored([*self._missing, *self._failed, *(cached.name for cached in lost.values())])
        self._missing, self._failed = {}, {}
        for block, cached in lost.items():
            del self._cached[block]
            if self._blocks.get(cached.name) == block:
                del self._blocks[cached.name]
                self._names.forget(cached.content)
        self._store(found)

    def close(self) -> None:
        """Stop following the pool's evictions."""
        self._cache.pool.on_evict = None
