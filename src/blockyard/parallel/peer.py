"""The handshake: what each side says of its cache, and what of it must be equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arguments import require_int, require_str, shown
from ..config import CacheConfig
from ..core.manager import KVCacheManager
from ..errors import InvalidArgument, PeerMismatch
from ..groups import LayerGroup
from ..wire import message as wire
from .shards import MAX_HEADS, HeadShards

MAX_INCARNATION = 2**62
_MAX_LAYERS = 2**20
#: What both sides must have the same; block sizes, layouts and shards are converted.
_EQUAL = ("dtype", "num_layers", "head_size", "value_size")


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What one side of a hand-over is: the message that both sides send first.

    name: of this side, used once among all that it speaks with. incarnation: a number that it never had before, so
    that offers of an earlier start of the same process are recognized: a count of its starts, or a random number.
    config: the cache's. dtype, num_layers, head_size, value_size: of its keys and values. shards: which rank keeps
    which heads. layout: the order in a block, "NHD" or "HND". layer_groups: the layers of each group; one group of all
    if empty.

    Raises `InvalidArgument` for values outside their limits.
    """

    name: str
    incarnation: int
    groups: tuple[LayerGroup, ...]
    dtype: str
    num_layers: int
    head_size: int
    shards: HeadShards
    value_size: int = 0
    layout: str = "NHD"
    layer_groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "dtype", "layout"):
            if not require_str(name, getattr(self, name)):
                raise InvalidArgument(f"{name} is ''; it must not be empty")
        self._set("incarnation", require_int("incarnation", self.incarnation, 0, MAX_INCARNATION))
        self._set("num_layers", require_int("num_layers", self.num_layers, 1, _MAX_LAYERS))
        self._set("head_size", require_int("head_size", self.head_size, 1, MAX_HEADS))
        self._set("value_size", require_int("value_size", self.value_size or self.head_size, 1, MAX_HEADS))
        if self.layout not in ("NHD", "HND"):
            raise InvalidArgument(f"layout is {shown(self.layout)}; it must be 'NHD' or 'HND'")
        if not isinstance(self.shards, HeadShards):
            raise InvalidArgument(f"shards is {shown(self.shards)}; it must be HeadShards")
        if not self.groups or not all(isinstance(group, LayerGroup) for group in self.groups):
            raise InvalidArgument(f"groups is {shown(self.groups)}; it must be a tuple of LayerGroup")
        self._set("layer_groups", self._checked_layers())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _checked_layers(self) -> tuple[tuple[int, ...], ...]:
        groups = self.layer_groups or (tuple(range(self.num_layers)),)
        wanted = f"layer_groups is {shown(groups)}; it must name each of {self.num_layers} layers once, in "
        wanted += f"{len(self.groups)} groups"
        if not isinstance(groups, tuple) or not all(isinstance(group, (tuple, range)) for group in groups):
            raise InvalidArgument(wanted)
        plain = tuple(tuple(require_int("a layer", each, 0, _MAX_LAYERS) for each in group) for group in groups)
        named = sorted(layer for group in plain for layer in group)
        if named != list(range(self.num_layers)) or len(plain) != len(self.groups):
            raise InvalidArgument(wanted)
        return plain

    @classmethod
    def of(cls, config: CacheConfig, name: str, incarnation: int, **fields: Any) -> PeerInfo:
        """A side with the layer groups of a cache's config. fields: the others of this class."""
        return cls(name, incarnation, config.layer_groups, **fields)

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of the whole model."""
        return self.shards.num_kv_heads

    def to_bytes(self) -> bytes:
        """The message."""
        groups = [[group.block_size, group.sliding_window, group.name] for group in self.groups]
        fields = {name: getattr(self, name) for name in ("name", "incarnation", "layout", "layer_groups", *_EQUAL)}
        return wire.pack("peer", {**fields, "groups": groups, "heads": self.num_kv_heads, "shards": self.shards.ranges})

    @classmethod
    def from_bytes(cls, message: object) -> PeerInfo:
        """The side that a message tells of. Raises `PeerMismatch` for another version, `InvalidArgument`."""
        fields = wire.read("peer", message).fields
        try:
            return cls(
                groups=tuple(LayerGroup(*group) for group in fields["groups"]),
                shards=HeadShards(fields["heads"], tuple(fields["shards"])),
                layer_groups=tuple(map(tuple, fields["layer_groups"])),
                **{name: fields[name] for name in ("name", "incarnation", "layout", *_EQUAL)},
            )
        except (KeyError, TypeError) as error:
            raise InvalidArgument(f"message has no whole account of a peer: {error}") from None


def require_compatible(mine: PeerInfo, theirs: PeerInfo) -> None:
    """Raise `PeerMismatch`, with both values, where keys and values of one side are of no use to the other. O(layers).

    Block sizes, layouts and shards may differ. `require_same_memory` asks for more.
    """
    for name in ("num_kv_heads", *_EQUAL, "layer_groups"):
        _require_equal(name, getattr(mine, name), getattr(theirs, name))
    for number, (ours, other) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        _require_equal(f"sliding_window of group {number}", ours.sliding_window, other.sliding_window)


def require_same_memory(mine: PeerInfo, theirs: PeerInfo) -> None:
    """`require_compatible`, and the same layout, block sizes and shards: where blocks are copied as they lie."""
    require_compatible(mine, theirs)
    _require_equal("layout", mine.layout, theirs.layout)
    _require_equal("shards", mine.shards.ranges, theirs.shards.ranges)
    for number, (ours, other) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        _require_equal(f"block_size of group {number}", ours.block_size, other.block_size)


def _require_equal(name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise PeerMismatch(f"{name} is {shown(mine)} here, {shown(theirs)} at the peer; they must be equal")


def require_own_config(cache: KVCacheManager, peer: PeerInfo) -> None:
    """Raise `InvalidArgument` unless `peer` tells of this cache."""
    if not isinstance(cache, KVCacheManager):
        raise InvalidArgument(f"cache is {shown(cache)}; it must be a KVCacheManager")
    if not isinstance(peer, PeerInfo):
        raise InvalidArgument(f"peer is {shown(peer)}; it must be a PeerInfo")
    if peer.groups != cache.config.layer_groups:
        raise InvalidArgument(f"peer has the groups {shown(peer.groups)}; the cache has {cache.config.layer_groups}")
