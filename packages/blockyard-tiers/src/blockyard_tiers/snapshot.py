"""Snapshots of a pool for a warm start: the cached blocks in a tier, and the prompts they belong to in a file.

The blocks are stored as ordinary objects. The file is one message of `blockyard.wire`. It lists the cached contents,
each after its predecessor, with its tokens and its rank in the eviction order, and the keys of the roots. Names are not
stored, since the tokens determine them. The file is written beside its path and renamed, so it is complete or absent.
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
from typing import Any, NamedTuple

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
#: Largest file that is read: some 60 million blocks of 16 tokens.
_MAX_BYTES = 2**32
#: Contents handled in one call, so that no step waits.
_CONTENTS_PER_CALL = 512
_Ints = npt.NDArray[np.int32]


class NamedBlock(NamedTuple):
    """A block to store: its id or position, its object's name, and the digest of its tokens."""

    block: int
    name: bytes
    digest: bytes


class Snapshot:
    """A snapshot that is being taken, a part in each `Offload.poll`. Blocks evicted before their turn are left out.

    Attributes:
        is_done: whether it has ended.
        error: reason why no file was written; "" if the snapshot succeeded or has not ended.
        num_blocks: blocks in the file.
    """

    def __init__(self, path: str | os.PathLike[str], cache: KVCacheManager, layout: bytes) -> None:
        require_plain("a snapshot", cache)
        self.path = require_path("path", path)
        if not self.path.name:
            raise InvalidArgument(f"path is {shown(str(path))}; it must name a file")
        self.is_done, self.error, self.num_blocks = False, "", 0
        #: Transfers that store its objects.
        self.transfer_ids: set[int] = set()
        self._cache, self._layout, self._generation = cache, layout, cache.generation
        self._names = PoolNames(cache, layout)
        states = cache.pool.states()
        blocks = np.flatnonzero((states == BlockState.SHARED) | (states == BlockState.IDLE)).astype(np.int32)
        identities = cache.contents.identities(0, cache.contents.num_blocks)[blocks]
        _, first = np.unique(identities[:, 0], return_index=True)  # predecessors come first
        self._blocks, self._identities = blocks[first], identities[first]
        order = cache.pool.free_block_ids()
        ranks = np.full(max(len(states), cache.contents.num_blocks), len(order), np.int32)
        ranks[order] = np.arange(len(order))
        self._ranks = ranks[self._blocks]
        self._tokens = np.zeros((len(first), cache.block_size), np.int32)
        self._is_stored = np.zeros(len(first), bool)
        self._at = 0
        self._writer: threading.Thread | None = None

    @property
    def position(self) -> int:
        """Position of the next block to store, for `go_back`."""
        return self._at

    def take(self, most: int) -> list[NamedBlock]:
        """Return the next `most` blocks to store."""
        begun = self._at
        part = slice(begun, begun + _CONTENTS_PER_CALL)
        blocks, identities = self._blocks[part], self._identities[part]
        is_there = blocks < self._cache.contents.num_blocks
        is_there[is_there] = self._cache.contents.still_cached(blocks[is_there], identities[is_there, 0])
        positions = np.flatnonzero(is_there)[:most]
        named = self._names.name_blocks(blocks[positions], identities[positions])
        self._tokens[begun + positions] = self._cache.contents.tokens(blocks[positions])
        self._is_stored[begun + positions] = [each is not None for each in named]
        self._at = begun + (int(positions[-1]) + 1 if len(positions) == most else len(blocks))
        return [
            NamedBlock(int(blocks[at]), *each) for at, each in zip(positions, named, strict=True) if each is not None
        ]

    def go_back(self, position: int) -> None:
        """Return to `position`: the blocks after it were not stored, and are stored again."""
        self._at = min(self._at, position)

    @property
    def is_read(self) -> bool:
        """True if no block is left to store."""
        return self._at >= len(self._blocks)

    def needs_stores(self) -> bool:
        """Return whether blocks are left to store. Fail the snapshot if the cache was reset."""
        if not self.is_done and self._cache.generation != self._generation:
            self.fail("the prefix cache was reset")
        if self._writer is not None and not self._writer.is_alive():
            self.is_done = True
        return not self.is_done and self._writer is None

    def fail(self, why: str) -> None:
        """End the snapshot without a file."""
        self.is_done, self.error = True, why

    def finish(self) -> None:
        """Write the file in the background; all blocks are stored."""
        data = self._packed()
        self._writer = threading.Thread(target=self._write, args=(data,), name="snapshot", daemon=True)
        self._writer.start()

    def _packed(self) -> bytes:
        """Return the file's bytes. Only contents whose whole prefix was stored are in it."""
        keys = self._cache.contents.keys(2**31)
        roots: dict[int, int] = {}
        positions: dict[int, int] = {}
        chosen: list[int] = []
        before: list[int] = []
        for at in np.flatnonzero(self._is_stored).tolist():
            content, previous = self._identities[at].tolist()
            if previous in positions:
                before.append(positions[previous])
            elif previous in keys:
                before.append(-1 - roots.setdefault(previous, len(roots)))
            else:
                continue
            positions[content] = len(chosen)
            chosen.append(at)
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
        except Exception as error:  # on any error there is no file
            self.error = f"{self.path} cannot be written: {getattr(error, 'strerror', None) or reason(error)}"
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove the unlocked files that killed processes left beside a snapshot. Never raises."""
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
    """The contents of a snapshot's file.

    Attributes:
        before: for each content, the position of the content before it, or -1 - the number of its root.
        ranks: for each content, its rank in the eviction order; higher is later.
        tokens: their tokens, (n, block size).
        keys: extra keys of each root.
    """

    before: _Ints
    ranks: _Ints
    tokens: _Ints
    keys: list[tuple[ExtraKey, ...]]

    @classmethod
    def of(cls, path: str | os.PathLike[str], layout: bytes, block_size: int) -> Contents:
        """Read a file. O(bytes). Raises `InvalidArgument`, with the reason, if this engine cannot use it."""

        def refuse(why: object) -> InvalidArgument:
            return InvalidArgument(f"path is {shown(str(path))}; {why}")

        file = require_path("path", path)
        remove_leftovers(file)
        try:
            data = _read(file)
        except (OSError, ValueError) as error:
            raise refuse(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
        except MemoryError:
            raise refuse("it cannot be read: not enough memory") from None
        try:
            message = Message.of(data).require(_KIND)
        except (InvalidArgument, PeerMismatch) as error:
            raise refuse(f"it is not a snapshot of this version: {error}") from None
        fields: dict[str, Any] = message.fields
        for name, wanted in (("version", VERSION), ("block_size", block_size), ("layout", layout.hex())):
            if type(fields.get(name)) is not type(wanted) or fields[name] != wanted:
                raise refuse(f"its {name} is {shown(fields.get(name))}, this engine's is {shown(wanted)}")
        try:
            keys = [tuple(_key_of(each) for each in some) for some in fields["keys"]]
            for some in keys:
                canonical_keys(some)
            before, ranks, tokens = message.arrays
            made = cls(before, ranks, tokens.reshape(len(before), block_size), keys)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise refuse(f"it is not a snapshot: {error}") from None
        low, high = -len(keys), np.arange(len(before))
        if len(ranks) != len(before) or not ((before >= low) & (before < high)).all() or (tokens < 0).any():
            raise refuse("it is not a snapshot: a content has no valid predecessor")
        return made

    def prompts(self, most_blocks: int, most_tokens: int) -> Iterator[tuple[list[int], tuple[ExtraKey, ...]]]:
        """Yield the prompts that fit into `most_blocks` and are evicted last, in the order of eviction. O(tokens)."""
        ends = np.setdiff1d(np.arange(len(self.before)), self.before)
        for end in reversed(self._chosen(ends, most_blocks, most_tokens // self.tokens.shape[1])):
            path, at = [], end
            while at >= 0:
                path.append(at)
                at = int(self.before[at])
            yield self.tokens[path[::-1]].reshape(-1).tolist(), self.keys[-1 - at]

    def _chosen(self, ends: npt.NDArray[np.int64], most_blocks: int, most_length: int) -> list[int]:
        """Return the last contents of the prompts to load, the last to be evicted first. O(contents)."""
        if most_length <= 0:
            return []
        before = self.before.tolist()
        lengths: list[int] = []
        cuts: list[int] = []  # the last content of each prompt, within the length limit
        for at, previous in enumerate(before):
            lengths.append(1 if previous < 0 else lengths[previous] + 1)
            cuts.append(at if lengths[at] <= most_length else cuts[previous])
        is_seen = [False] * len(before)
        chosen: dict[int, None] = {}
        for end in ends[np.argsort(-self.ranks[ends], kind="stable")].tolist():
            at = cuts[end]
            while at >= 0 and not is_seen[at]:
                is_seen[at] = True
                most_blocks -= 1
                at = before[at]
            if most_blocks < 0:
                break
            chosen[cuts[end]] = None
        return list(chosen)


def _read(path: Path) -> bytes:
    """Return a file's bytes. Raises `ValueError` if it is not a regular file or is too large."""
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
