"""The handshake: the description of each side's cache, and the compatibility checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockyard import KVCacheManager
from blockyard.arguments import require_int, require_str, shown
from blockyard.config import MAX_GROUPS, CacheConfig
from blockyard.errors import InvalidArgument, PeerMismatch
from blockyard.groups import MAX_STATE_BYTES, LayerGroup
from blockyard.sizing import MAX_RANKS, Shard
from blockyard.wire import pack, read

MAX_HEADS = 2**20


@dataclass(frozen=True, slots=True)
class HeadShards:
    """KV heads of each rank of one side: `ranges[rank]` is (first head, number of heads).

    Heads may be on several ranks (GQA with fewer heads than ranks; MLA, whose one head is on all ranks). Raises
    `InvalidArgument` for a range outside the heads, or a head on no rank. O(ranks).

    >>> HeadShards.even(8, 2).ranges
    ((0, 4), (4, 4))
    >>> HeadShards.even(2, 4).ranges
    ((0, 1), (0, 1), (1, 1), (1, 1))
    """

    num_kv_heads: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", require_int("num_kv_heads", self.num_kv_heads, 1, MAX_HEADS))
        object.__setattr__(self, "ranges", _checked_ranges(self.ranges, self.num_kv_heads))
        missing = _first_missing(self.ranges, self.num_kv_heads)
        if missing is not None:
            raise InvalidArgument(
                f"ranges is {shown(self.ranges)}; it must include each head, but head {missing} is missing"
            )

    @classmethod
    def even(cls, num_kv_heads: int, num_ranks: int = 1) -> HeadShards:
        """Return heads in order, divided evenly as in a tensor parallel model (`Shard`). O(ranks).

        The first ranks have one more if they do not divide. With more ranks than heads each rank has one, and
        neighbouring ranks share it.
        """
        heads = require_int("num_kv_heads", num_kv_heads, 1, MAX_HEADS)
        ranks = require_int("num_ranks", num_ranks, 1, MAX_RANKS)
        kept = [Shard(rank, ranks).kv_heads(heads) for rank in range(ranks)]
        return cls(heads, tuple((heads_of.start, len(heads_of)) for heads_of in kept))

    @property
    def num_ranks(self) -> int:
        """Number of ranks of this side."""
        return len(self.ranges)


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Consecutive heads that one rank sends to another; each rank numbers its own from 0."""

    from_rank: int
    to_rank: int
    from_head: int
    to_head: int
    num_heads: int


def head_runs(sender: HeadShards, receiver: HeadShards) -> tuple[HeadRun, ...]:
    """Return the heads that each rank of the receiver gets from the sender's ranks, each head once. O(heads).

    A head that several of the sender's ranks have comes from a different one for each receiving rank, which balances
    the load. Raises `PeerMismatch` if the sides have different numbers of heads.

    >>> [(run.from_rank, run.to_rank, run.num_heads) for run in head_runs(HeadShards.even(3, 2), HeadShards.even(3))]
    [(0, 0, 2), (1, 0, 1)]
    """
    if sender.num_kv_heads != receiver.num_kv_heads:
        raise PeerMismatch(f"num_kv_heads is {sender.num_kv_heads} at the sender, {receiver.num_kv_heads} here")
    holders: list[list[int]] = [[] for _ in range(sender.num_kv_heads)]
    for rank, (first, count) in enumerate(sender.ranges):
        for head in range(first, first + count):
            holders[head].append(rank)
    runs: list[HeadRun] = []
    for to_rank, (first, count) in enumerate(receiver.ranges):
        runs += _runs_to(
            to_rank, first, [ranks[to_rank % len(ranks)] for ranks in holders[first : first + count]], sender
        )
    return tuple(runs)


def _runs_to(to_rank: int, first: int, sources: list[int], sender: HeadShards) -> list[HeadRun]:
    """Return the runs to one rank, whose heads from `first` on come from the ranks `sources`."""
    runs = []
    start = 0
    for end in range(1, len(sources) + 1):
        if end == len(sources) or sources[end] != sources[start]:
            rank = sources[start]
            runs.append(HeadRun(rank, to_rank, first + start - sender.ranges[rank][0], start, end - start))
            start = end
    return runs


def _checked_ranges(ranges: object, num_kv_heads: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(ranges, (tuple, list)) or not 1 <= len(ranges) <= MAX_RANKS:
        raise InvalidArgument(f"ranges is {shown(ranges)}; it must be a tuple of 1 to {MAX_RANKS} (first, number)")
    checked = []
    for rank, pair in enumerate(ranges):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidArgument(f"ranges[{rank}] is {shown(pair)}; it must be (first head, number of heads)")
        first = require_int(f"the first head of rank {rank}", pair[0], 0, num_kv_heads - 1)
        checked.append((first, require_int(f"the heads of rank {rank}", pair[1], 1, num_kv_heads - first)))
    return tuple(checked)


def _first_missing(ranges: tuple[tuple[int, int], ...], num_kv_heads: int) -> int | None:
    covered = 0
    for first, count in sorted(ranges):
        if first > covered:
            return covered
        covered = max(covered, first + count)
    return covered if covered < num_kv_heads else None


MAX_INCARNATION = 2**62
_MAX_LAYERS = 2**20
_MAX_TENSORS = 2**20
#: Attributes that must be equal on both sides; block sizes, layouts and shards are converted.
_EQUAL = ("dtype", "num_layers", "head_size", "value_size")
_IDENTITY = ("name", "incarnation", "layout")


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Description of one side's cache: the message that both sides send first.

    Raises `InvalidArgument` for values outside their limits.

    Attributes:
        name: name of this side, unique among all that it communicates with.
        incarnation: a number that this name never used before, such as a count of its starts or a random number; it
            identifies offers of an earlier start.
        groups: layer groups of the cache.
        dtype: dtype of keys and values.
        num_layers: number of layers.
        head_size: elements of a key.
        shards: KV heads of each rank.
        value_size: elements of a value; 0 for head_size.
        layout: order in a block, "NHD" or "HND".
        layer_groups: layers of each group; empty for one group of all layers.
        state_bytes: bytes of a state; 0 for a cache without states. A side with states has one rank.
        state_tensors: name of each tensor of a state (`StateSlots.describe`).
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
    state_bytes: int = 0
    state_tensors: tuple[str, ...] = ()

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
        self._check_states()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_states(self) -> None:
        self._set("state_bytes", require_int("state_bytes", self.state_bytes, 0, MAX_STATE_BYTES * MAX_GROUPS))
        if not isinstance(self.state_tensors, tuple) or len(self.state_tensors) > _MAX_TENSORS:
            raise InvalidArgument(
                f"state_tensors is {shown(self.state_tensors)}; it must be a tuple of up to {_MAX_TENSORS}"
            )
        for tensor in self.state_tensors:
            require_str("a tensor of state_tensors", tensor)
        if self.state_tensors and not self.state_bytes:
            raise InvalidArgument(
                f"state_bytes is 0; it must be the bytes of the {len(self.state_tensors)} state_tensors"
            )
        if self.state_bytes and self.shards.num_ranks != 1:
            raise InvalidArgument(f"shards has {self.shards.num_ranks} ranks; a side with states must have 1")

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
        """Return a description with the layer groups and states of a cache's config. fields: the other attributes."""
        return cls(name, incarnation, config.layer_groups, state_bytes=config.state_bytes, **fields)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the whole model."""
        return self.shards.num_kv_heads

    def to_bytes(self) -> bytes:
        """Return the message."""
        groups = [list(group) for group in _group_fields(self.groups)]
        fields = {name: getattr(self, name) for name in (*_IDENTITY, "layer_groups", *_EQUAL)}
        fields |= {"groups": groups, "heads": self.num_kv_heads, "shards": self.shards.ranges}
        fields |= {"state_bytes": self.state_bytes, "state_tensors": self.state_tensors}
        return pack("peer", fields)

    @classmethod
    def from_bytes(cls, message: object) -> PeerInfo:
        """Return the description in a message. Raises `PeerMismatch` for another version, `InvalidArgument`."""
        fields = read("peer", message).fields
        try:
            return cls(
                groups=tuple(_group(*group) for group in fields["groups"]),
                shards=HeadShards(fields["heads"], tuple(fields["shards"])),
                layer_groups=tuple(map(tuple, fields["layer_groups"])),
                # Messages of older versions have no states.
                state_tensors=tuple(fields.get("state_tensors", ())),
                state_bytes=fields.get("state_bytes", 0),
                **{name: fields[name] for name in (*_IDENTITY, *_EQUAL)},
            )
        except (KeyError, TypeError) as error:
            raise InvalidArgument(f"message does not describe a peer: {type(error).__name__}: {error}") from None


def require_compatible(mine: PeerInfo, theirs: PeerInfo) -> None:
    """Raise `PeerMismatch`, with both values, if one side cannot use the other's keys and values. O(layers).

    Block sizes, layouts and shards may differ; `require_same_memory` is stricter.
    """
    for name in ("num_kv_heads", *_EQUAL, "state_bytes", "layer_groups"):
        _require_equal(name, getattr(mine, name), getattr(theirs, name))
    for number, (ours, other) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        _require_equal(f"sliding_window of group {number}", ours.sliding_window, other.sliding_window)
    _require_equal("the number of state_tensors", len(mine.state_tensors), len(theirs.state_tensors))
    for number, tensors in enumerate(zip(mine.state_tensors, theirs.state_tensors, strict=True)):
        _require_equal(f"state_tensors[{number}]", *tensors)


def require_same_memory(mine: PeerInfo, theirs: PeerInfo) -> None:
    """Raise `PeerMismatch` unless blocks can be copied as they are: same layout, block sizes and shards.

    Includes `require_compatible`.
    """
    require_compatible(mine, theirs)
    _require_equal("layout", mine.layout, theirs.layout)
    _require_equal("shards", mine.shards.ranges, theirs.shards.ranges)
    for number, (ours, other) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        _require_equal(f"block_size of group {number}", ours.block_size, other.block_size)


def _require_equal(name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise PeerMismatch(f"{name} is {shown(mine)} here, {shown(theirs)} at the peer; they must be equal")


def require_own_config(cache: KVCacheManager, peer: PeerInfo) -> None:
    """Raise `InvalidArgument` unless `peer` describes this cache."""
    if not isinstance(cache, KVCacheManager):
        raise InvalidArgument(f"cache is {shown(cache)}; it must be a KVCacheManager")
    if not isinstance(peer, PeerInfo):
        raise InvalidArgument(f"peer is {shown(peer)}; it must be a PeerInfo")
    if _group_fields(peer.groups) != _group_fields(cache.config.layer_groups):
        raise InvalidArgument(
            f"peer has groups {shown(peer.groups)}; they must be those of the cache, {cache.config.layer_groups}"
        )
    if peer.state_bytes != cache.config.state_bytes:
        raise InvalidArgument(
            f"peer has state_bytes {peer.state_bytes}; it must be that of the cache, {cache.config.state_bytes}"
        )


def _group(block_size: int, sliding_window: int, name: str) -> LayerGroup:
    return LayerGroup(block_size, sliding_window, name=name)


def _group_fields(groups: tuple[LayerGroup, ...]) -> list[tuple[int, int, str]]:
    return [(group.block_size, group.sliding_window, group.name) for group in groups]
