"""How an engine uses a tier: which blocks it stores there, which objects are known to be there, and how fast it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from blockyard.arguments import require_str, require_unicode, shown
from blockyard.errors import InvalidArgument

from .costs import LinearCost
from .tier import Tier, TierStats

#: Values of a tier's `write`.
WRITE_POLICIES = ("through", "selective", "back", "never")
#: Names remembered for each tier, as present and as seen.
_MAX_NAMES = 2**18
#: Seconds after which a tier's measured speed is discarded.
_MEASURED_SECONDS = 60.0


@dataclass(eq=False, slots=True)
class TierUse:
    """How an engine uses a tier.

    Args:
        tier: the tier.
        write: which full blocks are stored: "through" each one when it is computed, "selective" when it is computed or
            hit for the second time, "back" when the pool evicts it, "never" none.

    Attributes:
        num_hit_tokens: prompt tokens that were loaded from it.
        num_skipped: objects that were not stored because no buffer was free or the tier refused the transfer.
        is_silent: whether it did not answer the last lookup in time.

    Raises:
        InvalidArgument: `write` is another policy, or `tier` is not a tier.
    """

    tier: Tier
    write: str = "through"
    num_hit_tokens: int = 0
    num_skipped: int = 0
    is_silent: bool = False
    present: OrderedDict[bytes, None] = field(default_factory=OrderedDict, repr=False)
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict, repr=False)
    cost: LinearCost = field(default_factory=lambda: LinearCost(_MEASURED_SECONDS), repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.tier, Tier):
            raise InvalidArgument(f"tier is {shown(self.tier)}; it must implement Tier")
        require_unicode("tier's name", require_str("tier's name", self.tier.name))
        require_write_policy("write", self.write)

    def wants(self, name: bytes) -> bool:
        """Record that an object was computed or hit, and return whether to store it now."""
        if name in self.present or self.write in ("back", "never"):
            return False
        if self.write == "through" or name in self.seen:
            return True
        remember(self.seen, [name])
        return False

    def note_presence(self, names: Iterable[bytes], is_present: bool) -> None:
        """Note that the tier has these objects, or that they may be gone."""
        if is_present:
            remember(self.present, names)
        else:
            for name in names:
                self.present.pop(name, None)


def choose_blocks(uses: Iterable[TierUse], names: Sequence[bytes], first: int, stop: int) -> dict[TierUse, set[int]]:
    """Return, by tier, which of the blocks `first` to `stop` to store now that they are computed or hit."""
    chosen = {use: {block for block in range(first, stop) if use.wants(names[block])} for use in uses}
    return {use: blocks for use, blocks in chosen.items() if blocks}


@dataclass(frozen=True, slots=True)
class TierReading:
    """Statistics of a tier between two steps; see `TierUse` for the counters."""

    name: str
    stats: TierStats
    num_hit_tokens: int
    num_skipped: int


@dataclass(frozen=True, slots=True)
class OffloadReading:
    """Statistics of an offload between two steps.

    Attributes:
        missed_tokens: prompt tokens that were computed instead of loaded, by cause.
        num_waiting: requests that wait for a tier.
        buffer_bytes: host memory of the transfer buffers.
        used_bytes: the part of it that holds objects.
    """

    tiers: tuple[TierReading, ...]
    missed_tokens: dict[str, int]
    num_waiting: int
    buffer_bytes: int
    used_bytes: int


def require_write_policy(name: str, value: object) -> str:
    """Return `value` if it is one of `WRITE_POLICIES`. Raises `InvalidArgument`."""
    if value not in WRITE_POLICIES:
        raise InvalidArgument(f"{name} is {shown(value)}; it must be one of {', '.join(WRITE_POLICIES)}")
    return str(value)


def remember(names: OrderedDict[bytes, None], new: Iterable[bytes]) -> None:
    """Add names, and drop the oldest beyond the limit. O(names)."""
    for name in new:
        names[name] = None
    while len(names) > _MAX_NAMES:
        names.popitem(last=False)
