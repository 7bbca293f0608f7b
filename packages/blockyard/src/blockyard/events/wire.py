"""The wire of KV events: vLLM's messages, written in its newest form and read in all of them.

A message is `[ts, events, data_parallel_rank]` in msgpack. An event is a map with "type" since vLLM 0.26 and an array
that begins with its type before; both are read, and fields and types that are not known here are passed over. A block
hash is an unsigned 64-bit number or bytes; consumers take it for a name and nothing else.
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
#: The numbers and payloads of an end mark of a replay.
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
MAX_SEQUENCE = 2**63 - 1
#: Events of one message that are read one by one: in arrays, or beside one of a type that is not known.
MOST_EVENTS = 2**17
#: Lists and items in the keys of one event: read, one of a byte may take 80. With them an event takes 42 MB at most.
MOST_KEY_ITEMS = 2**19
#: By tag, the bytes of what begins with it: its own, and for text and the like those that say how many follow.
_OWN = {0xC4: 2, 0xC5: 3, 0xC6: 5, 0xC7: 3, 0xC8: 4, 0xC9: 6, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_OWN |= {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_OWN |= {0xD9: 2, 0xDA: 3, 0xDB: 5, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
#: What vLLM calls a group whose layers keep a state.
STATE_KIND = "mamba"
#: Keys of an event that has none.
NO_KEYS = msgspec.Raw(b"\xc0")


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks of one chain, each after the one before, the first after `parent_block_hash` (None: at the beginning).

    Lists of numbers stay in msgpack, as `tables/event_writer` writes and `tables/packed_numbers` reads them; keys too,
    until `keys_in` has seen that they are few.

    Two fields of our own, which other consumers pass over. keys: for each block what besides tokens decides it, tagged,
    as `blockyard.keys` has it; extra_keys has the same without tags, as vLLM sends it. num_groups: layer groups of the
    cache, where there are several: a prompt hits what all of them have. cache_salt is SGLang's field; vLLM has the salt
    in the extra_keys of the first block of a prompt.
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
    """Blocks that are gone from a medium."""

    block_hashes: msgspec.Raw
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_KNOWN = {kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
#: The order of fields in arrays (vLLM 0.20).
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
    """The events of one message. ts: seconds since 1970.

    epoch: which life of the publisher it is of, where numbers alone do not tell; a field of our own at the end, which
    decoders of arrays pass over (but for Dynamo's, which wants numbers from the clock anyway).
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


#: What a decoder raises for bytes of others: what msgspec refuses, text that is no UTF-8, keys that cannot be hashed.
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError)

_encoder = msgspec.msgpack.Encoder()
_batch_decoder = msgspec.msgpack.Decoder(Batch)
_raw_decoder = msgspec.msgpack.Decoder(_RawBatch)
_raws_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_event_decoder: Any = msgspec.msgpack.Decoder(Event)
_keys_decoder = msgspec.msgpack.Decoder(list[list[Any] | None] | None)
_fields_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw])


def packed_list(packed: bytes | memoryview) -> msgspec.Raw:
    """A list in msgpack as a field of an event."""
    return msgspec.Raw(packed)


def packed_keys(rows: list[list[Any] | None] | list[list[Any]]) -> msgspec.Raw:
    """The keys of an event's blocks, a row for each, as a field of it."""
    return msgspec.Raw(_encoder.encode(rows))


def keys_in(field: str, packed: msgspec.Raw) -> list[list[Any] | None] | None:
    """The rows of `BlockStored.keys` or `extra_keys`, None for no keys. O(bytes).

    Raises `InvalidArgument` for other things, and for more than `MOST_KEY_ITEMS` lists and items, which are not read.
    """
    if packed is NO_KEYS:
        return None
    content = bytes(packed)
    if len(content) > MOST_KEY_ITEMS and _has_more_items(content, MOST_KEY_ITEMS):
        raise InvalidArgument(f"{field} of one event holds more than {MOST_KEY_ITEMS:,} lists and items, the limit")
    try:
        rows: list[list[Any] | None] | None = _keys_decoder.decode(content)
    except _UNREADABLE as error:
        raise InvalidArgument(f"{field} is no list of keys: {error}") from error
    return rows


def _has_more_items(packed: bytes, limit: int) -> bool:
    """Whether well-formed msgpack has more than `limit` items, lists and maps among them. O(items, at most limit)."""
    at = count = 0
    while at < len(packed) and count <= limit:
        tag = packed[at]
        length = packed[at + 1 : at + 1 + _LENGTHS.get(tag, 0)]
        at += _OWN.get(tag, 1) + int.from_bytes(length, "big") + (tag & 31 if tag & 0xE0 == 0xA0 else 0)
        count += 1
    return count > limit


def encode_batch(batch: Batch) -> bytes:
    """The payload of one message. The rank is always there: Dynamo's decoder wants it; the epoch only if it counts."""
    fields = (batch.ts, batch.events, batch.data_parallel_rank)
    return _encoder.encode(fields if batch.epoch is None else (*fields, batch.epoch))


def encode_frame(batch: Batch) -> tuple[bytes, bytes]:
    """What stands before the list of events in a payload, and what stands after it."""
    tail = _encoder.encode(batch.data_parallel_rank)
    if batch.epoch is not None:
        tail += _encoder.encode(batch.epoch)
    return bytes([0x90 + (3 if batch.epoch is None else 4)]) + _encoder.encode(batch.ts), tail


def encode_event(event: Event, out: bytearray) -> None:
    """One event of such a list, in place of what `out` held. O(bytes)."""
    _encoder.encode_into(event, out)


def decode_batch(payload: Payload) -> Batch:
    """A message of vLLM, SGLang or ours; events of unknown types are left out. O(bytes).

    Raises `InvalidArgument` for what is no such message: wrong types, numbers beyond 64 bits, nesting without end.
    """
    try:
        return _batch_decoder.decode(payload)
    except _UNREADABLE:
        pass  # an unknown type, an array, or no message at all
    try:
        raw = _raw_decoder.decode(payload)
        _require_few(bytes(raw.events))
        events = [event for event in map(_decode_event, _raws_decoder.decode(raw.events)) if event is not None]
    except _UNREADABLE as error:
        raise InvalidArgument(f"payload is no batch of KV events: {error}") from error
    return Batch(raw.ts, events, raw.data_parallel_rank, raw.epoch)


def _require_few(packed: bytes) -> None:
    """An event that is read by itself takes 80 bytes before it is looked at, and may come in one."""
    size = {0xDC: 2, 0xDD: 4}.get(packed[0], 0)
    number = int.from_bytes(packed[1 : 1 + size], "big")
    if number > MOST_EVENTS:
        raise InvalidArgument(f"payload has {number:,} events of older forms; the limit is {MOST_EVENTS:,}")


def _decode_event(raw: msgspec.Raw) -> Event | None:
    """One event in any form; None for a type that is not known."""
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


#: A key as a manager's events have it: ("salt", value), ("lora", name, path), or a span as a block sees it.
PlainKey = tuple[Any, ...]


def tagged(request: Iterable[PlainKey], spans: Iterable[PlainKey]) -> list[list[Any]]:
    """What decides a block besides tokens, each with its kind first: salt and adapter, then the spans in order."""
    return [list(key) for key in request] + [["span", *span] for span in spans]


def lora_name(request: Iterable[PlainKey]) -> str | None:
    """The adapter's name, None without one."""
    return next((key[1] for key in request if key[0] == "lora"), None)


def untagged(request: Iterable[PlainKey], spans: Iterable[PlainKey], is_first: bool) -> list[Any] | None:
    """The extra keys of one block in vLLM's order: adapter, spans as (content, start), salt on the first block."""
    keys: list[Any] = [key[1] for key in request if key[0] == "lora"]
    keys += [[span[1], span[2]] for span in spans]
    keys += [key[1] for key in request if key[0] == "salt" and is_first]
    return keys or None
