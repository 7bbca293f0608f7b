"""All that a cache has told of: what a snapshot is made from, off the engine's thread, and what turns into events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...config import CacheConfig
from ...kv_events import BlockChanges, KVCacheEvents
from ..tagged_keys import PlainKey
from ..wire import CPU, GPU, Event
from .writer import Described, EventWriter

_MEDIA = (GPU, CPU)


class Root(NamedTuple):
    """What stands before a first block (the keys of a request), or after a content where spans reach into a block."""

    request: tuple[PlainKey, ...]
    spans: tuple[PlainKey, ...] = ()
    after: int = 0


class Content(NamedTuple):
    """A token block: the content or root before it, and its tokens as int32 bytes."""

    parent: int
    tokens: bytes


class Place(NamedTuple):
    """Where a content is held: for which layer group, on which medium."""

    content: int
    group: int
    medium: str


#: How many blocks hold a content in a place, above 0.
Shown = dict[Place, int]


@dataclass(slots=True)
class ContentTable:
    """Contents by id, their tokens, what is before them, and where they are held.

    What no prompt reaches, because something before it is gone, is not told of: when a content goes, all that follow it
    are told to be gone too. So no two contents look alike from outside. A content comes back under its id when an equal
    block was still to be computed; then those that follow it are told of again. Memory: about 400 bytes and the tokens
    each.
    """

    config: CacheConfig
    roots: dict[int, Root] = field(default_factory=dict)
    contents: dict[int, Content] = field(default_factory=dict)
    #: Of the contents those that prompts reach, with the extra keys of their requests.
    reached: dict[int, tuple[PlainKey, ...]] = field(default_factory=dict)
    #: Root or content → what comes right behind it.
    following: dict[int, set[int]] = field(default_factory=dict)
    #: For each pool below token blocks, the id of a holding → where it is.
    pools: tuple[dict[int, Place], ...] = ()
    #: Content id → (pool, holding id) of its holdings, whether prompts reach it or not.
    holdings: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    #: With pools, what consumers know to be held.
    shown: Shown = field(default_factory=dict)
    #: False when an application of changes broke off: then only a reset of the cache makes it right again.
    is_whole: bool = True
    # Read from the config once: it makes them anew each time.
    _is_mapped: bool = field(init=False)
    _block_size: int = field(init=False)
    #: For each layer group, token blocks of one of its blocks.
    _lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._is_mapped = self.config.is_mapped
        self._block_size = self.config.hash_block_size
        self._lengths = tuple(group.block_size // self._block_size for group in self.config.layer_groups)

    def apply(self, changes: KVCacheEvents) -> list[Event]:
        """Take in what a cache told, and say it on the wire. O(changes)."""
        out = EventWriter(self.config)
        was_whole, self.is_whole = self.is_whole or changes.cleared, False
        if changes.cleared:
            self._clear()
            out.clear()
        for root, keys in changes.new_roots:
            self._add_root(root, keys)
        for root in changes.lost_roots:
            self._lose_root(root, out)
        self._apply_contents(changes, out)
        self._apply_pools(changes.pools, out)
        self.is_whole = was_whole
        return out.finish()

    def snapshot(self) -> list[Event]:
        """All that prompts can hit, after a sign that nothing else is cached. O(contents log contents)."""
        out = EventWriter(self.config)
        out.clear()
        shown: Shown = {}
        if not self._is_mapped:
            for content in self._depth_first(set(self.reached)):
                self._tell(content, out)
            return out.finish()
        for medium in _MEDIA:
            for group in range(len(self._lengths)):
                held = {place.content for place in self.shown if place[1:] == (group, medium)}
                for content in self._depth_first(held):
                    self._show(Place(content, group, medium), shown, out)
        return out.finish()

    def _depth_first(self, contents: set[int]) -> Iterator[int]:
        """Each content after the one before it, and chains in one run where that can be. O(contents log contents)."""
        following: dict[int, list[int]] = {}
        starts = []
        for content in sorted(contents):
            before = self.before(content)
            if before in contents:
                following.setdefault(before, []).append(content)
            else:
                starts.append(content)
        waiting = starts[::-1]
        while waiting:
            content = waiting.pop()
            yield content
            waiting.extend(reversed(following.get(content, ())))

    # Changes.

    def _clear(self) -> None:
        for known in (self.roots, self.contents, self.reached, self.following, self.holdings, self.shown, *self.pools):
            known.clear()  # type: ignore[attr-defined]

    def _add_root(self, root: int, keys: tuple[Any, ...]) -> None:
        if keys and isinstance(keys[0], int):
            self.roots[root] = Root((), keys[1], keys[0])
            self.following.setdefault(keys[0], set()).add(root)
        else:
            self.roots[root] = Root(keys)

    def _lose_root(self, root: int, out: EventWriter) -> None:
        """No prompt gets past it."""
        self._hide_behind(root, out)
        known = self.roots.pop(root, None)
        if known is not None and known.after:
            self._unlink(known.after, root)

    def _apply_contents(self, changes: KVCacheEvents, out: EventWriter) -> None:
        size = 4 * self._block_size
        rows = np.ascontiguousarray(changes.token_ids).tobytes()
        came = zip(changes.parents.tolist(), range(0, len(rows), size), strict=True)
        for name in changes.contents.tolist():
            if name < 0:
                self._drop(-name, out)
                continue
            parent, start = next(came)
            self.contents[name] = Content(parent, rows[start : start + size])
            self.following.setdefault(parent, set()).add(name)
            request = self._request_behind(parent)
            if request is not None:
                self._reach(name, request, out)

    def _request_behind(self, name: int) -> tuple[PlainKey, ...] | None:
        """The extra keys of the requests that get past a content or a root; None where none does."""
        root = self.roots.get(name)
        while root is not None and root.after:
            name = root.after
            root = self.roots.get(name)
        return root.request if root is not None else self.reached.get(name)

    def _reach(self, name: int, request: tuple[PlainKey, ...], out: EventWriter) -> None:
        """Prompts get to a content, and so to those that follow it and came before it. O(what is reached)."""
        waiting = [name]
        while waiting:
            one = waiting.pop()
            if one in self.contents:
                self.reached[one] = request
                self._tell_or_show(one, out)
            if one in self.following:
                waiting.extend(sorted(self.following[one], reverse=True))

    def _drop(self, name: int, out: EventWriter) -> None:
        """A content is gone, wherever it was held, and what follows it is out of reach."""
        if name not in self.contents:
            return
        if name in self.reached:
            self._hide_behind(name, out)
            self._hide_content(name, out)
        self._unlink(self.contents.pop(name).parent, name)

    def _unlink(self, before: int, name: int) -> None:
        beside = self.following[before]
        beside.discard(name)
        if not beside:
            del self.following[before]

    def _hide_behind(self, name: int, out: EventWriter) -> None:
        """No prompt gets to what follows a root or a content. O(what goes)."""
        waiting = [name]
        found: list[int] = []
        while waiting:
            behind = sorted(self.following.get(waiting.pop(), ()))
            found += behind
            waiting += behind
        for one in reversed(found):
            if one in self.reached:
                self._hide_content(one, out)

    def _hide_content(self, name: int, out: EventWriter) -> None:
        if not self._is_mapped:
            out.removed(name, 0, GPU)
        for pool, held in self.holdings.get(name, ()):
            self._hide(self.pools[pool][held], out)
        del self.reached[name]

    def _apply_pools(self, pools: tuple[BlockChanges, ...], out: EventWriter) -> None:
        """What came first, parents before what follows them; then what went: a block that moves is never nowhere."""
        self.pools = self.pools or tuple({} for _ in pools)
        came: list[tuple[Place, int, int]] = []
        went: list[tuple[int, int]] = []
        for number, changes in enumerate(pools):
            places = zip(changes.contents.tolist(), changes.groups.tolist(), strict=True)
            for name in changes.ids.tolist():
                if name < 0:
                    went.append((number, -name))
                else:
                    came.append((Place(*next(places), _MEDIA[number]), number, name))
        back = {(number, name) for _, number, name in came}.intersection(went)
        for place, number, name in sorted(came):
            if (number, name) not in back:
                self.pools[number][name] = place
                self.holdings.setdefault(place.content, []).append((number, name))
                if place.content in self.reached:
                    self._show(place, self.shown, out)
        for number, name in went:
            if (number, name) not in back:
                self._release(number, name, out)

    def _release(self, number: int, name: int, out: EventWriter) -> None:
        place = self.pools[number].pop(name, None)
        if place is None:
            return
        held = self.holdings[place.content]
        held.remove((number, name))
        if not held:
            del self.holdings[place.content]
        if place.content in self.reached:
            self._hide(place, out)

    # What consumers see.

    def _tell_or_show(self, name: int, out: EventWriter) -> None:
        if not self._is_mapped:
            self._tell(name, out)
        for place in sorted(self.pools[pool][held] for pool, held in self.holdings.get(name, ())):
            self._show(place, self.shown, out)

    def _tell(self, name: int, out: EventWriter) -> None:
        """Say that a content is held, in a cache without pools below: those before it are told of already."""
        parent, tokens = self.contents[name]
        request = self.reached[name]
        if parent in self.contents:
            out.stored(Described(name, parent, tokens, request, ()), 0, GPU)
        else:
            out.stored(Described(name, self.before(name), tokens, request, self.roots[parent].spans), 0, GPU)

    def _show(self, place: Place, shown: Shown, out: EventWriter) -> None:
        """Say that a content is held, if nothing was said yet.

        A consumer knows where a block belongs by the one before it. Where that is not held, it is told of with all
        others up to one that is, and all of these are told to be gone right after.
        """
        shown[place] = shown.get(place, 0) + 1
        if shown[place] > 1:
            return
        block = self._described(place.content, place.group)
        if block is None:
            return
        absent: list[Described] = []
        before: Described | None = block
        while before is not None and before.before and not self._is_shown(before.before, place.group, shown):
            before = self._described(before.before, place.group)
            if before is not None:
                absent.append(before)
        for one in reversed(absent):
            out.stored(one, place.group, place.medium)
        out.stored(block, place.group, place.medium)
        for one in absent:
            out.removed(one.name, place.group, place.medium)

    def _is_shown(self, name: int, group: int, shown: Shown) -> bool:
        return any(Place(name, group, medium) in shown for medium in _MEDIA)

    def _hide(self, place: Place, out: EventWriter) -> None:
        """Say that a content is held no more, once the last block that holds it is gone."""
        self.shown[place] -= 1
        if self.shown[place] == 0:
            del self.shown[place]
            out.removed(place.content, place.group, place.medium)

    # What a block looks like from outside.

    def before(self, name: int) -> int:
        """The content before one; 0 at the beginning of a prompt."""
        parent = self.contents[name].parent
        while parent in self.roots:
            parent = self.roots[parent].after
        return parent

    def _described(self, name: int, group: int) -> Described | None:
        """A group's block that ends with this content; None where a part of it is gone."""
        chain = [name]
        while len(chain) < self._lengths[group]:
            before = self.before(chain[-1])
            if before not in self.contents:
                return None
            chain.append(before)
        chain.reverse()
        spans = tuple(span for one in chain for span in self._spans_at(one))
        tokens = b"".join([self.contents[one].tokens for one in chain])
        return Described(name, self.before(chain[0]), tokens, self.reached[name], spans)

    def _spans_at(self, name: int) -> tuple[PlainKey, ...]:
        root = self.roots.get(self.contents[name].parent)
        return root.spans if root is not None else ()
