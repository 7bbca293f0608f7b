"""A snapshot holds what a pool caches: blocks in a tier, and which prompts they are in a file, for a warm start.

The blocks go to a tier as objects like all others. The file is one message of `blockyard.wire`: the contents, each
behind the one before it, with its tokens and how soon the pool would evict it, and the keys of the roots. It is written
beside its path and renamed, so it is whole or absent; names are not in it, since the tokens give them.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockyard import KVCacheManager
from blockyard.answers import BlockState
from blockyard.arguments import reason, require_path, shown
from blockyard.errors import InvalidArgument, PeerMismatch
from blockyard.keys import CacheSalt, ExtraKey, LoRA, canonical_keys
from blockyard.wire import Message, pack

from .pool_names import PoolNames, require_plain

_KIND = "snapshot"
VERSION = 1
#: Bytes of a file that is read: some 60 million blocks of 16 tokens.
_MAX_BYTES = 2**32
#: Contents that are looked at in one go, so that no step waits.
_A_GO = 512
_Ints = npt.NDArray[np.int32]


class Snapshot:
    """A snapshot is taken a little in each `Offload.poll`; what is evicted before its turn is not in it.

    is_done: whether it has ended. error: why there is no file, then; "" where there is. num_blocks: that it has.
    """

    def __init__(self, path: str | os.PathLike[str], cache: KVCacheManager, layout: bytes) -> None:
        require_plain("a snapshot", cache)
        self.path = require_path("path", path)
        if not self.path.name:
            raise InvalidArgument(f"path is {shown(str(path))}; a file's name is needed")
        self.is_done, self.error, self.num_blocks = False, "", 0
        #: Jobs of the tier that store its objects.
        self.jobs: set[int] = set()
        self._cache, self._layout, self._generation = cache, layout, cache.generation
        self._names = PoolNames(cache, layout)
        states = cache.pool.states()
        blocks = np.flatnonzero((states == BlockState.SHARED) | (states == BlockState.IDLE)).astype(np.int32)
        identities = cache.contents.identities(0, cache.contents.num_blocks)[blocks]
        _, first = np.unique(identities[:, 0], return_index=True)  # those before others come first
        self._blocks, self._identities = blocks[first], identities[first]
        order = cache.pool.free_block_ids()
        ranks = np.full(max(len(states), cache.contents.num_blocks), len(order), np.int32)
        ranks[order] = np.arange(len(order))
        self._ranks = ranks[self._blocks]
        self._tokens = np.zeros((len(first), cache.block_size), np.int32)
        self._is_kept = np.zeros(len(first), bool)
        self._at = 0
        self._writer: threading.Thread | None = None

    def take(self, most: int) -> tuple[int, list[tuple[int, bytes, bytes]]]:
        """Returns a place to go back to, and what is stored next: blocks, names, digests, `most` of them."""
        begun = self._at
        blocks, identities = self._blocks[begun : begun + _A_GO], self._identities[begun : begun + _A_GO]
        is_there = blocks < self._cache.contents.num_blocks
        is_there[is_there] = self._cache.contents.still(blocks[is_there], identities[is_there, 0])
        places = np.flatnonzero(is_there)[:most]
        named = self._names.learn(blocks[places], identities[places])
        self._tokens[begun + places] = self._cache.contents.tokens(blocks[places])
        self._is_kept[begun + places] = [each is not None for each in named]
        self._at = begun + (int(places[-1]) + 1 if len(places) == most else len(blocks))
        return begun, [
            (int(blocks[place]), *each) for place, each in zip(places, named, strict=True) if each is not None
        ]

    def go_back(self, place: int) -> None:
        """Take again what was taken since then: it was not stored."""
        self._at = min(self._at, place)

    @property
    def is_read(self) -> bool:
        """Says whether nothing is left to take."""
        return self._at >= len(self._blocks)

    def require_going(self) -> bool:
        """Says whether it goes on; ends it where the cache was reset."""
        if not self.is_done and self._cache.generation != self._generation:
            self.fail("the prefix cache was reset")
        if self._writer is not None and not self._writer.is_alive():
            self.is_done = True
        return not self.is_done and self._writer is None

    def fail(self, why: str) -> None:
        """End it without a file."""
        self.is_done, self.error = True, why

    def finish(self) -> None:
        """All is stored: have the file written in the background."""
        data = self._packed()
        self._writer = threading.Thread(target=self._write, args=(data,), name="snapshot", daemon=True)
        self._writer.start()

    def _packed(self) -> bytes:
        """Returns the file's bytes: the contents that are kept with all before them."""
        keys = self._cache.contents.keys(2**31)
        roots: dict[int, int] = {}
        places: dict[int, int] = {}
        chosen: list[int] = []
        before: list[int] = []
        for place in np.flatnonzero(self._is_kept).tolist():
            content, previous = self._identities[place].tolist()
            if previous in places:
                before.append(places[previous])
            elif previous in keys:
                before.append(-1 - roots.setdefault(previous, len(roots)))
            else:
                continue
            places[content] = len(chosen)
            chosen.append(place)
        self.num_blocks = len(chosen)
        fields = {
            "version": VERSION,
            "layout": self._layout.hex(),
            "block_size": self._cache.block_size,
            "keys": [keys[root] for root in roots],
        }
        arrays = [np.array(before, np.int32), self._ranks[chosen], self._tokens[chosen].reshape(-1)]
        return pack(_KIND, fields, arrays)

    def _write(self, data: bytes) -> None:
        beside = self.path.with_name(f".{self.path.name}.{os.urandom(8).hex()}")
        remove_leftovers(self.path)
        try:
            with open(beside, "xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(beside, self.path)
        except Exception as error:  # whatever it is, no caller may think that there is a file
            self.error = f"{self.path} cannot be written: {getattr(error, 'strerror', None) or reason(error)}"
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove the files that killed processes left beside a snapshot: they have no lock. It never raises."""
    with suppress(OSError, ValueError):
        for beside in path.parent.iterdir():
            if not _is_beside(beside.name, path.name):
                continue
            with suppress(OSError):
                file = os.open(beside, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    beside.unlink()
                finally:
                    os.close(file)


def _is_beside(name: str, snapshot: str) -> bool:
    start = f".{snapshot}."
    return name.startswith(start) and re.fullmatch("[0-9a-f]{16}", name[len(start) :]) is not None


@dataclass(frozen=True, slots=True)
class Contents:
    """A snapshot's file has of each content the place of the one before it (below 0: -1 - its root), how late the pool
    would have evicted it, and its tokens, (n, block size); keys: of the roots."""

    before: _Ints
    ranks: _Ints
    tokens: _Ints
    keys: list[tuple[ExtraKey, ...]]

    @classmethod
    def of(cls, path: str | os.PathLike[str], layout: bytes, block_size: int) -> Contents:
        """Read a file. O(bytes). Raises `InvalidArgument` with the reason for one that this engine has no use for."""

        def refuse(why: object) -> InvalidArgument:
            return InvalidArgument(f"path is {shown(str(path))}; {why}")

        file = require_path("path", path)
        remove_leftovers(file)
        try:
            data = _read(file)
        except (OSError, ValueError) as error:
            raise refuse(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
        except MemoryError:
            raise refuse("it cannot be read: memory does not hold it") from None
        try:
            message = Message.of(data).require(_KIND)
        except (InvalidArgument, PeerMismatch) as error:
            raise refuse(f"it is no snapshot of this version: {error}") from None
        fields: dict[str, Any] = message.fields
        for name, wanted in (("version", VERSION), ("block_size", block_size), ("layout", layout.hex())):
            if type(fields.get(name)) is not type(wanted) or fields[name] != wanted:
                raise refuse(f"its {name} is {shown(fields.get(name))}, here it is {shown(wanted)}")
        try:
            keys = [tuple(_key_of(each) for each in some) for some in fields["keys"]]
            for some in keys:
                canonical_keys(some)
            before, ranks, tokens = message.arrays
            made = cls(before, ranks, tokens.reshape(len(before), block_size), keys)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise refuse(f"it is no snapshot: {error}") from None
        low, high = -len(keys), np.arange(len(before))
        if len(ranks) != len(before) or not ((before >= low) & (before < high)).all() or (tokens < 0).any():
            raise refuse("it is no snapshot: a content stands behind none")
        return made

    def prompts(self, most_blocks: int, most_tokens: int) -> Iterator[tuple[list[int], tuple[ExtraKey, ...]]]:
        """Goes over the prompts that fit into `most_blocks` and are the last to be evicted, those last. O(tokens)."""
        ends = np.setdiff1d(np.arange(len(self.before)), self.before)
        for end in reversed(self._chosen(ends, most_blocks, most_tokens // self.tokens.shape[1])):
            path, place = [], end
            while place >= 0:
                path.append(place)
                place = int(self.before[place])
            yield self.tokens[path[::-1]].reshape(-1).tolist(), self.keys[-1 - place]

    def _chosen(self, ends: npt.NDArray[np.int64], most_blocks: int, most_length: int) -> list[int]:
        """Returns where the prompts end that are loaded, the last to be evicted first. O(contents)."""
        if most_length <= 0:
            return []
        before = self.before.tolist()
        lengths: list[int] = []
        cuts: list[int] = []  # the content at which a prompt that goes on to here is long enough
        for place, previous in enumerate(before):
            lengths.append(1 if previous < 0 else lengths[previous] + 1)
            cuts.append(place if lengths[place] <= most_length else cuts[previous])
        is_seen = [False] * len(before)
        chosen: dict[int, None] = {}
        for end in ends[np.argsort(-self.ranks[ends], kind="stable")].tolist():
            place = cuts[end]
            while place >= 0 and not is_seen[place]:
                is_seen[place] = True
                most_blocks -= 1
                place = before[place]
            if most_blocks < 0:
                break
            chosen[cuts[end]] = None
        return list(chosen)


def _read(path: Path) -> bytes:
    """Return a file's bytes. Raises `ValueError` for what is no regular file, or larger than a snapshot is."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes; a snapshot has at most {_MAX_BYTES}")
        return file.read()


def _key_of(plain: Any) -> ExtraKey:
    kind, *values = plain
    return CacheSalt(*values) if {"salt": True, "lora": False}[kind] else LoRA(*values)
