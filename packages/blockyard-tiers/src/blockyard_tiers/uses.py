"""A use says how an engine uses a tier: what it stores there, and what it knows and has measured of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from blockyard.arguments import require_str, require_unicode, shown
from blockyard.errors import InvalidArgument

from .costs import LinearCost
from .tier import Tier, TierStats

#: What `write` of a tier may be.
WRITE_POLICIES = ("through", "selective", "back", "never")
#: Names of which is remembered, for each tier, that they are there or were seen.
_MOST_KNOWN = 2**18
#: Seconds for which a tier's measured speed is believed.
_FRESH_SECONDS = 60.0


@dataclass(eq=False, slots=True)
class TierUse:
    """This says how a tier is used. write: "through" stores each full block when it is computed, "selective" when it is
    computed or hit for the second time, "back" when the pool evicts it, "never" none: it is only read.

    num_hit_tokens: prompt tokens that it brought. num_skipped: objects that were not stored because no buffer was free
    or it took no job. is_silent: whether it did not answer the last question that was waited for. Raises
    `InvalidArgument` for another policy.
    """

    tier: Tier
    write: str = "through"
    num_hit_tokens: int = 0
    num_skipped: int = 0
    is_silent: bool = False
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict, repr=False)
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict, repr=False)
    cost: LinearCost = field(default_factory=lambda: LinearCost(_FRESH_SECONDS), repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.tier, Tier):
            raise InvalidArgument(f"tier is {shown(self.tier)}; it must have the calls of a Tier")
        require_unicode("tier's name", require_str("tier's name", self.tier.name))
        require_write_policy("write", self.write)

    def wants(self, name: bytes) -> bool:
        """Says whether an object that is computed or hit now is to be stored; notes that it was seen."""
        if name in self.known or self.write in ("back", "never"):
            return False
        if self.write == "through" or name in self.seen:
            return True
        remember(self.seen, [name])
        return False

    def note_presence(self, names: Iterable[bytes], is_present: bool) -> None:
        """Note that the tier has these objects, or that it may have lost them."""
        if is_present:
            remember(self.known, names)
        else:
            for name in names:
                self.known.pop(name, None)


def wanted_by(uses: Iterable[TierUse], names: Sequence[bytes], first: int, stop: int) -> dict[TierUse, set[int]]:
    """Returns which of the blocks `first` to `stop` are stored in which tier, as they are computed or hit now."""
    chosen = {use: {block for block in range(first, stop) if use.wants(names[block])} for use in uses}
    return {use: blocks for use, blocks in chosen.items() if blocks}


@dataclass(frozen=True, slots=True)
class TierReading:
    """This is a tier as it was between two steps: its name, what it did, and what it was good for (`TierUse`)."""

    name: str
    stats: TierStats
    num_hit_tokens: int
    num_skipped: int


@dataclass(frozen=True, slots=True)
class OffloadReading:
    """This is an offload as it was between two steps. missed: prompt tokens that were computed, by cause.
    num_waiting: prompts that wait for a tier. buffer_bytes: host memory for objects on their way; used_bytes of it hold
    some."""

    tiers: tuple[TierReading, ...]
    missed: dict[str, int]
    num_waiting: int
    buffer_bytes: int
    used_bytes: int


def require_write_policy(name: str, value: object) -> str:
    """Return `value` if it is one of `WRITE_POLICIES`. Raises `InvalidArgument`."""
    if value not in WRITE_POLICIES:
        raise InvalidArgument(f"{name} is {shown(value)}; it must be one of {', '.join(WRITE_POLICIES)}")
    return str(value)


def remember(names: OrderedDict[bytes, None], new: Iterable[bytes]) -> None:
    """Adds names, and drops the oldest beyond the most. O(names)."""
    for name in new:
        names[name] = None
    while len(names) > _MOST_KNOWN:
        names.popitem(last=False)
