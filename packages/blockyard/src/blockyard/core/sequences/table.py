"""The running sequences: a row of block ids and a few counters for each."""

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

#: Serials are drawn from shares of this many, so that managers that run side by side seldom ask for one.
SHARE_BITS: Final = 16
SHARE_SPAN: Final[i64] = 65536


class Shares:
    """Which shares were given out in this process, to whichever manager."""

    def __init__(self) -> None:
        self.last: i64 = 0

    def draw(self) -> i64:
        """Return a share that no manager has."""
        self.last += 1
        return self.last


_SHARES: Final = Shares()


class Serials:
    """The serials of one manager, ascending. 2**42 in a process: more than a century at a thousand a second."""

    def __init__(self) -> None:
        self._shares: dict[int, bool] = {}
        self._last: i64 = 0
        #: The first serial that the next share has to be drawn for.
        self._end: i64 = 0

    def draw(self) -> i64:
        """Return the next serial. O(1)."""
        if self._last + 1 >= self._end:
            self._draw_share()
        self._last += 1
        return self._last

    def prepare(self, count: i64) -> None:
        """Let the next `count` serials be drawn without asking for memory in the middle of a change."""
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
        """Return whether some manager of this process has the share that `serial` is of."""
        return SHARE_SPAN <= serial < (_SHARES.last + 1) * SHARE_SPAN


ROW_BITS: Final = 20
ROW_MASK: Final[i64] = 1048575
#: Handles have 62 bits.
MAX_HANDLE: Final = 2**62 - 1
#: A sequence needs a second look before its next reservation: it waits on another's blocks, its last block may
#: be shared, or its last token has no block yet.
QUIET: Final[i64] = 0
ALERT: Final[i64] = 1
#: No token is waiting for a block.
NO_TOKEN: Final[i64] = -1
#: Where the blocks of a sequence are: in the CPU pool, or so but for the state that its first step was to load.
SWAPPED: Final[i64] = 1
SWAPPED_WITHOUT_STATE: Final[i64] = 2
#: Where the tag of a session stands: a sequence that is taken back has used nothing.
UNDONE: Final[i64] = -1


class SequenceTable(BlockTable):
    """A block table, and what else is known of the sequence in each row.

    A handle is serial * 2**20 + row, and a serial is used once in a process, by one manager: comparing one number tells
    a live handle from a stale, a foreign or an invented one. Free rows are a stack.

    The life of a row. While it waits, is swapped out, or has a source to copy, it can be freed as ever:

        free row ── allocate, fork ──▶ settled ── reserve ──▶ reserved (num_reserved > 0)
            ▲                          │ ▲ │                     │
            │                          │ │ └ swap_out ▶ swapped  │
            │                          │ └── swap_in ──┘         │
            │                          │ ▲                       │
            └────────── free ──────────┘ └─────── commit ────────┘

        waiting        waits_on has a row: blocks that it hit are still to be computed by another sequence
        pending token  pending_token is a token: the next reserve gives it its block
        copy_from      the hit ended inside a block, or at a state: the next reserve copies its beginning, or loads it

    This class gives rows out and takes them back (and `raise_alert`, for other files); each column is assigned in these
    files alone (a test reads this):

    alert          open and close, reserve
    copy_from      hits, open and close, reserve, state_group, swap
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
    num_reserved   commit, in_flight, open and close, reserve
    num_tokens     allocate, commit, fork, truncate
    num_waiters    joins
    pending_token  allocate, commit, fork, reserve, truncate
    ready          base, grouped, joins, open and close, state_group
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
        #: Leading blocks of the row that this sequence has put into the index, or hit there.
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
        #: The last token, while no block has room for it.
        self.pending_token = zeros_i64(max_num_seqs)
        self.root = zeros_i64(max_num_seqs)
        #: The generation of the index in which the sequence began; in a later one it publishes nothing.
        self.generation = zeros_i64(max_num_seqs)
        #: The row that has yet to compute blocks this sequence hit, and the tokens it must have computed by then.
        self.waits_on = zeros_i64(max_num_seqs)
        self.waits_for = zeros_i64(max_num_seqs)
        #: Tokens before the first block it waits for.
        self.waits_from = zeros_i64(max_num_seqs)
        self.num_waiters = zeros_i64(max_num_seqs)
        self.alert = zeros_i64(max_num_seqs)
        #: How many tokens may have slots without a second look: those its blocks hold; 0 where that is not known.
        self.ready = zeros_i64(max_num_seqs)
        #: `SWAPPED` or `SWAPPED_WITHOUT_STATE` while its blocks are in the CPU pool, else 0.
        self.is_swapped = zeros_i64(max_num_seqs)
        #: What stands at spans of its prompt, by block (`Prompt.spans`).
        self._no_spans: dict[int, tuple[object, ...]] = {}
        self.spans: list[dict[int, tuple[object, ...]]] = [self._no_spans] * max_num_seqs
        #: Blocks, one for each layer group, whose first tokens the next step copies: a hit that ended inside a block.
        self._no_sources: list[int] = []
        self.copy_from: list[list[int]] = [self._no_sources] * max_num_seqs
        self.holders: list[str] = [""] * max_num_seqs
        #: The tag of its session (`policies/sessions`); 0 for none.
        self.session = zeros_i64(max_num_seqs)
        #: Tokens of its prompt until they are counted (`PromptCounts`), below 0 if the request ran before; else 0.
        self.uncounted = zeros_i64(max_num_seqs)
        #: How many prompts are to be counted.
        self.num_uncounted: i64 = 0
        self._free_rows = zeros_i64(max_num_seqs)
        for index in range(i64(max_num_seqs)):
            self._free_rows[index] = i64(max_num_seqs) - 1 - index
        self.num_free_rows: i64 = max_num_seqs
        #: Rows set aside for the forks of a sequence group, by the row of its first sequence, and in all.
        self.num_promised = zeros_i64(max_num_seqs)
        self.num_set_aside: i64 = 0
        self._serials = Serials()
        self._mark = zeros_i64(max_num_seqs)
        self._last_mark: i64 = 0
        #: Counts rows given out and taken back; the latest batch of handles, its rows, and when that was.
        self._epoch: i64 = 0
        self._batch_epoch: i64 = -1
        self._batch_handles = zeros_i64(0)
        self._batch_rows = zeros_i64(0)
        #: Whether the call that runs has made a plan.
        self.has_new_plan = False

    def open(self, holder: str) -> i64:
        """Give out a free row, which must be there."""
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
        """Take a row back and clear its block ids, so that the padding of a table stays zero."""
        self.cut_row(row, 0)
        self.promise(row, 0)
        self.handle[row] = 0
        self.end_reservations(row)
        self.forget_end(row)
        self.set_uncounted(row, 0)
        self._epoch += 1
        self.holders[row] = ""
        # No object is made: where memory lacks, rows are closed all the same.
        self.spans[row] = self._no_spans
        self.copy_from[row] = self._no_sources
        self._free_rows[self.num_free_rows] = row
        self.num_free_rows += 1

    def end_reservations(self, row: i64) -> None:
        """Nothing of a row is reserved any more."""
        self.num_reserved[row] = 0
        if self.open_steps is not None:
            self.open_steps.clear(row)
            self.num_ahead[row] = 0

    def end_with(self, row: i64, handle: i64) -> None:
        """End the reservation of a row because the sequence `handle` is freed, and remember that for `commit`."""
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
        """Forget which reservation of a row `end_with` has ended."""
        if self.ended_by[row] != 0:
            self.ended_by[row] = 0
            self.num_ended -= 1

    def set_uncounted(self, row: i64, num_tokens: i64) -> None:
        """Set how many prompt tokens of a row are to be counted, below 0 if the request ran before; 0 for none."""
        if self.uncounted[row] != 0:
            self.num_uncounted -= 1
        if num_tokens != 0:
            self.num_uncounted += 1
        self.uncounted[row] = num_tokens

    def num_open_rows(self) -> i64:
        """Count the free rows that are not set aside for the forks of a sequence group."""
        return self.num_free_rows - self.num_set_aside

    def raise_alert(self, row: i64) -> None:
        """Let the next reservation of a sequence take a second look."""
        self.alert[row] = ALERT
        self.ready[row] = 0

    def require_rows(self, count: i64) -> None:
        """Raise `OutOfRows` when fewer than `count` rows are open; those that are can be opened without fail."""
        if count > self.num_open_rows():
            raise OutOfRows(
                f"{count} rows are needed, {self.num_open_rows()} are free: "
                f"max_num_seqs is {self.max_num_seqs} sequences at once"
            )
        self._serials.prepare(count)

    def promise(self, row: i64, count: i64) -> None:
        """Set `count` rows aside for the forks of `row`, instead of those set aside before."""
        self.num_set_aside += count - self.num_promised[row]
        self.num_promised[row] = count

    def row_of(self, handle: object) -> i64:
        """The row of a live handle. Raises `UnknownSequence`, or `InvalidArgument` for what is no handle at all."""
        return self.live_row(read_handle(handle))

    def live_row(self, handle: i64) -> i64:
        """Return the row of a handle that is read already. Raises `UnknownSequence`."""
        row = handle & ROW_MASK
        if handle <= 0 or row >= self.max_num_seqs or self.handle[row] != handle:
            self._refuse(handle)
        return row

    def is_live(self, handle: i64) -> bool:
        """Return whether a handle that was live once still is."""
        return self.handle[handle & ROW_MASK] == handle

    def rows_of(self, given: vec[i64]) -> vec[i64]:
        """Return the rows of live handles, all different. Nothing may run foreign code between this and their use."""
        if not self._is_latest(given):
            self._batch_epoch = -1
            self._batch_rows = self._translate(given)
            self._batch_handles = given
            self._batch_epoch = self._epoch
        return self._batch_rows

    def _is_latest(self, given: vec[i64]) -> bool:
        """Whether these are the handles of the latest call, and no row changed hands since: an engine's every step."""
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
        """Return whether `row` was among the latest `rows_of`."""
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
        """How errors and reports call the sequence in `row`."""
        holder = self.holders[row]
        return f"sequence {self.handle[row]} {holder!r}" if holder else f"sequence {self.handle[row]}"

    def num_live_rows(self) -> i64:
        """Running sequences."""
        return self.max_num_seqs - self.num_free_rows

    def live_rows(self) -> list[int]:
        """Return the rows in use, ascending. O(max_num_seqs)."""
        return [row for row in range(int(self.max_num_seqs)) if self.handle[i64(row)] != 0]

    def is_waiting(self, row: i64) -> bool:
        """Return whether blocks this sequence hit are still to be computed by another."""
        owner = self.waits_on[row]
        return owner != NO_ROW and self.num_computed[owner] < self.waits_for[row]


def read_handle(handle: object) -> i64:
    """What a caller calls a handle, as a number. A bool is asked for before mypyc takes it for an int and forgets."""
    if isinstance(handle, bool):
        _refuse_bool(handle)
    if not isinstance(handle, int):
        return int64_items("seq", [handle])[0]
    number: int = handle
    if number < 0 or number >= MAX_HANDLE:
        raise UnknownSequence(f"sequence {shown(handle)} was never allocated here")
    return number


def read_handles(handles: object) -> vec[i64]:
    """Return the same for one handle or many: integers (B,)."""
    if type(handles) is not ARRAY:
        if isinstance(handles, bool):
            _refuse_bool(handles)
        if isinstance(handles, (int, np.integer)):
            return filled_i64(read_handle(plain_int("seq", handles)), 1)
    return int64_items("seqs", handles)


def is_batch(seqs: object) -> bool:
    """Return whether a caller gives handles in a list, an array or the like, and not one handle."""
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
    raise InvalidArgument(f"seq is {handle}; a sequence is named by the integer that allocate returned")
