"""What a sender tells a receiver: these tokens are computed, and their keys and values stand in these blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockyard.arguments import require_int, shown
from blockyard.cache_options import MAX_MODEL_LEN
from blockyard.config import MAX_GROUPS
from blockyard.errors import InvalidArgument
from blockyard.keys import (
    CacheSalt,
    ExtraKey,
    LoRA,
    Span,
    canonical_keys,
    require_spans_within,
    spans_of,
)
from blockyard.wire import pack, read

from .peer import MAX_INCARNATION

_MAX_NUMBER = 2**62


class OfferId(NamedTuple):
    """Names an offer forever: the sender's name and incarnation, and a number that this start of it uses once."""

    sender: str
    incarnation: int
    number: int

    def to_bytes(self, kind: str) -> bytes:
        """Return a message about this offer and nothing else: `kind` says what."""
        return pack(kind, {"id": list(self)})

    @classmethod
    def from_bytes(cls, kind: str, message: object) -> OfferId:
        """Return the offer that such a message is about. Raises `InvalidArgument`, `PeerMismatch`."""
        return id_from(read(kind, message).fields)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A finished prefill that a receiver may take.

    token_ids: all known tokens, int32 (n,). num_computed: how many of them have keys and values: n or n - 1. tables:
    the sender's blocks of each layer group, int32, 0 where one is gone. extra_keys: canonical, of the request. kept:
    behind how many of the computed tokens the sender has kept a state, which may be asked for beside the one behind all
    of them; 0 for none.

    Raises `InvalidArgument` for what cannot be an offer, so that one from the network can be trusted in its form.
    """

    id: OfferId
    token_ids: npt.NDArray[np.int32]
    num_computed: int
    tables: tuple[npt.NDArray[np.int32], ...]
    extra_keys: tuple[ExtraKey, ...] = ()
    kept: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.id, OfferId):
            raise InvalidArgument(f"id is {shown(self.id)}; it must be an OfferId")
        if not isinstance(self.tables, tuple):
            raise InvalidArgument(f"tables is {shown(self.tables)}; it must be a tuple of arrays")
        for name, array in (("token_ids", self.token_ids), *(("a table", table) for table in self.tables)):
            if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
                raise InvalidArgument(f"{name} is {shown(array)}; it must be an int32 array (n,)")
        count = len(self.token_ids)
        require_int("the tokens of an offer", count, 1, MAX_MODEL_LEN)
        require_int("num_computed", self.num_computed, max(count - 1, 1), count)
        if int(self.token_ids.min()) < 0:
            raise InvalidArgument(f"token_ids holds {int(self.token_ids.min())}; a token is 0 or more")
        require_int("kept", self.kept, 0, self.num_computed - 1)
        require_int("the layer groups of an offer", len(self.tables), 1, MAX_GROUPS)
        object.__setattr__(self, "extra_keys", canonical_keys(self.extra_keys))
        require_spans_within(spans_of(self.extra_keys), count)

    def to_bytes(self) -> bytes:
        """Return the message. O(tokens)."""
        fields = {"id": list(self.id), "computed": self.num_computed, "kept": self.kept}
        fields["keys"] = keys_to_wire(self.extra_keys)
        return pack("offer", fields, [self.token_ids, *self.tables])

    @classmethod
    def from_bytes(cls, message: object) -> Offer:
        """Return the offer of a message. O(tokens). Raises `InvalidArgument`, or `PeerMismatch` for another version."""
        offer = read("offer", message)
        fields, arrays = offer.fields, offer.arrays
        if len(arrays) < 2:
            raise InvalidArgument(f"an offer has {len(arrays)} arrays; its tokens and at least one table are needed")
        computed = require_int("num_computed", fields.get("computed"), 1, MAX_MODEL_LEN)
        tokens, *tables = arrays
        kept = require_int("kept", fields.get("kept", 0), 0, MAX_MODEL_LEN)
        return cls(id_from(fields), tokens, computed, tuple(tables), keys_from_wire(fields.get("keys")), kept)


def id_from(fields: dict[str, Any]) -> OfferId:
    """Return the id in a message's fields. Raises `InvalidArgument`."""
    value = fields.get("id")
    if not isinstance(value, (list, tuple)) or len(value) != 3 or type(value[0]) is not str:
        raise InvalidArgument(f"the id of an offer is {shown(value)}; (sender, incarnation, number) is needed")
    incarnation = require_int("incarnation", value[1], 0, MAX_INCARNATION)
    return OfferId(value[0], incarnation, require_int("number", value[2], 1, _MAX_NUMBER))


def keys_to_wire(keys: tuple[ExtraKey, ...]) -> list[list[Any]]:
    """Write extra keys as lists."""
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
    """Return the extra keys that `keys_to_wire` wrote. Raises `InvalidArgument`."""
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
