"""The running sequences: a row of block ids and some counters for each."""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from ...arguments import shown
from ...errors import InvalidArgument, OutOfRows, UnknownSequence
from ...ids import NO_ROW, ROW_SPAN
from ..arrays import filled_i64, zeros_i64
from ..tokens import ARRAY, int64_items, plain_int
from .block_table import BlockTable
from .open_steps import OpenSteps

#: Serials are drawn from ranges of this size, so that concurrent managers rarely need a new one.
SHARE_BITS: Final = 16
SHARE_SPAN: Final[i64] = 65536


class Shares:
    """Gives ranges of serials to the managers of this process."""

    def __init__(self) -> None:
        self.last: i64 = 0

    def draw(self) -> i64:
        """Return the number of a range that is not used yet."""
        self.last += 1
        return self.last


_SHARES: Final = Shares()


class Serials:
    """The serials of one manager, ascending. A process has 2**42: enough for a century at a thousand per second."""

    def __init__(self) -> None:
        self._shares: dict[int, bool] = {}
        self._last: i64 = 0
        #: End of the current range.
        self._end: i64 = 0

    def draw(self) -> i64:
        """Return the next serial. O(1)."""
        if self._last + 1 >= self._end:
            self._draw_share()
        self._last += 1
        return self._last

    def prepare(self, count: i64) -> None:
        """Make sure that drawing the next `count` serials allocates nothing."""
        if self._last + count >= self._end and count < SHARE_SPAN:
            self._draw_share()

    def _draw_share(self) -> None:
        share = _SHARES.draw()
        self._shares[int(share)] = True
        self._last = share * SHARE_SPAN - 1
        self._end = share * SHARE_SPAN + SHARE_SPAN

    def has_given(self, serial: i64) -> bool:
        """Return whether this manager drew `serial`."""
        return int(serial >> SHARE_BITS) in self._shares and serial <= self._last

    def was_drawn_from(self, serial: i64) -> bool:
        """Return whether some manager of this process has the range of `serial`."""
        return SHARE_SPAN <= serial < (_SHARES.last + 1) * SHARE_SPAN


ROW_BITS: Final = 20
ROW_MASK: Final[i64] = 1048575
#: Handles have 62 bits.
MAX_HANDLE: Final = 2**62 - 1
#: The next reservation of a sequence needs the slow path: it waits for another's blocks, its last block may be shared,
#: or its last token has no block yet.
QUIET: Final[i64] = 0
ALERT: Final[i64] = 1
#: No token is waiting for a block.
NO_TOKEN: Final[i64] = -1
#: The blocks of a sequence are in the CPU pool, with its state or without the one that its first step was to load.
SWAPPED: Final[i64] = 1
SWAPPED_WITHOUT_STATE: Final[i64] = 2
#: Where the tag of a session stands: a sequence that is taken back has used nothing.
UNDONE: Final[i64] = -1


class SequenceTable(BlockTable):
    """A block table with the other columns of each running sequence.

    A handle is serial * 2**20 + row. Serials are unique in a process, so comparing one number tells a live handle from
    a stale, foreign or invented one. Free rows are a stack.

    The life of a row, which can be freed in any state:

        free row ── allocate, fork ──▶ settled ── reserve ──▶ reserved (num_reserved > 0)
            ▲                          │ ▲ │                     │
            │                          │ │ └ swap_out ▶ swapped  │
            │                          │ └── swap_in ──┘         │
            │                          │ ▲                       │
            └────────── free ──────────┘ └─────── commit ────────┘

        waiting        waits_on has a row: another sequence is still computing blocks that this one hit
        pending token  pending_token is a token: the next reserve allocates its block
        copy_from      the hit ended inside a block, or at a state: the next reserve copies its beginning, or loads it

    This class opens and closes rows (and has `raise_alert`, for other files). Each column is only assigned in these
    files (a test reads this list):

    alert          open and close, reserve
    copy_from      checkpoint_hits, hits, open and close, reserve, swap, working_states
    ended_at       open and close
    ended_by       open and close
    ended_count    open and close
    generation     allocate, fork
    handle         open and close
    holders        open and close
    is_swapped     fork, open and close, swap
    num_ahead      in_flight, open and close
    num_computed   allocate, commit, fork, hits, joins, swap, truncate
    num_promised   open and close
    num_published  allocate, commit, fork, truncate
    num_reserved   commit, in_flight, open and close
    num_tokens     allocate, commit, fork, truncate
    num_waiters    joins
    pending_token  allocate, commit, fork, reserve, truncate
    ready          grouped, joins, open and close, plain, state_group
    reserved_at    reserve
    root           allocate, fork
    session        allocate, fork, hints, open and close
    spans          allocate, fork, open and close, truncate
    uncounted      open and close
    waits_for      joins
    waits_from     joins
    waits_on       joins, open and close
    """

    def __init__(self, max_num_seqs: int, width: int, block_size: int) -> None:
        super().__init__(max_num_seqs, width, block_size)
        self.handle = zeros_i64(max_num_seqs)
        self.num_tokens = zeros_i64(max_num_seqs)
        self.num_computed = zeros_i64(max_num_seqs)
        #: Leading blocks of the row that this sequence has indexed or hit.
        self.num_published = zeros_i64(max_num_seqs)
        #: Tokens of its oldest open reservation.
        self.num_reserved = zeros_i64(max_num_seqs)
        #: Of a row whose reservation ended because another sequence was freed: that sequence, 0 for none; the tokens
        #: that were reserved, and in which step. No row has a later one: until the step is committed, it would wait for
        #: the prefix. And how many such rows there are.
        self.ended_by = zeros_i64(max_num_seqs)
        self.ended_count = zeros_i64(max_num_seqs)
        self.ended_at = zeros_i64(max_num_seqs)
        self.num_ended: i64 = 0
        #: Where several steps may be in flight: the open reservations of each row, and the tokens of all of them. Where
        #: not, a new reservation replaces an open one, and nothing is ahead.
        self.open_steps: OpenSteps | None = None
        self.num_ahead = zeros_i64(max_num_seqs)
        #: The version in which the reservation was made: an abandoned one is not of this step.
        self.reserved_at = zeros_i64(max_num_seqs)
        #: The last token if no block has room for it.
        self.pending_token = zeros_i64(max_num_seqs)
        self.root = zeros_i64(max_num_seqs)
        #: The generation of the index in which the sequence began. In a later one its blocks are not indexed.
        self.generation = zeros_i64(max_num_seqs)
        #: The row that is computing blocks this sequence hit, and the tokens it must compute for that.
        self.waits_on = zeros_i64(max_num_seqs)
        self.waits_for = zeros_i64(max_num_seqs)
        #: Tokens before the first block it waits for.
        self.waits_from = zeros_i64(max_num_seqs)
        self.num_waiters = zeros_i64(max_num_seqs)
        self.alert = zeros_i64(max_num_seqs)
        #: Tokens that can get slots on the fast path, because its blocks hold them; 0 if unknown.
        self.ready = zeros_i64(max_num_seqs)
        #: `SWAPPED` or `SWAPPED_WITHOUT_STATE` while its blocks are in the CPU pool, else 0.
        self.is_swapped = zeros_i64(max_num_seqs)
        #: Spans of its prompt by block (`Prompt.spans`).
        self._no_spans: dict[int, tuple[object, ...]] = {}
        self.spans: list[dict[int, tuple[object, ...]]] = [self._no_spans] * max_num_seqs
        #: Blocks, one for each layer group, whose first tokens the next step copies: a hit that ended inside a block.
        self._no_sources: list[int] = []
        self.copy_from: list[list[int]] = [self._no_sources] * max_num_seqs
        self.holders: list[str] = [""] * max_num_seqs
        #: The tag of its session (`policies/sessions`); 0 for none.
        self.session = zeros_i64(max_num_seqs)
        #: Prompt tokens until they are counted (`PromptCounts`), negative for a resumed request; else 0.
        self.uncounted = zeros_i64(max_num_seqs)
        #: How many prompts are to be counted.
        self.num_uncounted: i64 = 0
        self._free_rows = zeros_i64(max_num_seqs)
        for index in range(i64(max_num_seqs)):
            self._free_rows[index] = i64(max_num_seqs) - 1 - index
        self.num_free_rows: i64 = max_num_seqs
        #: Rows reserved for the forks of a sequence group, by the row of its first sequence, and in all.
        self.num_promised = zeros_i64(max_num_seqs)
        self.num_set_aside: i64 = 0
        self._serials = Serials()
        self._mark = zeros_i64(max_num_seqs)
        self._last_mark: i64 = 0
        #: Number of rows opened and closed; the last batch of handles, its rows, and the number at that time.
        self._epoch: i64 = 0
        self._batch_epoch: i64 = -1
        self._batch_handles = zeros_i64(0)
        self._batch_rows = zeros_i64(0)
        #: Whether the call that runs has made a plan.
        self.has_new_plan = False

    def open(self, holder: str) -> i64:
        """Allocate a free row, which must exist."""
        self.num_free_rows -= 1
        row = self._free_rows[self.num_free_rows]
        self.handle[row] = self._serials.draw() * ROW_SPAN + row
        self.holders[row] = holder
        self.session[row] = 0
        self.waits_on[row] = NO_ROW
        self.alert[row] = QUIET
        self.ready[row] = 0
        self.is_swapped[row] = 0
        self._epoch += 1
        return row

    def close(self, row: i64) -> None:
        """Free a row and clear its block ids, so that the padding of the table stays zero."""
        self.cut_row(row, 0)
        self.promise(row, 0)
        self.handle[row] = 0
        self.end_reservations(row)
        self.forget_end(row)
        self.set_uncounted(row, 0)
        self._epoch += 1
        self.holders[row] = ""
        # No object is allocated, so that rows can be closed if memory is short.
        self.spans[row] = self._no_spans
        self.copy_from[row] = self._no_sources
        self._free_rows[self.num_free_rows] = row
        self.num_free_rows += 1

    def end_reservations(self, row: i64) -> None:
        """End all reservations of a row."""
        self.num_reserved[row] = 0
        if self.open_steps is not None:
            self.open_steps.clear(row)
            self.num_ahead[row] = 0

    def end_with(self, row: i64, handle: i64) -> None:
        """End the reservation of a row because its producer `handle` is freed, and record that for `commit`."""
        if self.num_reserved[row] == 0:
            return
        if self.ended_by[row] == 0:
            self.num_ended += 1
        self.ended_by[row] = handle
        self.ended_count[row] = self.num_reserved[row]
        if self.open_steps is not None:
            self.ended_at[row] = self.open_steps.oldest[row]
        self.end_reservations(row)

    def forget_end(self, row: i64) -> None:
        """Forget the reservation that `end_with` ended."""
        if self.ended_by[row] != 0:
            self.ended_by[row] = 0
            self.num_ended -= 1

    def set_uncounted(self, row: i64, num_tokens: i64) -> None:
        """Set the prompt tokens of a row that are not counted yet: 0 for none, negative for a resumed request."""
        if self.uncounted[row] != 0:
            self.num_uncounted -= 1
        if num_tokens != 0:
            self.num_uncounted += 1
        self.uncounted[row] = num_tokens

    def num_open_rows(self) -> i64:
        """Return the number of free rows that are not reserved for forks."""
        return self.num_free_rows - self.num_set_aside

    def raise_alert(self, row: i64) -> None:
        """Make the next reservation of a sequence take the slow path."""
        self.alert[row] = ALERT
        self.ready[row] = 0

    def require_rows(self, count: i64) -> None:
        """Raise `OutOfRows` if fewer than `count` rows are available. If it does not, opening them cannot fail."""
        if count > self.num_open_rows():
            raise OutOfRows(
                f"{count} rows are needed, {self.num_open_rows()} are free: "
                f"max_num_seqs is {self.max_num_seqs} sequences at once"
            )
        self._serials.prepare(count)

    def promise(self, row: i64, count: i64) -> None:
        """Reserve `count` rows for forks of `row`, in place of an earlier reservation."""
        self.num_set_aside += count - self.num_promised[row]
        self.num_promised[row] = count

    def row_of(self, handle: object) -> i64:
        """Return the row of a live handle. Raises `UnknownSequence`, or `InvalidArgument` for another type."""
        return self.live_row(read_handle(handle))

    def live_row(self, handle: i64) -> i64:
        """Return the row of a handle that is a plain integer already. Raises `UnknownSequence`."""
        row = handle & ROW_MASK
        if handle <= 0 or row >= self.max_num_seqs or self.handle[row] != handle:
            self._refuse(handle)
        return row

    def is_live(self, handle: i64) -> bool:
        """Return whether a handle that was live before is live now."""
        return self.handle[handle & ROW_MASK] == handle

    def rows_of(self, given: vec[i64]) -> vec[i64]:
        """Return the rows of live, distinct handles. They are valid until foreign code runs."""
        if not self._is_latest(given):
            self._batch_epoch = -1
            self._batch_rows = self._translate(given)
            self._batch_handles = given
            self._batch_epoch = self._epoch
        return self._batch_rows

    def _is_latest(self, given: vec[i64]) -> bool:
        """Return whether the last call had the same handles and no row has changed since, as in an engine's steps."""
        latest = self._batch_handles
        if self._batch_epoch != self._epoch or len(given) != len(latest):
            return False
        difference: i64 = 0
        for index in range(i64(len(given))):
            difference |= given[index] ^ latest[index]
        return difference == 0

    def _translate(self, given: vec[i64]) -> vec[i64]:
        rows = given[:]
        live = self.handle
        marks = self._mark
        limit = self.max_num_seqs
        self._last_mark += 1
        mark = self._last_mark
        for index in range(i64(len(rows))):
            handle = rows[index]
            row = handle & ROW_MASK
            if handle <= 0 or row >= limit or live[row] != handle:
                self._refuse(handle)
            if marks[row] == mark:
                raise InvalidArgument(f"seqs[{index}] is {handle}, which appears twice in seqs")
            marks[row] = mark
            rows[index] = row
        return rows

    def in_batch(self, row: i64) -> bool:
        """Return whether `row` was in the last `rows_of`."""
        return self._mark[row] == self._last_mark

    def _refuse(self, handle: i64) -> None:
        row = handle & ROW_MASK
        if handle <= 0 or not self._serials.was_drawn_from(handle >> ROW_BITS):
            raise UnknownSequence(f"sequence {handle} was never allocated here")
        if row >= self.max_num_seqs or not self._serials.has_given(handle >> ROW_BITS):
            raise UnknownSequence(f"sequence {handle} is a handle of another manager")
        raise UnknownSequence(
            f"sequence {handle} (row {row}) has finished: it was freed already; row {row} is now {self._tenant(row)}"
        )

    def _tenant(self, row: i64) -> str:
        if self.handle[row] == 0:
            return "empty"
        return f"held by sequence {self.handle[row]} {self.holders[row]!r}"

    def name(self, row: i64) -> str:
        """Return the name of the sequence in `row`, for errors and reports."""
        holder = self.holders[row]
        return f"sequence {self.handle[row]} {holder!r}" if holder else f"sequence {self.handle[row]}"

    def num_live_rows(self) -> i64:
        """Return the number of running sequences."""
        return self.max_num_seqs - self.num_free_rows

    def live_rows(self) -> list[int]:
        """Return the rows in use, ascending. O(max_num_seqs)."""
        return [row for row in range(int(self.max_num_seqs)) if self.handle[i64(row)] != 0]

    def is_waiting(self, row: i64) -> bool:
        """Return whether another sequence is still computing blocks that this one hit."""
        owner = self.waits_on[row]
        return owner != NO_ROW and self.num_computed[owner] < self.waits_for[row]


def read_handle(handle: object) -> i64:
    """Return a caller's handle as a number. Bools are rejected first, because mypyc would take them for ints."""
    if isinstance(handle, bool):
        _refuse_bool(handle)
    if not isinstance(handle, int):
        return int64_items("seq", [handle])[0]
    number: int = handle
    if number < 0 or number >= MAX_HANDLE:
        raise UnknownSequence(f"sequence {shown(handle)} was never allocated here")
    return number


def read_handles(handles: object) -> vec[i64]:
    """Return one or many handles as integers (B,)."""
    if type(handles) is not ARRAY:
        if isinstance(handles, bool):
            _refuse_bool(handles)
        if isinstance(handles, (int, np.integer)):
            return filled_i64(read_handle(plain_int("seq", handles)), 1)
    return int64_items("seqs", handles)


def is_batch(seqs: object) -> bool:
    """Return whether a caller passes several handles (a list or an array) instead of one."""
    if isinstance(seqs, (list, tuple)):
        return True
    if isinstance(seqs, (int, np.integer, str, bytes)):
        return False
    try:
        # An array or a tensor without dimensions is one number, and has a length all the same.
        return hasattr(seqs, "__len__") and getattr(seqs, "ndim", 1) != 0
    except Exception:
        return True


def _refuse_bool(handle: object) -> None:
    raise InvalidArgument(f"seq is {handle}; pass the integer that allocate returned")
