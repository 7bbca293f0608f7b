"""An offload knows this of a request, of what is loaded for it, and of the jobs that do it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from blockyard.errors import InvariantError
from blockyard.keys import ExtraKey, spans_of

from .header import NameChain
from .uses import TierUse


@dataclass(slots=True)
class Measure:
    """This is what all pieces of a load from one tier take: they run together, so the longest is what they take."""

    num_running: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(eq=False, slots=True)
class Piece:
    """A piece is what one job loads: blocks `first` to `stop` of a prompt. state: whether it is done; None while it
    runs."""

    use: TierUse
    first: int
    stop: int
    measure: Measure
    rows: list[int] = field(default_factory=list)
    state: bool | None = None
    is_dropped: bool = False


@dataclass(eq=False, slots=True)
class Load:
    """A load brings blocks `first` to `stop` of a prompt, for all prompts that begin alike."""

    names: list[bytes]
    first: int
    generation: int
    deadline: float
    pieces: list[Piece] = field(default_factory=list)
    prompts: set[Hashable] = field(default_factory=set)
    #: Of a hybrid model, the state behind all of it.
    kept: Piece | None = None
    #: How many calls of `poll` there were when one of its prompts could last have started with it; 0 for never.
    offered_at: int = 0

    @property
    def is_running(self) -> bool:
        return any(piece.state is None for piece in self.all_pieces())

    def all_pieces(self) -> list[Piece]:
        """Returns those of keys and values, and that of the state."""
        return self.pieces if self.kept is None else [*self.pieces, self.kept]

    def done(self) -> list[Piece]:
        """Returns the pieces that are there, up to the first that is not."""
        count = next((place for place, piece in enumerate(self.pieces) if not piece.state), len(self.pieces))
        return self.pieces[:count]


@dataclass(slots=True)
class StateSearch:
    """How far a prompt's last state was searched for, before block `stop`: down to position `at`, in blocks.

    fallback: the tier of an early state that was found meanwhile, and its position.
    """

    stop: int
    at: int
    fallback: tuple[TierUse, int] | None = None


@dataclass(eq=False, slots=True)
class Prompt:
    """This is known of a request: the names of its blocks, what it waits for, how much of it was offered to the tiers.

    kept: after how many tokens it has states that were not offered yet; behind `last` it is in its output.
    found, chosen: up to which block the tiers have it, and up to which it is loaded. cause: why not all that they have.
    rest: why the tiers have no more. is_over: there is nothing to wait for. needs_turn: tiers are asked again when it
    can start. is_admitted: it has its sequence. is_lost: a cut was seen behind spans. search: for its last state.
    """

    chain: NameChain
    generation: int
    since: float
    load: Load | None = None
    found: int = 0
    chosen: int = 0
    cause: str = "late"
    rest: str = "absent"
    num_saved: int = 0
    is_over: bool = False
    needs_turn: bool = False
    is_admitted: bool = False
    is_lost: bool = False
    extra_keys: tuple[ExtraKey, ...] = ()
    token_ids: Sequence[int] = ()
    last: int = 0
    kept: list[int] = field(default_factory=list)
    search: StateSearch | None = None

    @property
    def is_waiting(self) -> bool:
        """Says whether a place is being asked, or a load runs."""
        return not (self.is_over or self.needs_turn) and (self.load is None or self.load.is_running)

    def take_kept(self, boundaries: Iterable[int] = ()) -> list[int]:
        """Returns after how many tokens of the prompt there are states to offer; of the output the last one stays.

        boundaries: of the states that are saved now, which come next.
        """
        taken = [boundary for boundary in self.kept if boundary <= self.last]
        self.kept = [boundary for boundary in self.kept if boundary > self.last][-1:] + list(boundaries)
        return taken

    def look_for_cut(self, computed: int, token_ids: Sequence[int], stop: int) -> None:
        """Finds a cut behind which the sequence went on differently: what is computed anew is offered anew.

        Behind spans other tokens may be text, so nothing more is offered. computed: blocks that the step began with.
        """
        first, known = min(self.num_saved, computed), min(stop, len(self.chain.names))
        is_same = self.chain.is_of(token_ids, first, known) if first < known else True
        if not is_same:
            self.chain.begin_anew()
        if first < self.num_saved or not is_same:
            self.is_lost = bool(spans_of(self.extra_keys))
        self.num_saved = first


def check_loads(loads: Iterable[Load], prompts: Mapping[Hashable, Prompt]) -> None:
    """Raise `InvariantError` unless loads and prompts know one another."""
    for load in loads:
        if not load.prompts or any(prompts[key].load is not load for key in load.prompts):
            raise InvariantError("offload: a load has no prompt, or one that does not know it")
    for key, prompt in prompts.items():
        if prompt.load is not None and key not in prompt.load.prompts:
            raise InvariantError("offload: a prompt waits for a load that does not know it")
