"""A header stands before an object's bytes and says what they are; names are those by which objects are found.

An object is a page of 4,096 bytes and its payload. The page is a message of `blockyard.wire` (mark, version, digest,
fields) and zeros; the payload begins aligned. The fields: the object's name, the digest of its tokens, its layout's id,
the payload's length and its checksum (XXH3, 128 bits). The digest covers the fields, the checksum the payload, so every
bit of an object is covered but for the page's zeros, which must be zeros. There is no key: what may write to the
place can write any object.

Needs xxhash: `pip install 'blockyard[tiers]'`.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any

import numpy as np

from blockyard.arguments import require_int, shown
from blockyard.errors import InvalidArgument, MissingExtra, PeerMismatch
from blockyard.keys import canonical_keys, plain_keys, spans_by_block, spans_of
from blockyard.wire import Message, pack

from .tier import MAX_OBJECT_BYTES, NAME_BYTES, Cause, require_name

try:
    import xxhash
except ImportError as error:
    raise MissingExtra("blockyard_tiers needs xxhash: pip install 'blockyard[tiers]'") from error

#: The version of the page's fields; names differ with it, so that versions share a place.
VERSION = 2
PAGE_BYTES = 4096
_KIND = "object"
#: A page's message is shorter than this; zeros follow, which are compared faster than they are counted.
_TEXT_BYTES = 512
_NO_TEXT = bytes(PAGE_BYTES - _TEXT_BYTES)


class BadObject(Exception):
    """An object is none, or not the one that was asked for; `cause` says why."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Header:
    """A header is what an object says of itself. length: of the payload. checksum: of all its bytes."""

    name: bytes
    tokens: bytes
    layout: bytes
    length: int
    checksum: bytes

    def to_page(self) -> bytes:
        """Returns the page, 4,096 bytes."""
        fields = {name: getattr(self, name).hex() for name in ("name", "tokens", "layout", "checksum")}
        return pack(_KIND, {**fields, "length": self.length, "version": VERSION}).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def from_page(cls, page: bytes) -> Header:
        """Read a page. Raises `BadObject`: DAMAGED, TRUNCATED, or OTHER_VERSION."""
        if len(page) < PAGE_BYTES:
            raise BadObject(Cause.TRUNCATED)
        try:
            text = page[:_TEXT_BYTES] if page[_TEXT_BYTES:] == _NO_TEXT else page
            fields = Message.of(text.rstrip(b"\0")).require(_KIND).fields
            if fields["version"] != VERSION:
                raise BadObject(Cause.OTHER_VERSION)
            parts = [bytes.fromhex(fields[name]) for name in ("name", "tokens", "layout", "checksum")]
            header = cls(parts[0], parts[1], parts[2], int(fields["length"]), parts[3])
        except PeerMismatch:
            raise BadObject(Cause.OTHER_VERSION) from None
        except (InvalidArgument, KeyError, TypeError, ValueError, OverflowError):
            raise BadObject(Cause.DAMAGED) from None
        if not 0 < header.length <= MAX_OBJECT_BYTES:
            raise BadObject(Cause.DAMAGED)
        return header

    def require(self, name: bytes, tokens: bytes, layout: bytes, length: int) -> None:
        """Raise `BadObject` unless the object is the one that is wanted."""
        if self.name != name:
            raise BadObject(Cause.FOREIGN)
        if self.layout != layout:
            raise BadObject(Cause.OTHER_LAYOUT)
        if self.tokens != tokens:
            raise BadObject(Cause.OTHER_TOKENS)
        if self.length != length:
            raise BadObject(Cause.OTHER_LENGTH)

    def require_payload(self, parts: Sequence[memoryview]) -> None:
        """Raise `BadObject` unless these are the payload's bytes. O(bytes)."""
        if sum(len(part) for part in parts) != self.length:
            raise BadObject(Cause.TRUNCATED)
        if checksum_of(parts) != self.checksum:
            raise BadObject(Cause.DAMAGED)


def checksum_of(parts: Sequence[memoryview]) -> bytes:
    """Returns the checksum of bytes that lie in one piece or in several: XXH3, 128 bits. O(bytes)."""
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(part)
    return whole.digest()


def require_whole(data: memoryview, name: bytes | None = None) -> Header:
    """Verify a whole object, page and payload; returns its header. O(bytes). Raises `BadObject`."""
    return require_parts(bytes(data[:PAGE_BYTES]), [data[PAGE_BYTES:]], name)


def require_parts(page: bytes, payload: Sequence[memoryview], name: bytes | None = None) -> Header:
    """Do `require_whole` for an object whose page and payload lie apart."""
    header = Header.from_page(page)
    if name is not None and header.name != name:
        raise BadObject(Cause.FOREIGN)
    header.require_payload(payload)
    return header


def layout_id(**fields: Any) -> bytes:
    """Returns the 16 bytes that name a layout: BLAKE2b over its fields as JSON, in the order of their names. O(fields).

    fields: all that must be equal where one engine loads what another stored: a fingerprint of the weights and the
    config, dtype, block size, heads, rank, group. Plain values. Raises `InvalidArgument` for others, or none.

    >>> layout_id(model="sha256:41f0", dtype="bfloat16", block_size=16, heads=9, rank=0, group=0).hex()
    '02c4e7a9c228a1265714f3a888cbdd6e'
    """
    if not fields:
        raise InvalidArgument("layout_id was given no fields; a layout has at least one")
    try:
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"fields is {shown(fields)}; plain values are needed: {error}") from None
    return blake2b(text.encode(), digest_size=NAME_BYTES).digest()


def object_names(
    layout: bytes, token_ids: object, block_size: int, extra_keys: object = ()
) -> tuple[list[bytes], list[bytes]]:
    """Returns the names of a prompt's full blocks under a layout, and the digest of each block's own tokens. O(tokens).

    A name is the first half of a SHA-256 that is chained from the layout, the adapter and the salt over all tokens and
    spans before, so it stands for the block's place too; no prompt can be made to have another's name. The digest is an
    XXH3 of the block's tokens alone: a second, unlike function over a part of what the name means.
    Raises `InvalidArgument`.
    """
    chain = NameChain(layout, block_size, extra_keys)
    chain.extend(token_ids)
    return chain.names, chain.digests


class NameChain:
    """A chain has the names of a sequence's full blocks and the digests of their tokens, and grows with the sequence.

    Arguments as of `object_names`. A block of 16 tokens takes half a microsecond.
    """

    def __init__(self, layout: bytes, block_size: int, extra_keys: object = ()) -> None:
        self.names: list[bytes] = []
        self.digests: list[bytes] = []
        #: The tokens that they were made of.
        self._tokens = bytearray()
        self._block_size = require_int("block_size", block_size, 1, 2**20)
        require_name("layout", layout)
        keys = canonical_keys(extra_keys)
        self._spans = spans_of(keys)
        self._root = self._last = root_of(layout, block_size, plain_keys(keys))

    def extend(self, token_ids: Any, stop: int | None = None) -> None:
        """Name the full blocks of a whole sequence, or of its first `stop`, that have no name yet. O(tokens of these).

        Raises as `object_names`; nothing has changed then.
        """
        size, done = self._block_size, len(self.names)
        try:
            stop = len(token_ids) // size if stop is None else stop
            if stop <= done:
                return
            part = token_ids[done * size : stop * size]
        except Exception:  # it has no length, or no slices
            raise InvalidArgument(f"token_ids is {shown(token_ids)}; a sequence of tokens is needed") from None
        data, last, width = token_bytes(part), self._last, 4 * size
        spans = spans_by_block(self._spans, size, stop - done, done) if self._spans else {}
        names, digests = [], []
        for first in range(0, len(data), width):
            own = data[first : first + width]
            digests.append(digest_of(own))
            if spans and first // width in spans:
                own += json.dumps(spans[first // width]).encode()
            last = name_after(last, own)
            names.append(last[:NAME_BYTES])
        self.names += names
        self.digests += digests
        self._tokens += data
        self._last = last

    def is_of(self, token_ids: Any, first: int, stop: int) -> bool:
        """Say whether blocks `first` to `stop` of a sequence are those that have names here. O(tokens of these)."""
        first, stop = require_int("first", first, 0, 2**31), require_int("stop", stop, 0, 2**31)
        begin, end = 4 * self._block_size * first, 4 * self._block_size * stop
        if stop > len(self.names):
            return False
        try:
            part = token_ids[begin // 4 : end // 4]
        except Exception:  # it has no slices
            raise InvalidArgument(f"token_ids is {shown(token_ids)}; a sequence of tokens is needed") from None
        return self._tokens[begin:end] == token_bytes(part)

    def begin_anew(self) -> None:
        """Forget all names: the sequence was cut, and goes on differently."""
        self.names, self.digests, self._tokens, self._last = [], [], bytearray(), self._root

    def copy(self) -> NameChain:
        """Returns a chain that goes on by itself. O(blocks)."""
        made = copy.copy(self)
        made.names, made.digests, made._tokens = list(self.names), list(self.digests), self._tokens.copy()
        return made


def root_of(layout: bytes, block_size: int, keys: object) -> bytes:
    """Returns what names of prompts under these keys (`plain_keys`) are chained from."""
    return sha256(json.dumps(["blockyard tiers", VERSION, layout.hex(), block_size, keys]).encode()).digest()


def name_after(last: bytes, own: bytes) -> bytes:
    """Returns the whole digest, of which a name is the beginning, of a block whose tokens are `own`."""
    return sha256(last + own).digest()


#: Returns the digest of a block's own tokens.
digest_of = xxhash.xxh3_128_digest


def token_bytes(token_ids: Any) -> bytes:
    """Returns tokens as little-endian integers of 32 bits. O(tokens). Raises `InvalidArgument` for what is no token."""
    try:
        if isinstance(token_ids, (list, tuple)):
            data = struct.pack(f"<{len(token_ids)}i", *token_ids)
            if not data or np.frombuffer(data, "<i4").min() >= 0:
                return data
        else:
            array = np.asarray(token_ids)
            if array.ndim == 1 and array.dtype.kind in "iu" and (array.min() >= 0 and array.max() < 2**31):
                return array.astype("<i4").tobytes()
    except (struct.error, TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgument(f"token_ids is {shown(token_ids)}; tokens are integers from 0 to 2**31 - 1")
