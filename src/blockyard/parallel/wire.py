"""Messages between the two sides as bytes: a mark, a header in JSON, and arrays of 32-bit integers behind it."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arguments import shown
from ..errors import InvalidArgument, PeerMismatch
from ..keys import CacheSalt, ExtraKey, LoRA, Span, canonical_keys

#: The version of the messages and of the order in which bytes are sent; both sides must have the same.
PROTOCOL_VERSION = 1
_MARK = b"BYHO"
_HEAD = struct.Struct("<4sII")
_MAX_HEADER = 2**24
_MAX_ITEMS = 2**27


def pack(kind: str, fields: dict[str, Any], arrays: Sequence[npt.NDArray[np.int32]] = ()) -> bytes:
    """A message of a kind. fields: what JSON can say. arrays: int32 (n,) each. O(bytes)."""
    header = json.dumps({"kind": kind, "sizes": [len(array) for array in arrays], **fields}).encode()
    body = b"".join(np.ascontiguousarray(array, "<i4").tobytes() for array in arrays)
    return _HEAD.pack(_MARK, PROTOCOL_VERSION, len(header)) + header + body


def unpack(kind: str, message: object) -> tuple[dict[str, Any], list[npt.NDArray[np.int32]]]:
    """The fields and arrays of a message, which `pack` made; the arrays are views. O(header + number of arrays).

    Raises `PeerMismatch` for another version, `InvalidArgument` for what is no message, or not one of this kind.
    """
    fields, data = _header(message)
    if fields.get("kind") != kind:
        raise InvalidArgument(f"message is a {shown(fields.get('kind'))}; it must be a {kind!r}")
    sizes = fields.get("sizes")
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size <= _MAX_ITEMS for size in sizes):
        raise InvalidArgument(f"message has arrays of sizes {shown(sizes)}; a list of integers is needed")
    if sum(sizes) * 4 != len(data):
        raise InvalidArgument(f"message has {len(data)} bytes of arrays; its header says {sum(sizes) * 4}")
    items = np.frombuffer(data, "<i4")
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return fields, [items[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def kind_of(message: object) -> str:
    """What kind of message it is. Raises as `unpack` does."""
    kind = _header(message)[0].get("kind")
    if not isinstance(kind, str):
        raise InvalidArgument(f"message has the kind {shown(kind)}; a string is needed")
    return kind


def _header(message: object) -> tuple[dict[str, Any], memoryview]:
    if not isinstance(message, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"message is {shown(message)}; bytes are needed")
    try:
        view = memoryview(message).cast("B")
    except (TypeError, ValueError) as error:  # strided, or released
        raise InvalidArgument(f"message cannot be read: {error}") from None
    if len(view) < _HEAD.size:
        raise InvalidArgument(f"message has {len(view)} bytes; at least {_HEAD.size} are needed")
    mark, version, size = _HEAD.unpack(view[: _HEAD.size])
    if mark != _MARK:
        raise InvalidArgument(f"message begins with {mark!r}; it must begin with {_MARK!r}")
    if version != PROTOCOL_VERSION:
        raise PeerMismatch(f"protocol version is {version} at the peer, {PROTOCOL_VERSION} here")
    if size > min(_MAX_HEADER, len(view) - _HEAD.size):
        raise InvalidArgument(f"message has a header of {size} bytes; {len(view) - _HEAD.size} follow")
    return _json(bytes(view[_HEAD.size : _HEAD.size + size])), view[_HEAD.size + size :]


def _json(header: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"message has the header {shown(header)}; JSON is needed") from None
    if not isinstance(fields, dict):
        raise InvalidArgument(f"message has the header {shown(fields)}; a JSON object is needed")
    return fields


def keys_to_wire(keys: tuple[ExtraKey, ...]) -> list[list[Any]]:
    """Extra keys as lists."""
    wire: list[list[Any]] = []
    for key in keys:
        if isinstance(key, CacheSalt):
            wire.append(["salt", key.value])
        elif isinstance(key, LoRA):
            wire.append(["lora", key.name, key.path])
        else:
            wire.append(["span", key.content, key.start, key.length, key.kind])
    return wire


_KINDS: dict[str, tuple[Any, int]] = {"salt": (CacheSalt, 1), "lora": (LoRA, 2), "span": (Span, 4)}


def keys_from_wire(wire: object) -> tuple[ExtraKey, ...]:
    """The extra keys that `keys_to_wire` wrote. Raises `InvalidArgument`."""
    if not isinstance(wire, list):
        raise InvalidArgument(f"extra_keys is {shown(wire)}; a list is needed")
    keys = []
    for item in wire:
        if not isinstance(item, list) or not item or not isinstance(item[0], str) or item[0] not in _KINDS:
            raise InvalidArgument(f"extra_keys holds {shown(item)}; a salt, lora or span is needed")
        make, count = _KINDS[item[0]]
        if len(item) != count + 1:
            raise InvalidArgument(f"extra_keys holds {shown(item)}; {item[0]} has {count} fields")
        keys.append(make(*item[1:]))
    return canonical_keys(keys)
