"""Keeps all that a cache has told, off the engine's thread, and makes events and snapshots of it.

Words of this file and its neighbours:

    row         a content or root of the cache, or the id of one behind which something stands
    root        what stands before first blocks (a request's keys), or after a content where spans reach into a block
    place       a layer group and a medium (2 * group + medium); in a plain cache there is one, the GPU
    reachable   prompts get to a row: all rows before it are there; only what is reachable is published
    publish     write that a content, or a group's block that ends with it, is stored; `unpublish`: that it is removed
    add, remove what the cache says of contents, roots, and blocks of the pools
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
#: Contents taken in, and rows walked over, in one go: two tenths of a millisecond at most.
CONTENTS_A_GO: Final[i64] = 2048
ROWS_A_GO: Final[i64] = 4096

#: The end of a walk; and of a group's block of which a part is gone.
END: Final[i64] = 0
BROKEN: Final[i64] = -1


class Root:
    """What stands before a first block (the keys of a request), or after a content where spans reach into a block."""

    def __init__(self, request: tuple[PlainKey, ...], spans: tuple[PlainKey, ...]) -> None:
        self.request = request
        self.spans = spans


class ContentTable:
    """Contents by id, their tokens, what is before them, and where they are held.

    What no prompt reaches, because something before it is gone, is not published: when a content goes, all that follow
    it are published as gone too. So no two contents look alike from outside. A content comes back under its id when an
    equal block was still to be computed; then those that follow it are published again.
    by_content: whether consumers know a content by a hash of it (`ContentNames`), or by the cache's own id.
    Memory: about 118 bytes (110 with ids) for each of the cache's blocks of 16 tokens from the start, 128 MiB at most
    then.
    """

    def __init__(self, config: CacheConfig, by_content: bool = False) -> None:
        self.config = config
        #: False when an application of changes broke off: then only a reset of the cache makes it right again.
        self.is_whole = True
        self.rows = ContentRows(config.hash_block_size, config.num_blocks)
        num_groups = len(config.layer_groups)
        self.places = PlaceRows(self.rows, int(MEDIA) * num_groups, config.state_blocks)
        #: By row.
        self.roots: dict[int, Root] = {}
        self._is_mapped = config.is_mapped
        #: For each layer group, token blocks of one of its blocks; a state is published as the one before it.
        self._lengths = [group.block_size // config.hash_block_size for group in config.layer_groups]
        self._state_group: i64 = num_groups
        if config.state_blocks > 0:
            self._lengths.append(1)
        self._out = EventWriter(config)
        #: None where consumers know contents by the cache's ids.
        self._names: ContentNames | None = None
        self.name_by(by_content)

    def name_by(self, by_content: bool) -> None:
        """From now on consumers know contents by what they are, or by their ids. O(contents) if that is new."""
        if by_content == (self._names is not None):
            return
        self.rows.name_apart(by_content)
        self._names = ContentNames(self.rows) if by_content else None
        for root in self._request_roots():
            self._name(root)
            row = self.rows.next_behind(root, root)
            while row != END:
                self._name(row)
                row = self.rows.next_behind(row, root)

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
        """Take in what a cache told, and say it on the wire. O(changes).

        rest: called now and then on the way, where other threads may run; nothing else happens to the table meanwhile.
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
        """No prompt gets past it."""
        row = self.rows.find(root)
        if row == 0 or self.rows.kind[row] != ROOT:
            return
        self._unpublish_behind(row)
        del self.roots[int(row)]
        self._forget(row)

    def _forget(self, row: i64) -> None:
        """A content or root is there no more; its row stays while something stands behind it."""
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
        """Prompts get to a content, and so to those that follow it and came before it. O(what is reached)."""
        rows = self.rows
        row = top
        while row != 0:
            rows.request[row] = request
            self._name(row)
            if rows.kind[row] == CONTENT:
                self._publish(row)
            row = rows.next_behind(row, top)

    def _remove_content(self, name: i64) -> None:
        """A content is gone, wherever it was held, and what follows it is out of reach."""
        rows = self.rows
        row = rows.find(name)
        if row == 0 or rows.kind[row] != CONTENT:
            return
        if rows.request[row] != 0:
            if rows.first_child[row] != 0:
                self._unpublish_behind(row)
            self._unpublish(row)
        self._forget(row)

    def _unpublish_behind(self, top: i64) -> None:
        """No prompt gets to what follows a root or a content. O(what goes)."""
        rows = self.rows
        row = rows.deepest(top)
        while row != top:
            if rows.kind[row] == CONTENT:
                self._unpublish(row)
            rows.request[row] = 0
            row = rows.next_up(row)

    def _unpublish(self, row: i64) -> None:
        name = self.rows.published_name[row]
        if not self._is_mapped:
            self._out.removed(name, GPU_PLACE)
        place = i64(self.rows.first_place[row])
        while place != 0:
            if self.places.is_held(place):
                self._out.removed(name, i64(self.places.place[place]))
            place = i64(self.places.next_one[place])

    def _apply_pools(self, pools: tuple[BlockChanges, ...]) -> None:
        """What came first, parents before what follows them; then what went: a block that moves is never nowhere.

        A holding that went and came again is one that stayed.
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
            self._out.removed(self.rows.published_name[content], i64(places.place[place]))
        places.drop_if_empty(place)

    # What consumers see.

    def _publish(self, row: i64) -> None:
        if not self._is_mapped:
            self._publish_content(row, self._out)
        place = i64(self.rows.first_place[row])
        while place != 0:
            if self.places.is_held(place):
                self._publish_block(row, i64(self.places.place[place]), MEDIA, self._out)
            place = i64(self.places.next_one[place])

    def _publish_content(self, row: i64, out: EventWriter) -> None:
        """Say that a content is held, in a cache without pools below: those before it are published already."""
        rows = self.rows
        parent = i64(rows.parent[row])
        if rows.kind[parent] != CONTENT or not out.goes_on(
            rows.published_name[row], rows.published_name[parent], GPU_PLACE
        ):
            request = self.roots[int(rows.request[row])].request
            before = rows.published_name[rows.content_before(row)]
            out.stored(rows.published_name[row], before, GPU_PLACE, request, self._spans_at(row))
        out.tokens(rows.words, row * rows.num_words)

    def _publish_block(self, row: i64, place: i64, media: i64, out: EventWriter) -> None:
        """Say that a content is held in a place where it was not.

        A consumer knows where a block belongs by the one before it. Where that is not held, it is published
        with all others up to one that is, and all of these are published as gone right after. A state's may also be a
        block of a layer group.
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
            out.removed(self.rows.published_name[one], place)

    def _is_known(self, row: i64, group: i64, media: i64) -> bool:
        """Return whether consumers know where in a group the block behind a content belongs."""
        if self._is_held(row, group, media):
            return True
        if group == self._state_group:
            for number in range(group):
                if self._lengths[number] == 1 and self._is_held(row, number, media):
                    return True
        return False

    def _is_held(self, row: i64, group: i64, media: i64) -> bool:
        """Returns whether a layer group holds a content on one of the first `media` media."""
        for medium in range(media):
            if self.places.find_held(row, MEDIA * group + medium) != 0:
                return True
        return False

    def _block_before(self, row: i64, group: i64) -> i64:
        """Returns the last content of the block before a group's block that ends with this one; 0 at the beginning."""
        for _ in range(self._lengths[group] - 1):
            row = self.rows.content_before(row)
            if row == 0:
                return BROKEN
        return self.rows.content_before(row)

    def _store_block(self, row: i64, place: i64, out: EventWriter) -> None:
        """Writes that a group's block, which ends with this content, is stored."""
        rows = self.rows
        group = place >> 1
        parts = [int(row)]
        for _ in range(self._lengths[group] - 1):
            parts.append(int(rows.content_before(parts[-1])))
        parts.reverse()
        spans = tuple([span for part in parts for span in self._spans_at(part)])
        request = self.roots[int(rows.request[row])].request
        before = rows.published_name[rows.content_before(parts[0])]
        out.stored(rows.published_name[row], before, place, request, spans)
        for part in parts:
            out.tokens(rows.words, part * rows.num_words)

    def _spans_at(self, row: i64) -> tuple[PlainKey, ...]:
        root = self.roots.get(int(self.rows.parent[row]))
        return root.spans if root is not None else ()

    # All of it.

    def snapshot(self) -> Iterator[list[Event]]:
        """All that prompts can hit, after a sign that nothing else is cached, a few events at a time. O(contents).

        Contents come after those before them, and chains in one run where that can be.
        """
        out = EventWriter(self.config)
        out.clear()
        for medium in range(MEDIA if self._is_mapped else 1):
            for group in range(len(self._lengths)):
                place = MEDIA * group + medium
                for root in self._request_roots():
                    row = self.rows.next_behind(root, root)
                    while row != END:
                        row = self._publish_some(row, root, place, out)
                        yield out.take()
        yield out.finish()

    def num_snapshot_bytes(self) -> int:
        """About as many bytes as all of it takes in one message, without extra keys. O(1)."""
        held = self.places.num_holdings if self._is_mapped else int(self.rows.num_rows)
        return 4096 + held * (12 + 5 * max(self.config.hash_block_size * length for length in self._lengths))

    def _request_roots(self) -> list[int]:
        return [row for row in self.roots if self.rows.request[row] == row]

    def _publish_some(self, row: i64, root: i64, place: i64, out: EventWriter) -> i64:
        """Tell of contents behind a root that are held in a place, up to the end of an event; returns the next one.

        After many rows without the end of an event it comes back too.
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
            row = rows.next_behind(row, root)
        return row

    def num_bytes(self) -> int:
        """Returns the bytes of the arrays of contents."""
        return self.rows.num_bytes()
