"""The index gives what a pool caches its names: no request has to remember them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..core.manager import KVCacheManager
from ..errors import InvalidArgument
from .header import digest_of, name_after, root_of
from .tier import NAME_BYTES

#: Roots that are looked at, the latest used ones.
_MOST_ROOTS = 2**16


def require_plain(what: str, cache: KVCacheManager) -> None:
    """Raise `InvalidArgument` for a cache of which the blocks of the pool are not those of the index."""
    if cache.config.is_mapped:
        raise InvalidArgument(f"{what} needs one layer group without a window, and no CPU pool")


class PoolNames:
    """It keeps whole digests of one layout by the ids of contents and roots, of which none is used twice."""

    def __init__(self, cache: KVCacheManager, layout: bytes) -> None:
        self._cache = cache
        self._layout = layout
        self._digests: dict[int, bytes] = {}

    def learn(
        self, blocks: npt.NDArray[np.int32], identities: npt.NDArray[np.int64]
    ) -> list[tuple[bytes, bytes] | None]:
        """Returns the name and the tokens' digest of each block, in the order of their contents' ids. O(tokens).

        blocks: they cache `identities` now, (n, 2), content and what is before it. None where that has no name here:
        it is not known, or spans stand in the block.
        """
        known = self._digests
        found: list[tuple[bytes, bytes] | None] = []
        if any(before not in known for before in identities[:, 1].tolist()):
            self._find_roots()
        tokens = self._cache.contents.tokens(blocks)
        for own, (content, before) in zip(tokens.astype("<i4"), identities.tolist(), strict=True):
            last, data = known.get(before), own.tobytes()
            if last is None:
                found.append(None)
                continue
            known[content] = last = name_after(last, data)
            found.append((last[:NAME_BYTES], digest_of(data)))
        return found

    def _find_roots(self) -> None:
        for root, keys in self._cache.contents.keys(_MOST_ROOTS).items():
            if root not in self._digests and all(isinstance(key, tuple) for key in keys):  # else a span's
                self._digests[root] = root_of(self._layout, self._cache.block_size, keys)

    def forget(self, content: int) -> None:
        """Forget a content that is gone."""
        self._digests.pop(content, None)
