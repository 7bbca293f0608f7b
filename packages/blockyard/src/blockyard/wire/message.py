"""A message between processes: a kind, fields, arrays of 32-bit integers, and a digest of all of it.

    mark (4 bytes)  version (4)  digest (16)  number (8)  previous digest (16)  bytes of the fields (4)  arrays (4)
    the kind and the fields, as JSON
    the length of each array (4), then the arrays

All integers are little-endian. The digest is the BLAKE2b of everything else in the message, and is checked first. It
detects damage: a flipped bit, a truncation, mixed messages. It has no key, so it does not detect forgery: whoever can
write to the connection can write any message. Number and previous digest are 0 outside of a chain (`Chain`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..arguments import shown
from ..errors import DivergedRank, InvalidArgument, PeerMismatch

_Integer = TypeVar("_Integer", bound=np.integer[Any])

#: Version of the protocol; both sides must have the same.
VERSION = 2
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)
_MARK = b"BYRD"
_HEAD = struct.Struct(f"<4sI{DIGEST_BYTES}sQ{DIGEST_BYTES}sII")
_DIGEST_AT = 8
_BEHIND_DIGEST = _DIGEST_AT + DIGEST_BYTES
_ITEM_BYTES = 4
#: Arrays begin at a multiple of this many bytes, so that they can be read in place.
_ALIGNED = 8


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message that was read and whose digest is correct.

    Attributes:
        kind: kind of the message.
        fields: plain values.
        items: integers of all arrays, int32, as a view of the bytes.
        sizes: lengths of the arrays.
        number: number in its chain, 0 outside of one.
        before: digest of the previous message.
        digest: digest of this message.
    """

    kind: str
    fields: dict[str, Any]
    items: npt.NDArray[np.int32]
    sizes: list[int]
    number: int
    before: bytes
    digest: bytes

    @classmethod
    def of(cls, data: object) -> Message:
        """Read a message from bytes, or any buffer of them. O(bytes).

        Raises:
            PeerMismatch: the protocol version differs.
            InvalidArgument: the bytes are not a message, or are damaged.
        """
        view = _bytes_of(data)
        _, _, digest, number, before, size, count = _head_of(view)
        end = _HEAD.size + size
        fields = _fields(bytes(view[_HEAD.size : end]))
        items, sizes = _items(view[end:], count)
        return cls(str(fields.pop("kind", "")), fields, items, sizes, number, before, digest)

    @property
    def arrays(self) -> list[npt.NDArray[np.int32]]:
        """Return the arrays, as views of the bytes. O(number of arrays)."""
        return split(self.items, self.sizes)

    def require(self, kind: str) -> Message:
        """Return this message if its kind is `kind`. Raises `InvalidArgument` otherwise."""
        if self.kind != kind:
            raise InvalidArgument(f"message is a {self.kind!r}; it must be a {kind!r}")
        return self


def pack(
    kind: str,
    fields: dict[str, Any] | None = None,
    arrays: Sequence[npt.NDArray[np.integer[Any]]] = (),
    number: int = 0,
    before: bytes = NO_DIGEST,
) -> bytes:
    """Return the bytes of a message. O(bytes).

    Args:
        kind: kind of the message.
        fields: values that JSON can represent.
        arrays: integers (n,) of 32 bits each.
        number: number in its chain.
        before: digest of the message before it.
    """
    header = json.dumps({**(fields or {}), "kind": kind}).encode()
    header += b" " * (-(_HEAD.size + len(header) + _ITEM_BYTES * len(arrays)) % _ALIGNED)
    sizes = np.array([len(array) for array in arrays], "<u4").tobytes()
    head = _HEAD.pack(_MARK, VERSION, NO_DIGEST, number, before, len(header), len(arrays))
    rest = b"".join([head[_BEHIND_DIGEST:], header, sizes, *(array.astype("<i4").tobytes() for array in arrays)])
    return head[:_DIGEST_AT] + _digest(head, rest) + rest


def read(kind: str, data: object) -> Message:
    """Return a message of `kind`, given its bytes or the message itself.

    Raises the errors of `Message.of` and `Message.require`.
    """
    return (data if isinstance(data, Message) else Message.of(data)).require(kind)


def _digest(head: bytes | memoryview, rest: bytes | memoryview) -> bytes:
    digest = blake2b(head[:_DIGEST_AT], digest_size=DIGEST_BYTES)
    digest.update(rest)
    return digest.digest()


def _bytes_of(data: object) -> memoryview:
    try:
        return memoryview(data).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:  # no buffer, strided, or released
        raise InvalidArgument(f"message is {shown(data)}; it must be bytes") from error


def _head_of(view: memoryview) -> tuple[Any, ...]:
    """Return the fields of the header, after checking the digest."""
    if len(view) < _HEAD.size:
        raise InvalidArgument(f"message has {len(view)} bytes; it must have at least {_HEAD.size}")
    head = _HEAD.unpack(view[: _HEAD.size])
    if head[0] != _MARK:
        raise InvalidArgument(f"message begins with {head[0]!r}; it must begin with {_MARK!r}")
    if head[1] != VERSION:
        raise PeerMismatch(f"protocol version is {head[1]} at the peer, {VERSION} here")
    digest = _digest(view, view[_BEHIND_DIGEST:])
    if digest != head[2]:
        raise InvalidArgument(f"message has digest {head[2].hex()}, but its bytes have {digest.hex()}: it was damaged")
    if head[5] + _ITEM_BYTES * head[6] > len(view) - _HEAD.size:
        raise InvalidArgument(f"message has {head[5]} bytes of fields and {head[6]} arrays in {len(view)} bytes")
    return head


def split(items: npt.NDArray[_Integer], sizes: list[int]) -> list[npt.NDArray[_Integer]]:
    """Return arrays of these sizes, consecutive in `items`."""
    arrays, first = [], 0
    for size in sizes:
        arrays.append(items[first : first + size])
        first += size
    return arrays


def _items(data: memoryview, count: int) -> tuple[npt.NDArray[np.int32], list[int]]:
    sizes = np.frombuffer(data, "<u4", count).tolist()
    items = data[_ITEM_BYTES * count :]
    if sum(sizes) * _ITEM_BYTES != len(items):
        raise InvalidArgument(f"message has {len(items)} bytes of arrays; its sizes need {sum(sizes) * _ITEM_BYTES}")
    return np.frombuffer(items, "<i4"), sizes


def _fields(header: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(header.decode())
    except (ValueError, RecursionError):
        raise InvalidArgument(f"message has the fields {shown(header)}; they must be JSON") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(f"message has the fields {shown(fields)}; they must be a JSON object")
    return fields


class Chain:
    """One end of a chain of messages.

    A digest covers the previous digest, so equal digests mean equal histories.

    Args:
        start: bytes that both ends have agreed on.
    """

    def __init__(self, start: bytes = b"") -> None:
        #: Number and digest of the latest message, set together so that an interrupt cannot separate them.
        self.place = (0, blake2b(start, digest_size=DIGEST_BYTES).digest() if start else NO_DIGEST)

    @property
    def number(self) -> int:
        """Return the number of messages. O(1)."""
        return self.place[0]

    @property
    def digest(self) -> bytes:
        """Return the digest of all messages. O(1)."""
        return self.place[1]

    def next(self, kind: str, fields: dict[str, Any], arrays: Sequence[npt.NDArray[np.integer[Any]]]) -> bytes:
        """Return the next message. O(bytes)."""
        data = pack(kind, fields, arrays, self.number + 1, self.digest)
        self.place = (self.number + 1, data[_DIGEST_AT:_BEHIND_DIGEST])
        return data

    def require_next(self, message: Message, name: str) -> None:
        """Raise `DivergedRank`, naming this end as `name`, unless a message is the next one. O(1)."""
        if (message.number, message.before) != (self.number + 1, self.digest):
            raise DivergedRank(
                f"{name} is at step {self.number} with digest {self.digest.hex()}; the plan is step {message.number} "
                f"and continues step {message.number - 1} with digest {message.before.hex()}"
            )

    def take(self, message: Message) -> None:
        """Record a message as read."""
        self.place = (message.number, message.digest)
