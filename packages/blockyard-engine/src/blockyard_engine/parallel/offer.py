"""Offers: messages that name computed tokens and the sender's blocks with their keys and values."""

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
    """Unique name of an offer: sender, its incarnation, and a number used once per incarnation."""

    sender: str
    incarnation: int
    number: int

    def to_bytes(self, kind: str) -> bytes:
        """Return a message of this kind with only the id."""
        return pack(kind, {"id": list(self)})

    @classmethod
    def from_bytes(cls, kind: str, message: object) -> OfferId:
        """Return the id in such a message. Raises `InvalidArgument`, `PeerMismatch`."""
        return id_from(read(kind, message).fields)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A computed prompt that a receiver may fetch.

    Its form is checked on construction, also for offers from the network. Raises `InvalidArgument`.

    Attributes:
        id: name of the offer.
        token_ids: all known tokens, int32 (n,).
        num_computed: tokens with keys and values: n or n - 1.
        tables: the sender's blocks of each layer group, int32, 0 for freed ones.
        extra_keys: canonical extra keys of the request.
        checkpoint_tokens: tokens before the sender's last checkpointed state, which can be requested besides the state
            after all computed tokens; 0 for none.
    """

    id: OfferId
    token_ids: npt.NDArray[np.int32]
    num_computed: int
    tables: tuple[npt.NDArray[np.int32], ...]
    extra_keys: tuple[ExtraKey, ...] = ()
    checkpoint_tokens: int = 0

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
            raise InvalidArgument(f"token_ids has {int(self.token_ids.min())}; tokens must be 0 or more")
        require_int("checkpoint_tokens", self.checkpoint_tokens, 0, self.num_computed - 1)
        require_int("the layer groups of an offer", len(self.tables), 1, MAX_GROUPS)
        object.__setattr__(self, "extra_keys", canonical_keys(self.extra_keys))
        require_spans_within(spans_of(self.extra_keys), count)

    def to_bytes(self) -> bytes:
        """Return the message. O(tokens)."""
        fields = {"id": list(self.id), "computed": self.num_computed, "kept": self.checkpoint_tokens}
        fields["keys"] = keys_to_wire(self.extra_keys)
        return pack("offer", fields, [self.token_ids, *self.tables])

    @classmethod
    def from_bytes(cls, message: object) -> Offer:
        """Return the offer in a message. O(tokens). Raises `InvalidArgument`, or `PeerMismatch` for another version."""
        offer = read("offer", message)
        fields, arrays = offer.fields, offer.arrays
        if len(arrays) < 2:
            raise InvalidArgument(f"an offer has {len(arrays)} arrays; it must have tokens and at least one table")
        computed = require_int("num_computed", fields.get("computed"), 1, MAX_MODEL_LEN)
        tokens, *tables = arrays
        kept = require_int("checkpoint_tokens", fields.get("kept", 0), 0, MAX_MODEL_LEN)
        return cls(id_from(fields), tokens, computed, tuple(tables), keys_from_wire(fields.get("keys")), kept)


def id_from(fields: dict[str, Any]) -> OfferId:
    """Return the offer's id in a message's fields. Raises `InvalidArgument`."""
    value = fields.get("id")
    if not isinstance(value, (list, tuple)) or len(value) != 3 or type(value[0]) is not str:
        raise InvalidArgument(f"the id of an offer is {shown(value)}; it must be (sender, incarnation, number)")
    incarnation = require_int("incarnation", value[1], 0, MAX_INCARNATION)
    return OfferId(value[0], incarnation, require_int("number", value[2], 1, _MAX_NUMBER))


def keys_to_wire(keys: tuple[ExtraKey, ...]) -> list[list[Any]]:
    """Return extra keys as lists."""
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
        raise InvalidArgument(f"extra_keys is {shown(wire)}; it must be a list")
    keys = []
    for item in wire:
        if not isinstance(item, list) or not item or not isinstance(item[0], str) or item[0] not in _KINDS:
            raise InvalidArgument(f"extra_keys has {shown(item)}; each entry must be a salt, lora or span")
        make, count = _KINDS[item[0]]
        if len(item) != count + 1:
            raise InvalidArgument(f"extra_keys has {shown(item)}; {item[0]} must have {count} fields")
        keys.append(make(*item[1:]))
    return canonical_keys(keys)
