"""Names of objects, and the header that describes an object's bytes.

An object is a page of 4,096 bytes and its payload. The page is a message of `blockyard.wire` (mark, version, digest,
fields), followed by zeros, so that the payload is aligned. Its fields are the object's name, the digest of its tokens,
its layout's id, the payload's length and its checksum (XXH3, 128 bits). The digest covers the fields and the checksum
the payload; the page's other bytes must be zeros. So every bit of an object is verified. There is no secret key:
whoever may write to the backend can forge an object.

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

#: Version of the page's fields. Names depend on it, so that versions can share a backend.
VERSION = 2
PAGE_BYTES = 4096
_KIND = "object"
#: A page's message is usually shorter than this. Comparing the zeros after it is faster than stripping them.
_TEXT_BYTES = 512
_NO_TEXT = bytes(PAGE_BYTES - _TEXT_BYTES)


class BadObject(Exception):
    """The bytes are not a valid object, or not the requested one; `cause` says which."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Header:
    """Description of an object, stored in its page.

    Attributes:
        name: the object's name.
        tokens: digest of its tokens.
        layout: id of its layout.
        length: bytes of the payload.
        checksum: checksum of the payload.
    """

    name: bytes
    tokens: bytes
    layout: bytes
    length: int
    checksum: bytes

    def to_page(self) -> bytes:
        """Return the page, 4,096 bytes."""
        fields = {name: getattr(self, name).hex() for name in ("name", "tokens", "layout", "checksum")}
        return pack(_KIND, {**fields, "length": self.length, "version": VERSION}).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def from_page(cls, page: bytes) -> Header:
        """Parse a page. Raises `BadObject`: DAMAGED, TRUNCATED, or OTHER_VERSION."""
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
        """Raise `BadObject` unless the object is the requested one."""
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
    """Return the XXH3 checksum, 128 bits, of bytes in one or several buffers. O(bytes)."""
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(part)
    return whole.digest()


def require_whole(data: memoryview, name: bytes | None = None) -> Header:
    """Verify a whole object, page and payload, and return its header. O(bytes). Raises `BadObject`."""
    return require_parts(bytes(data[:PAGE_BYTES]), [data[PAGE_BYTES:]], name)


def require_parts(page: bytes, payload: Sequence[memoryview], name: bytes | None = None) -> Header:
    """Verify an object whose page and payload are in separate buffers; see `require_whole`."""
    header = Header.from_page(page)
    if name is not None and header.name != name:
        raise BadObject(Cause.FOREIGN)
    header.require_payload(payload)
    return header


def layout_id(**fields: Any) -> bytes:
    """Return the id of a layout, 16 bytes: BLAKE2b over its fields as sorted JSON. O(fields).

    >>> layout_id(model="sha256:41f0", dtype="bfloat16", block_size=16, heads=9, rank=0, group=0).hex()
    '02c4e7a9c228a1265714f3a888cbdd6e'

    Args:
        **fields: everything that must be equal in two engines for one to load objects of the other: a fingerprint of
            weights and config, dtype, block size, heads, rank, group. Plain values.

    Raises:
        InvalidArgument: there are no fields, or a value is not plain.
    """
    if not fields:
        raise InvalidArgument("layout_id got no fields; pass at least one")
    try:
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"fields is {shown(fields)}; values must be plain: {error}") from None
    return blake2b(text.encode(), digest_size=NAME_BYTES).digest()


def object_names(
    layout: bytes, token_ids: object, block_size: int, extra_keys: object = ()
) -> tuple[list[bytes], list[bytes]]:
    """Return the names of a prompt's full blocks, and the digest of each block's own tokens. O(tokens).

    A name is the first half of a SHA-256 that is chained from the layout, the adapter and the salt over all tokens and
    spans up to the block. So it depends on the block's position, and nobody can construct a prompt with another's name.
    The digest is an XXH3 of the block's tokens alone, as a second, independent check. Raises `InvalidArgument`.
    """
    chain = NameChain(layout, block_size, extra_keys)
    chain.extend(token_ids)
    return chain.names, chain.digests


class NameChain:
    """Names and token digests of a sequence's full blocks. Takes the arguments of `object_names`.

    It grows with the sequence. Naming a block of 16 tokens takes half a microsecond.
    """

    def __init__(self, layout: bytes, block_size: int, extra_keys: object = ()) -> None:
        self.names: list[bytes] = []
        self.digests: list[bytes] = []
        #: The tokens of the named blocks.
        self._tokens = bytearray()
        self._block_size = require_int("block_size", block_size, 1, 2**20)
        require_name("layout", layout)
        keys = canonical_keys(extra_keys)
        self._spans = spans_of(keys)
        self._root = self._last = root_of(layout, block_size, plain_keys(keys))

    def extend(self, token_ids: Any, stop: int | None = None) -> None:
        """Name the full blocks that have no name yet, of a whole sequence or of its first `stop` blocks.

        O(tokens of these). Raises as `object_names` does; nothing has changed then.
        """
        size, done = self._block_size, len(self.names)
        try:
            stop = len(token_ids) // size if stop is None else stop
            if stop <= done:
                return
            part = token_ids[done * size : stop * size]
        except Exception:  # no length, or no slices
            raise InvalidArgument(f"token_ids is {shown(token_ids)}; it must be a sequence of tokens") from None
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
        before = self._last
        try:
            self.names += names
            self.digests += digests
            self._tokens += data
            self._last = last
        except BaseException:  # Ctrl-C, or no memory: a name after the wrong one would be another prompt's
            del self.names[done:], self.digests[done:], self._tokens[done * width :]
            self._last = before
            raise

    def matches(self, token_ids: Any, first: int, stop: int) -> bool:
        """Return whether blocks `first` to `stop` of a sequence are those that were named here. O(tokens of these)."""
        first, stop = require_int("first", first, 0, 2**31), require_int("stop", stop, 0, 2**31)
        begin, end = 4 * self._block_size * first, 4 * self._block_size * stop
        if stop > len(self.names):
            return False
        try:
            part = token_ids[begin // 4 : end // 4]
        except Exception:  # no slices
            raise InvalidArgument(f"token_ids is {shown(token_ids)}; it must be a sequence of tokens") from None
        return self._tokens[begin:end] == token_bytes(part)

    def clear(self) -> None:
        """Forget all names: the sequence was truncated and continues differently."""
        self.names, self.digests, self._tokens, self._last = [], [], bytearray(), self._root

    def copy(self) -> NameChain:
        """Return an independent copy. O(blocks)."""
        made = copy.copy(self)
        made.names, made.digests, made._tokens = list(self.names), list(self.digests), self._tokens.copy()
        return made


def root_of(layout: bytes, block_size: int, keys: object) -> bytes:
    """Return the digest from which names of prompts with these keys (`plain_keys`) are chained."""
    return sha256(json.dumps(["blockyard tiers", VERSION, layout.hex(), block_size, keys]).encode()).digest()


def name_after(last: bytes, own: bytes) -> bytes:
    """Return the digest of a block with tokens `own`; its name is the first half."""
    return sha256(last + own).digest()


#: Return the digest of a block's own tokens.
digest_of = xxhash.xxh3_128_digest


def token_bytes(token_ids: Any) -> bytes:
    """Return tokens as little-endian 32-bit integers. O(tokens). Raises `InvalidArgument` for invalid tokens."""
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
    raise InvalidArgument(f"token_ids is {shown(token_ids)}; tokens must be integers from 0 to 2**31 - 1")
