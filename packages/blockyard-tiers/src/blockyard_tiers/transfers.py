"""Records of an offload: waiting and running requests, what tiers have of their prompts, and transfers under way."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from blockyard.keys import ExtraKey, spans_of

from .header import NameChain
from .uses import TierUse


def may_be_queued(error: BaseException) -> bool:
    """Return whether a tier that raised this may have queued the transfer: it was interrupted, or had no memory."""
    return isinstance(error, MemoryError) or not isinstance(error, Exception)


@dataclass(eq=False, slots=True)
class Segment:
    """Blocks `first` to `stop` of a prompt that one tier has, or the block position of a state that it has.

    The transfers that load a segment run side by side, so their longest time is the segment's.
    """

    use: TierUse
    first: int
    stop: int
    num_running: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False, slots=True)
class OffloadTransfer:
    """A transfer that an offload has given to a tier, and the buffer rows that it uses.

    Attributes:
        names: names of its objects.
        first: of a load, its first block in the prompt; it ends before block `stop`.
        segment: of a load, the segment that it belongs to.
        is_done: whether all objects were transferred; None while it runs.
        is_dropped: whether nothing waits for it any longer, so that its rows are freed when it ends.
    """

    use: TierUse
    names: list[bytes]
    rows: list[int]
    first: int = 0
    stop: int = 0
    segment: Segment | None = None
    is_done: bool | None = None
    is_dropped: bool = False


@dataclass(eq=False, slots=True)
class PrefixLoad:
    """The transfers that load a prefix from block `first` on, for all waiting requests that begin with it.

    Attributes:
        names: names of the prompt's blocks.
        state: of a hybrid model, the transfer of the state after the last block.
        keys: the requests that wait for it.
        offered_at: number of the latest `poll` after which a request could start with it; 0 if none could yet.
    """

    names: list[bytes]
    first: int
    generation: int
    deadline: float
    transfers: list[OffloadTransfer] = field(default_factory=list)
    state: OffloadTransfer | None = None
    keys: set[Hashable] = field(default_factory=set)
    offered_at: int = 0

    @property
    def is_running(self) -> bool:
        return any(transfer.is_done is None for transfer in self.all_transfers())

    def all_transfers(self) -> list[OffloadTransfer]:
        """Return the transfers of blocks, and that of the state."""
        return self.transfers if self.state is None else [*self.transfers, self.state]

    def loaded(self) -> list[OffloadTransfer]:
        """Return the transfers that are done, up to the first that is not."""
        count = next((at for at, each in enumerate(self.transfers) if not each.is_done), len(self.transfers))
        return self.transfers[:count]


@dataclass(slots=True)
class StateSearch:
    """Progress of the search for a prompt's last state up to block `stop`.

    The positions from `stop` down to `at` and the `early_positions` have been searched. `fallback` is the last state
    found at an early position. It is used if the rest of the search finds none after it.
    """

    stop: int
    at: int
    fallback: Segment | None = None


@dataclass(eq=False, slots=True)
class RequestRecord:
    """An offload's record of a request.

    Attributes:
        chain: names of its blocks.
        waiting_since: time of its first lookup, set again when its lookups restart.
        num_found: length of the prefix, in blocks, that the pool and the tiers have together.
        num_chosen: length of the prefix, in blocks, that is loaded or cached.
        cause: why less is loaded than was found.
        rest_cause: why the found prefix ends.
        num_offered: blocks that were offered to the tiers for storing.
        is_settled: whether it has nothing to wait for.
        is_deferred: whether the tiers are searched again only when the request can start.
        is_admitted: whether it has a sequence.
        is_excluded: whether nothing of it is stored, since it was truncated after spans.
        prompt_end: length of the prompt without its last token; states at later positions are of the output.
        state_positions: token counts at which it has states that were not offered yet.
        search: the search for its last state, if it is not complete.
    """

    chain: NameChain
    generation: int
    waiting_since: float
    load: PrefixLoad | None = None
    num_found: int = 0
    num_chosen: int = 0
    cause: str = "late"
    rest_cause: str = "absent"
    num_offered: int = 0
    is_settled: bool = False
    is_deferred: bool = False
    is_admitted: bool = False
    is_excluded: bool = False
    extra_keys: tuple[ExtraKey, ...] = ()
    token_ids: Sequence[int] = ()
    prompt_end: int = 0
    state_positions: list[int] = field(default_factory=list)
    search: StateSearch | None = None

    @property
    def is_waiting(self) -> bool:
        """True while it waits for a lookup or a load."""
        return not (self.is_settled or self.is_deferred) and (self.load is None or self.load.is_running)

    def take_state_positions(self, saved: Iterable[int] = ()) -> list[int]:
        """Return and remove the positions in the prompt whose states can be offered; the output's last one stays.

        Args:
            saved: positions of the states that the current step saves. A later call returns them.
        """
        taken = [position for position in self.state_positions if position <= self.prompt_end]
        output = [position for position in self.state_positions if position > self.prompt_end]
        self.state_positions = output[-1:] + list(saved)
        return taken

    def note_truncation(self, computed: int, token_ids: Sequence[int], stop: int) -> None:
        """Detect that the sequence was truncated and continued differently, so that recomputed blocks are offered.

        Tokens that follow a span may have become text, so a truncated prompt with spans is offered no further.

        Args:
            computed: blocks that were computed before the step.
            token_ids: the sequence's tokens.
            stop: blocks that are computed after the step.
        """
        first, named = min(self.num_offered, computed), min(stop, len(self.chain.names))
        is_same = self.chain.matches(token_ids, first, named) if first < named else True
        if not is_same:
            self.chain.clear()
        if first < self.num_offered or not is_same:
            self.is_excluded = bool(spans_of(self.extra_keys))
        self.num_offered = first
