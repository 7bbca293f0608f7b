"""Steps in flight: the step numbers of `reserve`, `commit` and `end_step`, and their open reservations."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument, SequenceNotReady, StepsInFlight
from ..arrays import zeros_i64
from ..blocks.fence import StepFence
from ..parts import Parts
from ..sequences.open_steps import OpenSteps
from ..sequences.table import NO_TOKEN, SWAPPED_WITHOUT_STATE, SequenceTable
from ..tokens import TokenTable

#: Of a call that names no step.
NO_STEP: Final[i64] = 0
#: Added to an error about a sequence without reserved tokens in a step.
NOT_IN_STEP: Final = (
    ": it was not SCHEDULED in it, it is committed already, or an earlier step computed less than was reserved, which "
    "ended the later reservations"
)


class Steps:
    """One step at a time: `reserve` replaces an open reservation, `commit` ends it, and steps have no numbers.

    This is also the interface of `InFlight`.
    """

    def __init__(self, sequences: SequenceTable) -> None:
        self.sequences = sequences
        #: Whether several steps may be in flight, which have numbers.
        self.are_numbered = False

    # Reserving.

    def starts(self, rows: vec[i64]) -> vec[i64]:  # noqa: ARG002
        """Return by row where a new reservation begins, after all tokens that are computed or in a step in flight.

        O(batch).
        """
        return self.sequences.num_computed

    def is_full(self) -> bool:
        """Return whether a step must end before another can begin."""
        return False

    def require_step(self) -> None:
        """Raise `StepsInFlight` if no further step may begin."""

    def begin(self, rows: vec[i64], counts: vec[i64], slow: vec[i64], num_slow: i64) -> i64:  # noqa: ARG002
        """Begin a step, and reserve for all sequences except those at positions `slow[::2]`. Return its number.

        Each of those is passed to `open` or `refuse` afterwards.
        """
        num_reserved = self.sequences.num_reserved
        for index in range(i64(len(rows))):
            num_reserved[rows[index]] = counts[index]
        return NO_STEP

    def open(self, row: i64, count: i64) -> None:
        """Reserve `count` tokens of a sequence in the latest step."""

    def refuse(self, row: i64) -> None:
        """Reserve nothing for a sequence in the latest step."""
        self.sequences.num_reserved[row] = 0

    def num_landed(self) -> i64:
        """Return the latest step that has ended; 0 if steps have no numbers."""
        return 0

    def num_reached(self, row: i64) -> i64:
        """Return how many tokens of a sequence are computed once the latest step has run."""
        computed = self.sequences.num_computed[row]
        if self.sequences.reserved_at[row] == self.sequences.version:
            computed += self.sequences.num_reserved[row]
        return computed

    # Committing.

    def check_commit(self, rows: vec[i64], counts: vec[i64], table: TokenTable, step: i64) -> None:
        """Raise an error if a sequence has no reservation in `step`, or an earlier one that is not committed.

        O(batch * open reservations). Changes nothing.
        """

    def settle(self, rows: vec[i64], counts: vec[i64], step: i64) -> None:
        """End the reservations of these sequences in `step`, which computed `counts` tokens of each."""


class InFlight(Steps):
    """Numbers the steps, and stores the open reservations of each sequence.

    A new reservation follows the open ones. `commit` settles one step of each sequence, the oldest first. If the step
    computed less than was reserved, the later reservations of that sequence end, because their tokens would follow
    tokens that do not exist.
    """

    def __init__(self, parts: Parts, fence: StepFence, open_steps: OpenSteps) -> None:
        super().__init__(parts.sequences)
        self.are_numbered = True
        self.kv_pool = parts.kv_pool
        self.fence = fence
        self.open_steps = open_steps
        #: Where the next reservation of a row begins, for the rows of a batch.
        self._starts = zeros_i64(int(parts.sequences.max_num_seqs))

    # Reserving.

    def starts(self, rows: vec[i64]) -> vec[i64]:
        starts = self._starts
        num_computed = self.sequences.num_computed
        num_ahead = self.sequences.num_ahead
        for index in range(i64(len(rows))):
            row = rows[index]
            starts[row] = num_computed[row] + num_ahead[row]
        return starts

    def is_full(self) -> bool:
        return self.fence.num_in_flight() >= self.fence.max_steps

    def require_step(self) -> None:
        fence = self.fence
        if self.is_full():
            raise StepsInFlight(
                f"reserve: {fence.num_in_flight()} steps are in flight, {fence.num_ended + 1} to {fence.num_begun}; "
                f"max_steps_in_flight is {fence.max_steps}: end step {fence.num_ended + 1} first"
            )

    def begin(self, rows: vec[i64], counts: vec[i64], slow: vec[i64], num_slow: i64) -> i64:
        self.fence.num_begun += 1
        position: i64 = 0
        for index in range(i64(len(rows))):
            if position < num_slow and slow[2 * position] == index:
                position += 1
            else:
                self.open(rows[index], counts[index])
        return self.fence.num_begun

    def open(self, row: i64, count: i64) -> None:
        if count == 0:
            return
        step = self.fence.num_begun
        sequences = self.sequences
        if self.open_steps.num_open[row] == 0:
            sequences.num_reserved[row] = count
        self.open_steps.push(row, step, count)
        self.fence.last_step[row] = step
        sequences.num_ahead[row] += count

    def refuse(self, row: i64) -> None:
        """Do nothing: earlier reservations of the sequence stay."""

    def num_landed(self) -> i64:
        return self.fence.num_ended

    def num_reached(self, row: i64) -> i64:
        """Return the tokens computed once the latest step has run, without that step if an earlier one is open."""
        computed = self.sequences.num_computed[row]
        if self.open_steps.oldest[row] != self.fence.num_begun:
            return computed
        return computed + self.open_steps.oldest_count(row)

    # Committing.

    def check_commit(self, rows: vec[i64], counts: vec[i64], table: TokenTable, step: i64) -> None:
        oldest = self.open_steps.oldest
        for index in range(i64(len(rows))):
            row = rows[index]
            if step != NO_STEP and oldest[row] == step:
                continue
            if step != NO_STEP and self.open_steps.has(row, step):
                raise SequenceNotReady(
                    f"commit: step {oldest[row]} of {self.sequences.name(row)} comes before step {step} and is not "
                    f"committed"
                )
            self._check_outside(index, row, counts[index], table, step)

    def _check_outside(self, index: i64, row: i64, count: i64, table: TokenTable, step: i64) -> None:
        """Refuse computed tokens of a sequence without a reservation in the step.

        Tokens may be appended only if the sequence has no open reservation at all.
        """
        name = self.sequences.name(row)
        if count != 0:
            why = ended_with_owner(self.sequences, row) if step == self.sequences.ended_at[row] else ""
            raise InvalidArgument(
                f"num_computed[{index}] is {count} for {name}, which has no reservation in step {step}"
                f"{why or NOT_IN_STEP}"
            )
        if self.open_steps.num_open[row] == 0:
            return
        if step == NO_STEP or (table.columns > 0 and table.items[index * table.columns] != NO_TOKEN):
            what = "append" if step == NO_STEP else f"next_tokens[{index}]"
            raise SequenceNotReady(
                f"{what}: {name} has reserved tokens in step {self.open_steps.oldest[row]}; commit that step first"
            )

    def settle(self, rows: vec[i64], counts: vec[i64], step: i64) -> None:
        sequences = self.sequences
        open_steps = self.open_steps
        for index in range(i64(len(rows))):
            row = rows[index]
            if step != NO_STEP and open_steps.oldest[row] == step:
                reserved = open_steps.oldest_count(row)
                open_steps.pop(row)
                sequences.num_ahead[row] -= reserved
                if counts[index] < reserved:
                    sequences.end_reservations(row)
            # `commit` itself knows one reservation, and has ended it.
            if open_steps.num_open[row] > 0:
                sequences.num_reserved[row] = open_steps.oldest_count(row)

    # Ending.

    def end(self, step: i64) -> None:
        """End the steps up to `step`, which is in flight: release the blocks that wait for them."""
        for other in range(self.fence.num_ended + 1, step + 1):
            if self.open_steps.num_of_step(other) > 0:
                raise SequenceNotReady(
                    f"end_step: {self.open_steps.num_of_step(other)} reservations of step {other} are not committed; "
                    f"commit them, with num_computed=0 if the step failed, or free their sequences"
                )
        self.kv_pool.end_steps(step)


def steps_of(parts: Parts) -> Steps:
    """Return the object that numbers the steps, if several may be in flight."""
    fence = parts.kv_pool.fence
    open_steps = parts.sequences.open_steps
    if isinstance(fence, StepFence) and open_steps is not None:
        return InFlight(parts, fence, open_steps)
    return Steps(parts.sequences)


def ended_with_owner(sequences: SequenceTable, row: i64) -> str:
    """Return a clause for errors if a row's reservation ended because its producer was freed; "" if not."""
    if sequences.ended_by[row] == 0:
        return ""
    return (
        f"; its reservation of {sequences.ended_count[row]} tokens ended when sequence {sequences.ended_by[row]}, "
        f"whose prefix it joined, was freed: reserve it again"
    )


def require_nothing_reserved(sequences: SequenceTable, row: i64, action: str) -> None:
    """Raise `SequenceNotReady` while tokens are reserved."""
    if sequences.num_reserved[row] > 0:
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} has {sequences.num_reserved[row]} reserved tokens; commit them first"
        )


def require_nothing_to_copy(sequences: SequenceTable, row: i64, action: str) -> None:
    """Raise `SequenceNotReady` while the sequence's next step has to copy the beginning of a block."""
    if sequences.copy_from[row]:
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} must first copy the beginning of a block: let it run its next step"
        )
    if sequences.is_swapped[row] == SWAPPED_WITHOUT_STATE:
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} was swapped out before its first step has loaded the state that it hit; "
            f"swap it in first, and let it run a step"
        )


def require_settled(parts: Parts, row: i64, action: str) -> None:
    """Raise `SequenceNotReady` for a row with reserved tokens, pending copies or loads, or an uncomputed prefix."""
    sequences = parts.sequences
    require_nothing_reserved(sequences, row, action)
    num_loads = parts.store.num_loads(row) if sequences.is_swapped[row] == 0 else i64(0)
    if num_loads > 0:
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} has {num_loads} blocks to load from the CPU pool: let it run its next "
            "step first"
        )
    require_nothing_to_copy(sequences, row, action)
    promised = sequences.num_published[row] * parts.block_size
    if promised > sequences.num_computed[row] or sequences.is_waiting(row):
        raise SequenceNotReady(
            f"{action}: {sequences.name(row)} has computed {sequences.num_computed[row]} tokens; compute "
            f"{max(promised, sequences.num_computed[row] + 1)} first"
        )
