"""Names of the objects of cached blocks, computed from the pool's index: no request has to remember them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager
from blockyard.errors import InvalidArgument

from .header import digest_of, name_after, root_of
from .tier import NAME_BYTES

#: Recently used roots that are examined: at first, and at most.
_FIRST_ROOTS, _MAX_ROOTS = 64, 2**16


def require_plain(what: str, cache: KVCacheManager) -> None:
    """Raise `InvalidArgument` unless the hashed blocks are those that hold keys and values."""
    if cache.config.is_mapped:
        raise InvalidArgument(f"{what} needs one layer group without a window, and no CPU pool")


def require_offloadable(cache: KVCacheManager, shards: int) -> None:
    """Raise `InvalidArgument` for a cache that an offload does not support. shards: context shards of an object."""
    config = cache.config
    if not config.enable_prefix_caching:
        raise InvalidArgument("enable_prefix_caching is False; tiers need it: set it to True")
    for number, group in enumerate(config.layer_groups):
        if group.shards != shards:
            raise InvalidArgument(
                f"groups[{number}] has {group.shards} shards, blocks has {shards}; tiers need all shards of a block"
            )
        if group.block_size != config.layer_groups[0].block_size:
            raise InvalidArgument(
                f"tiers need one block size; groups[0] has {config.layer_groups[0].block_size} tokens a block, "
                f"groups[{number}] {group.block_size}"
            )
    if config.max_steps_in_flight > 1:
        raise InvalidArgument(f"max_steps_in_flight is {config.max_steps_in_flight}; with tiers it must be 1")


class PoolNames:
    """Digests of one layout, by the ids of contents and roots. An id is never used twice."""

    def __init__(self, cache: KVCacheManager, layout: bytes) -> None:
        self._cache = cache
        self._layout = layout
        self._digests: dict[int, bytes] = {}
        #: The roots among them, and their number after the last `_forget_roots`.
        self._roots: set[int] = set()
        self._num_roots = _FIRST_ROOTS
        #: Roots up to this id were examined: other ids up to it are not roots. Ids grow.
        self._examined_to = 0

    def name_blocks(
        self, blocks: npt.NDArray[np.int32], identities: npt.NDArray[np.int64]
    ) -> list[tuple[bytes, bytes] | None]:
        """Return the name and the tokens' digest of each block, in the order of their contents' ids. O(tokens).

        A block has None instead if its predecessor is not known or a span covers part of it. Finding a new root takes
        a lookup for each root that was used after it.

        Args:
            blocks: the blocks.
            identities: their current contents, (n, 2): the ids of the content and of its predecessor.
        """
        known = self._digests
        found: list[tuple[bytes, bytes] | None] = []
        self._find_roots(
            {before for before in identities[:, 1].tolist() if before > self._examined_to and before not in known}
            - set(identities[:, 0].tolist())
        )
        tokens = self._cache.contents.tokens(blocks)
        for own, (content, before) in zip(tokens.astype("<i4"), identities.tolist(), strict=True):
            last, data = known.get(before), own.tobytes()
            if last is None:
                found.append(None)
                continue
            known[content] = last = name_after(last, data)
            found.append((last[:NAME_BYTES], digest_of(data)))
        return found

    def _find_roots(self, wanted: set[int]) -> None:
        most, keys_of = _FIRST_ROOTS, dict[int, tuple[object, ...]]()
        while wanted:
            keys_of = self._cache.contents.keys(most)
            if len(keys_of) < most or most >= _MAX_ROOTS:
                self._examined_to = max(wanted)
                break
            if wanted <= keys_of.keys():
                break
            most *= 8
        for root, keys in keys_of.items():
            if root not in self._digests and all(isinstance(key, tuple) for key in keys):  # else a span's
                self._digests[root] = root_of(self._layout, self._cache.block_size, keys)
                self._roots.add(root)
        if len(self._roots) > 2 * self._num_roots:
            self._forget_roots()

    def _forget_roots(self) -> None:
        """Remove roots that the index no longer has. O(roots), each time that their number has doubled."""
        gone = self._roots - self._cache.contents.keys(_MAX_ROOTS).keys()
        self._roots -= gone
        for root in gone:
            del self._digests[root]
        self._num_roots = max(len(self._roots), _FIRST_ROOTS)

    def name_of(self, content: int) -> bytes:
        """Return the name of a content or a root; b"" if it is not known."""
        return self._digests.get(content, b"")[:NAME_BYTES]

    def forget(self, content: int) -> None:
        """Remove a content that the index no longer has."""
        self._digests.pop(content, None)
