"""What KV events have told so far, and that it is what the cache holds: a consumer that loses nothing."""

from __future__ import annotations

from typing import Any

import numpy as np


class Told:
    """Roots and contents by id, and what each pool below token blocks holds of them."""

    def __init__(self) -> None:
        self.roots: dict[int, Any] = {}
        self.contents: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.pools: list[dict[int, tuple[int, int]]] = []

    def apply(self, events: Any) -> None:
        if events.cleared:
            self.roots, self.contents, self.pools = {}, {}, [{} for _ in self.pools]
        self.roots.update(events.new_roots)
        for root in events.lost_roots:
            del self.roots[root]
        came = zip(events.parents.tolist(), map(tuple, events.token_ids.tolist()), strict=True)
        _replay(self.contents, events.contents, came)
        self.pools = self.pools or [{} for _ in events.pools]
        for held, changes in zip(self.pools, events.pools, strict=True):
            _replay(held, changes.ids, zip(changes.contents.tolist(), changes.groups.tolist(), strict=True))

    def differences(self, cache: Any) -> list[str]:
        """Where it is not what the structures of `cache` hold."""
        parts = cache._parts
        found = []
        if self.contents != (contents := contents_of(parts.token_blocks.index, parts.block_size)):
            found.append(f"contents {self.contents} are {contents}")
        for number, pool in enumerate(parts.store.pools):
            if self.pools[number] != (held := _held(pool, len(cache.config.layer_groups))):
                found.append(f"pool {number}: {self.pools[number]} are {held}")
        roots = {int(content): keys for keys, content in parts.token_blocks.index.roots._contents.items()}
        if self.roots != roots:
            found.append(f"roots {self.roots} are {roots}")
        return found


def _replay(known: dict[int, Any], ids: Any, came: Any) -> None:
    """What comes was not there, and what goes was."""
    for name in ids.tolist():
        if name > 0:
            assert name not in known
            known[name] = next(came)
        else:
            del known[-name]
    assert next(came, None) is None


def _identities(index: Any) -> list[tuple[int, int, int]]:
    """(block, content, parent) of the blocks whose keys and values are there."""
    pairs = np.frombuffer(memoryview(index.identity), np.int64).reshape(-1, 2).tolist()
    owners = np.frombuffer(memoryview(index.owner), np.int32).tolist()
    return [(b, pairs[b][0], pairs[b][1]) for b in range(len(pairs)) if pairs[b][0] and not owners[b]]


def contents_of(index: Any, size: int) -> dict[int, tuple[int, tuple[int, ...]]]:
    return {content: (parent, _tokens(index, block)[:size]) for block, content, parent in _identities(index)}


def _tokens(index: Any, block: int) -> tuple[int, ...]:
    words = np.frombuffer(memoryview(index.rows.words), np.int64)
    first = index.rows.start_of(block)
    return tuple(words[first : first + index.rows.num_words].view(np.int32).tolist())


def _held(pool: Any, num_groups: int) -> dict[int, tuple[int, int]]:
    blocks = _identities(pool.index)
    return {name: (pool.content_of(block), min(pool.group_of(block), num_groups)) for block, name, _ in blocks}
