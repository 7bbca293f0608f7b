"""Wire format of KV events: vLLM's messages, written in the newest form and read in all forms.

A message is `[ts, events, data_parallel_rank]` in msgpack. An event is a map with "type" since vLLM 0.26, and an array
that begins with its type before. Both are read; unknown fields and types are ignored. A block hash is an unsigned
64-bit number or bytes, which consumers only use as a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import InvalidArgument, MissingExtra

try:
    import msgspec
except ImportError as error:
    raise MissingExtra(f"KV events need {error.name}: pip install 'blockyard[events]'") from error

#: The third frame of a message.
Payload = bytes | memoryview
#: Media as vLLM names them.
GPU, CPU = "GPU", "CPU"
MEDIA = (GPU, CPU)
#: The sequence number that marks the end of a replay.
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
MAX_SEQUENCE = 2**63 - 1
#: Most events in a message that must be decoded one by one, because some are arrays or of an unknown type.
MOST_EVENTS = 2**17
#: Most lists and items in the keys of one event. Decoded, an item of 1 byte may take 80; an event takes 42 MB at most.
MOST_KEY_ITEMS = 2**19
#: Bytes of a msgpack item by tag: tag and number, or tag and length field.
_OWN = {0xC4: 2, 0xC5: 3, 0xC6: 5, 0xC7: 3, 0xC8: 4, 0xC9: 6, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_OWN |= {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_OWN |= {0xD9: 2, 0xDA: 3, 0xDB: 5, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
#: vLLM's name for a group whose layers keep a state.
STATE_KIND = "mamba"
#: Keys of an event without keys.
NO_KEYS = msgspec.Raw(b"\xc0")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Stored blocks of one chain. The first one follows `parent_block_hash` (None: beginning of a prompt).

    Lists of numbers stay in msgpack, as `tables/event_writer` writes and `tables/packed_numbers` reads them; so do keys
    until `read_keys` has checked their number.

    Blockyard adds two fields, which other consumers ignore. `keys` has the extra keys of each block, tag_keys as in
    `blockyard.keys`; `extra_keys` has the same without tags, as vLLM sends it. `num_groups` is the number of the
    cache's layer groups if there are several: a prompt hits only what all of them hold. `cache_salt` is SGLang's; vLLM
    has the salt in the extra_keys of a prompt's first block.
    """

    block_hashes: msgspec.Raw
    parent_block_hash: int | bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: msgspec.Raw = NO_KEYS
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    keys: msgspec.Raw = NO_KEYS
    num_groups: int | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that were removed from a medium."""

    block_hashes: msgspec.Raw
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks were removed."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_KNOWN = {kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
#: Order of the fields in arrays (vLLM 0.20).
_ARRAY_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "BlockStored": {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None},
    "BlockRemoved": {"medium": None},
    "AllBlocksCleared": {},
}


class Batch(msgspec.Struct, array_like=True):
    """The events of one message; `ts` is in seconds since 1970.

    `epoch` identifies the run of the publisher if numbers do not. It is a field of Blockyard's, at the end, which
    decoders of arrays ignore (except Dynamo's, which needs numbers from the clock anyway).
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    epoch: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: msgspec.Raw
    data_parallel_rank: int | None = None
    epoch: int | None = None


#: Errors of a decoder on foreign bytes: rejections of msgspec, invalid UTF-8, unhashable keys.
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError)

_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(Batch)
_raw_decoder = msgspec.msgpack.Decoder(_RawBatch)
_raws_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_event_decoder: Any = msgspec.msgpack.Decoder(Event)
_keys_decoder = msgspec.msgpack.Decoder(list[list[Any] | None] | None)
_fields_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw])


def pack_list(packed: bytes | memoryview) -> msgspec.Raw:
    """Return a list in msgpack as a field of an event."""
    return msgspec.Raw(packed)


def pack_keys(rows: list[list[Any] | None] | list[list[Any]]) -> msgspec.Raw:
    """Return the keys of an event's blocks, one row per block, as a field of the event."""
    return msgspec.Raw(_encoder.encode(rows))


def read_keys(field: str, packed: msgspec.Raw) -> list[list[Any] | None] | None:
    """Return the rows of `BlockStored.keys` or `extra_keys`, None if there are none. O(bytes).

    Raises `InvalidArgument` for another type, and for more than `MOST_KEY_ITEMS` lists and items, before decoding them.
    """
    if packed is NO_KEYS:
        return None
    content = bytes(packed)
    if len(content) > MOST_KEY_ITEMS and _has_more_items(content, MOST_KEY_ITEMS):
        raise InvalidArgument(f"{field} of one event holds more than {MOST_KEY_ITEMS:,} lists and items, the limit")
    try:
        rows: list[list[Any] | None] | None = _keys_decoder.decode(content)
    except _UNREADABLE as error:
        raise InvalidArgument(f"{field} is not a list of keys: {error}") from error
    return rows


def _has_more_items(packed: bytes, limit: int) -> bool:
    """Return whether well-formed msgpack has more than `limit` items, counting lists and maps.

    O(items, at most limit).
    """
    at = count = 0
    while at < len(packed) and count <= limit:
        tag = packed[at]
        length = packed[at + 1 : at + 1 + _LENGTHS.get(tag, 0)]
        at += _OWN.get(tag, 1) + int.from_bytes(length, "big") + (tag & 31 if tag & 0xE0 == 0xA0 else 0)
        count += 1
    return count > limit


def encode_batch(batch: Batch) -> bytes:
    """Return the payload of a message.

    The rank is always included because Dynamo's decoder needs it; the epoch only if set.
    """
    fields = (batch.ts, batch.events, batch.data_parallel_rank)
    return _encoder.encode(fields if batch.epoch is None else (*fields, batch.epoch))


def encode_frame(batch: Batch) -> tuple[bytes, bytes]:
    """Return the bytes of a payload before and after the list of events."""
    tail = _encoder.encode(batch.data_parallel_rank)
    if batch.epoch is not None:
        tail += _encoder.encode(batch.epoch)
    return bytes([0x90 + (3 if batch.epoch is None else 4)]) + _encoder.encode(batch.ts), tail


def encode_event(event: Event, out: bytearray) -> None:
    """Encode one event of the list, replacing the content of `out`. O(bytes)."""
    _encoder.encode_into(event, out)


def decode_batch(payload: Payload) -> Batch:
    """Return a message of vLLM, SGLang or Blockyard, without events of unknown types. O(bytes).

    Raises `InvalidArgument` for other bytes: wrong types, numbers beyond 64 bits, excessive nesting.
    """
    try:
        return _batch_decoder.decode(payload)
    except _UNREADABLE:
        pass  # an unknown type, an array, or not a message
    try:
        raw = _raw_decoder.decode(payload)
        _require_few(bytes(raw.events))
        events = [event for event in map(_decode_event, _raws_decoder.decode(raw.events)) if event is not None]
    except _UNREADABLE as error:
        raise InvalidArgument(f"payload is not a batch of KV events: {error}") from error
    return Batch(raw.ts, events, raw.data_parallel_rank, raw.epoch)


def _require_few(packed: bytes) -> None:
    """Refuse too many events of older forms, because an event of 1 byte in the payload takes 80 bytes when decoded."""
    size = {0xDC: 2, 0xDD: 4}.get(packed[0], 0)
    number = int.from_bytes(packed[1 : 1 + size], "big")
    if number > MOST_EVENTS:
        raise InvalidArgument(f"payload has {number:,} events of older forms; the limit is {MOST_EVENTS:,}")


def _decode_event(raw: msgspec.Raw) -> Event | None:
    """Return an event in any form; None for an unknown type."""
    item = _fields_decoder.decode(raw)
    if isinstance(item, dict):
        kind = msgspec.msgpack.decode(item.pop("type", b"\xc0"))
    else:
        kind = msgspec.msgpack.decode(item[0]) if item else None
        item = dict(zip(_ARRAY_FIELDS.get(kind, ()), item[1:], strict=False)) if isinstance(kind, str) else {}
    if not isinstance(kind, str):
        raise msgspec.ValidationError("an event is neither a map with a type nor an array that begins with one")
    if kind not in _KNOWN:
        return None
    event: Event = _event_decoder.decode(_encoder.encode({"type": kind, **_DEFAULTS[kind], **item}))
    return event


#: A key as in a manager's events: ("salt", value), ("lora", name, path), or a span relative to its block.
PlainKey = tuple[Any, ...]


def tag_keys(request: Iterable[PlainKey], spans: Iterable[PlainKey]) -> list[list[Any]]:
    """Return the extra keys of a block, each with its kind as first item: salt, adapter, then the spans in order."""
    return [list(key) for key in request] + [["span", *span] for span in spans]


def lora_name(request: Iterable[PlainKey]) -> str | None:
    """Return the adapter's name, None without one."""
    return next((key[1] for key in request if key[0] == "lora"), None)


def untag_keys(request: Iterable[PlainKey], spans: Iterable[PlainKey], is_first: bool) -> list[Any] | None:
    """Return the extra keys of a block in vLLM's order: adapter, spans as (content, start), salt on the first block."""
    keys: list[Any] = [key[1] for key in request if key[0] == "lora"]
    keys += [[span[1], span[2]] for span in spans]
    keys += [key[1] for key in request if key[0] == "salt" and is_first]
    return keys or None
