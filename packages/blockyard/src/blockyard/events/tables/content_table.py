"""The published contents of a cache, kept outside the engine's thread, and the events and snapshots made from it.

Terms of this module and its neighbours:

    row         a content or root of the cache, or the id of a removed one that still has children
    root        parent of first blocks (a request's keys), or child of a content if spans reach into the next block
    place       a layer group and a medium (2 * group + medium); a cache with one group and no CPU pool only has the GPU
    reachable   all ancestors exist, so prompts can hit it; only reachable contents are published
    publish     write an event that a content, or a group's block that ends with it, is stored
    unpublish   write an event that it is removed
    add, remove apply the cache's changes of contents, roots, and blocks of the pools
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...config import CacheConfig
from ...core.tokens import pack_rows
from ...kv_events import BlockChanges, KVCacheEvents
from ..wire import Event, PlainKey
from .content_rows import CONTENT, GONE, ROOT, ContentNames, ContentRows
from .event_writer import EventWriter
from .place_rows import PlaceRows

GPU_PLACE: Final[i64] = 0
MEDIA: Final[i64] = 2
#: Contents applied, and rows visited, at a time: at most two tenths of a millisecond.
CONTENTS_A_GO: Final[i64] = 2048
ROWS_A_GO: Final[i64] = 4096

#: End of a traversal; and result for a group's block of which a part was removed.
END: Final[i64] = 0
BROKEN: Final[i64] = -1


class Root:
    """Keys of a request, before its first block, or spans after a content."""

    def __init__(self, request: tuple[PlainKey, ...], spans: tuple[PlainKey, ...]) -> None:
        self.request = request
        self.spans = spans


class ContentTable:
    """Contents by id, with their tokens, parents, and the places that hold them.

    Contents that no prompt can reach, because an ancestor was removed, are not published: when a content is removed,
    all its descendants are published as removed. So consumers never see two equal contents. A content may return under
    its id if an equal block was still to be computed; then its descendants are published again.

    Memory: about 118 bytes (110 with ids) for each of the cache's blocks of 16 tokens from the start, at most 128 MiB
    then.

    Args:
        config: config of the cache.
        by_content: whether consumers know a content by a hash of it (`ContentNames`) or by the cache's own id.
    """

    def __init__(self, config: CacheConfig, by_content: bool = False) -> None:
        self.config = config
        #: False if applying changes failed half-way: then only a reset of the cache restores it.
        self.is_whole = True
        self.rows = ContentRows(config.hash_block_size, config.num_blocks)
        num_groups = len(config.layer_groups)
        self.places = PlaceRows(self.rows, int(MEDIA) * num_groups, config.state_blocks)
        #: Roots by row.
        self.roots: dict[int, Root] = {}
        self._is_mapped = config.is_mapped
        #: Token blocks per block, by layer group; a state is published as the token block before it.
        self._lengths = [group.block_size // config.hash_block_size for group in config.layer_groups]
        self._state_group: i64 = num_groups
        if config.state_blocks > 0:
            self._lengths.append(1)
        self._out = EventWriter(config)
        #: None if consumers know contents by the cache's ids.
        self._names: ContentNames | None = None
        self.name_by(by_content)

    def name_by(self, by_content: bool) -> None:
        """Set whether consumers know contents by hashes or by ids. O(contents) if that changes."""
        if by_content == (self._names is not None):
            return
        self.rows.name_apart(by_content)
        self._names = ContentNames(self.rows) if by_content else None
        for root in self._request_roots():
            self._name(root)
            row = self.rows.next_preorder(root, root)
            while row != END:
                self._name(row)
                row = self.rows.next_preorder(row, root)

    def _name(self, row: i64) -> None:
        names = self._names
        if names is None:
            return
        if self.rows.kind[row] == CONTENT:
            names.name_content(row)
        elif self.rows.kind[row] == ROOT:
            root = self.roots[int(row)]
            names.name_root(row, root.request, root.spans)

    def apply(self, changes: KVCacheEvents, rest: Callable[[], None] | None = None) -> list[Event]:
        """Apply a cache's changes and return the events for them. O(changes).

        Args:
            changes: the changes.
            rest: called from time to time, so that other threads can run. The table must not be used meanwhile.
        """
        was_whole = self.is_whole or changes.cleared
        self.is_whole = False
        self._out.abandon()
        if changes.cleared:
            self._clear()
        for root, keys in changes.new_roots:
            self._add_root(root, keys)
        for root in changes.lost_roots:
            self._remove_root(root)
        self._apply_in_parts(changes, rest)
        self._apply_pools(changes.pools)
        events = self._out.finish()
        self.is_whole = was_whole
        return events

    # Changes.

    def _clear(self) -> None:
        self.rows.clear()
        self.places.clear()
        self.roots.clear()
        self._out.clear()

    def _add_root(self, root: int, keys: tuple[Any, ...]) -> None:
        rows = self.rows
        row = rows.row_of(root)
        rows.kind[row] = ROOT
        if keys and isinstance(keys[0], int):
            after = rows.row_of(keys[0])
            self.roots[int(row)] = Root((), keys[1])
            rows.link(row, after)
            rows.request[row] = rows.request[after]
        else:
            self.roots[int(row)] = Root(keys, ())
            rows.request[row] = i32(row)
        self._name(row)

    def _remove_root(self, root: int) -> None:
        """Remove a root; no prompt can reach its descendants."""
        row = self.rows.find(root)
        if row == 0 or self.rows.kind[row] != ROOT:
            return
        self._unpublish_descendants(row)
        del self.roots[int(row)]
        self._forget(row)

    def _forget(self, row: i64) -> None:
        """Mark a content or root as removed. Its row stays while it has children."""
        rows = self.rows
        rows.kind[row] = GONE
        rows.request[row] = 0
        rows.unlink(row)
        rows.drop_if_unused(row)

    def _apply_in_parts(self, changes: KVCacheEvents, rest: Callable[[], None] | None) -> None:
        came: i64 = 0
        first: i64 = 0
        while first < len(changes.contents):
            if first > 0 and rest is not None:
                rest()
            part = changes.contents[int(first) : int(first + CONTENTS_A_GO)]
            used = slice(int(came), int(came) + int(np.count_nonzero(part > 0)))
            parents, words = vec[i64](changes.parents[used]), pack_rows(changes.token_ids[used])
            self._apply_contents(vec[i64](part), parents, words)
            came += len(parents)
            first += CONTENTS_A_GO

    def _apply_contents(self, names: vec[i64], parents: vec[i64], words: vec[i64]) -> None:
        rows = self.rows
        came: i64 = 0
        parent: i64 = 0
        row: i64 = 0
        for name in names:
            if name < 0:
                self._remove_content(-name)
                row = 0
                continue
            parent = row if row != 0 and rows.name[row] == parents[came] else rows.row_of(parents[came])
            row = rows.row_of(name)
            rows.kind[row] = CONTENT
            rows.set_tokens(row, words, came * rows.num_words)
            rows.link(row, parent)
            came += 1
            if rows.request[parent] != 0:
                self._publish_from(row, rows.request[parent])

    def _publish_from(self, top: i64, request: i32) -> None:
        """Publish a content that became reachable, and its existing descendants. O(newly reachable)."""
        rows = self.rows
        row = top
        while row != 0:
            rows.request[row] = request
            self._name(row)
            if rows.kind[row] == CONTENT:
                self._publish(row)
            row = rows.next_preorder(row, top)

    def _remove_content(self, name: i64) -> None:
        """Remove a content from all places; its descendants become unreachable."""
        rows = self.rows
        row = rows.find(name)
        if row == 0 or rows.kind[row] != CONTENT:
            return
        if rows.request[row] != 0:
            if rows.first_child[row] != 0:
                self._unpublish_descendants(row)
            self._unpublish(row)
        self._forget(row)

    def _unpublish_descendants(self, top: i64) -> None:
        """Unpublish the descendants of a root or content. O(descendants)."""
        rows = self.rows
        row = rows.deepest(top)
        while row != top:
            if rows.kind[row] == CONTENT:
                self._unpublish(row)
            rows.request[row] = 0
            row = rows.next_postorder(row)

    def _unpublish(self, row: i64) -> None:
        name = self.rows.published_name[row]
        if not self._is_mapped:
            self._out.add_removed(name, GPU_PLACE)
        place = i64(self.rows.first_place[row])
        while place != 0:
            if self.places.is_held(place):
                self._out.add_removed(name, i64(self.places.place[place]))
            place = i64(self.places.next_one[place])

    def _apply_pools(self, pools: tuple[BlockChanges, ...]) -> None:
        """Apply the changes of pools: additions first, parents before children, then removals.

        So a block that moves between pools is never missing in between. A holding that was removed and added again is
        unchanged.
        """
        stayed: set[tuple[int, int]] = set()
        for number, changes in enumerate(pools):
            self._add_blocks(number, changes, stayed)
        for number, changes in enumerate(pools):
            for name in vec[i64](changes.ids):
                if name < 0 and not (stayed and (number, -int(name)) in stayed):
                    self._remove_block(number + 1, -name)

    def _add_blocks(self, medium: i64, changes: BlockChanges, stayed: set[tuple[int, int]]) -> None:
        rows, places = self.rows, self.places
        came = vec[i64](changes.ids[changes.ids > 0])
        contents, groups = vec[i64](changes.contents), vec[i64](changes.groups)
        pool = medium + 1
        for index in vec[i64](np.argsort(changes.contents, kind="stable")):
            if places.row_of(pool, came[index]) != 0:
                stayed.add((int(medium), int(came[index])))
                continue
            row = rows.row_of(contents[index])
            place = MEDIA * groups[index] + medium
            if places.hold(pool, came[index], row, place) and rows.request[row] != 0:
                self._publish_block(row, place, MEDIA, self._out)

    def _remove_block(self, pool: i64, holding: i64) -> None:
        places = self.places
        place = places.row_of(pool, holding)
        if place == 0:
            return
        content = i64(places.content[place])
        if places.release(pool, holding) and self.rows.request[content] != 0:
            self._out.add_removed(self.rows.published_name[content], i64(places.place[place]))
        places.drop_if_empty(place)

    # Publishing.

    def _publish(self, row: i64) -> None:
        if not self._is_mapped:
            self._publish_content(row, self._out)
        place = i64(self.rows.first_place[row])
        while place != 0:
            if self.places.is_held(place):
                self._publish_block(row, i64(self.places.place[place]), MEDIA, self._out)
            place = i64(self.places.next_one[place])

    def _publish_content(self, row: i64, out: EventWriter) -> None:
        """Publish a content of a cache with a single pool. Its ancestors are published already."""
        rows = self.rows
        parent = i64(rows.parent[row])
        if rows.kind[parent] != CONTENT or not out.extend_chain(
            rows.published_name[row], rows.published_name[parent], GPU_PLACE
        ):
            request = self.roots[int(rows.request[row])].request
            before = rows.published_name[rows.content_before(row)]
            out.add_stored(rows.published_name[row], before, GPU_PLACE, request, self._spans_at(row))
        out.add_tokens(rows.words, row * rows.num_words)

    def _publish_block(self, row: i64, place: i64, media: i64, out: EventWriter) -> None:
        """Publish a content in a place that did not hold it before.

        A consumer locates a block by its parent. If the place does not hold the parent, the missing ancestors are
        published too, and published as removed right after. The parent of a state may also be a block of a layer group.
        """
        group = place >> 1
        absent: list[int] = []
        before = self._block_before(row, group)
        while before > 0 and not self._is_known(before, group, media):
            absent.append(int(before))
            before = self._block_before(before, group)
        if before == BROKEN:
            return
        for one in reversed(absent):
            self._store_block(one, place, out)
        self._store_block(row, place, out)
        for one in absent:
            out.add_removed(self.rows.published_name[one], place)

    def _is_known(self, row: i64, group: i64, media: i64) -> bool:
        """Return whether consumers can locate the children of a content in a group."""
        if self._is_held(row, group, media):
            return True
        if group == self._state_group:
            for number in range(group):
                if self._lengths[number] == 1 and self._is_held(row, number, media):
                    return True
        return False

    def _is_held(self, row: i64, group: i64, media: i64) -> bool:
        """Return whether a layer group holds a content on one of the first `media` media."""
        for medium in range(media):
            if self.places.find_held(row, MEDIA * group + medium) != 0:
                return True
        return False

    def _block_before(self, row: i64, group: i64) -> i64:
        """Return the last content of the block before the one that ends with this content; 0 at the beginning."""
        for _ in range(self._lengths[group] - 1):
            row = self.rows.content_before(row)
            if row == 0:
                return BROKEN
        return self.rows.content_before(row)

    def _store_block(self, row: i64, place: i64, out: EventWriter) -> None:
        """Write the event that a group's block, which ends with this content, is stored."""
        rows = self.rows
        group = place >> 1
        parts = [int(row)]
        for _ in range(self._lengths[group] - 1):
            parts.append(int(rows.content_before(parts[-1])))
        parts.reverse()
        spans = tuple([span for part in parts for span in self._spans_at(part)])
        request = self.roots[int(rows.request[row])].request
        before = rows.published_name[rows.content_before(parts[0])]
        out.add_stored(rows.published_name[row], before, place, request, spans)
        for part in parts:
            out.add_tokens(rows.words, part * rows.num_words)

    def _spans_at(self, row: i64) -> tuple[PlainKey, ...]:
        root = self.roots.get(int(self.rows.parent[row]))
        return root.spans if root is not None else ()

    # Snapshots.

    def snapshot(self) -> Iterator[list[Event]]:
        """Yield the events of a snapshot, a few at a time: a clear, then all contents that prompts can hit.

        O(contents). Parents come before children, and chains are kept together if possible.
        """
        out = EventWriter(self.config)
        out.clear()
        for medium in range(MEDIA if self._is_mapped else 1):
            for group in range(len(self._lengths)):
                place = MEDIA * group + medium
                for root in self._request_roots():
                    row = self.rows.next_preorder(root, root)
                    while row != END:
                        row = self._publish_some(row, root, place, out)
                        yield out.take()
        yield out.finish()

    def num_snapshot_bytes(self) -> int:
        """Return the approximate size of a snapshot in one message, without extra keys. O(1)."""
        held = self.places.num_holdings if self._is_mapped else int(self.rows.num_rows)
        return 4096 + held * (12 + 5 * max(self.config.hash_block_size * length for length in self._lengths))

    def _request_roots(self) -> list[int]:
        return [row for row in self.roots if self.rows.request[row] == row]

    def _publish_some(self, row: i64, root: i64, place: i64, out: EventWriter) -> i64:
        """Publish descendants of a root that a place holds, until an event is complete. Return the next row.

        Also return after `ROWS_A_GO` rows if no event is complete by then.
        """
        rows = self.rows
        left = ROWS_A_GO
        while row != END and left > 0 and not out.has_events:
            left -= 1
            if rows.kind[row] == CONTENT:
                if not self._is_mapped:
                    self._publish_content(row, out)
                elif self.places.find_held(row, place) != 0:
                    self._publish_block(row, place, 1 + (place & 1), out)
            row = rows.next_preorder(row, root)
        return row

    def num_bytes(self) -> int:
        """Return the bytes of the arrays of contents."""
        return self.rows.num_bytes()
