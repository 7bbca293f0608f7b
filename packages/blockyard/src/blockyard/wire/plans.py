"""Plans as messages to ranks.

A step ("step") and moves between the pools ("swap") are messages of int32 arrays:

    shape       sequences at once; then the block size and width of each layer group's table
    swap_outs   swap_ins   copies                 (from, to, group) of each move
    rows   starts   scheduled                     of each sequence (only "step", as are the following)
    unserved                                      (position in the batch, status) of each sequence without slots
    token_ids                                     new tokens, -1 if unknown
    changed   blocks                              of each layer group: changed rows, and their new block ids
    head   copies   clears   loads   saves   refused     with states: `StepPlan.states`, flat; head: blocks of a state

The layout of `changed` is in `core.plan.table_changes`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..answers import SeqStatus
from ..arguments import require_int, require_str, shown
from ..cache_options import MAX_BLOCKS, MAX_MODEL_LEN
from ..config import CacheConfig
from ..core.face import refuse_copy, refuse_pickle
from ..core.plan import StepPlan, SwapPlan, TableCopy, TableReader
from ..core.tokens import MAX_TOKEN
from ..errors import ConcurrentCall, InvalidArgument
from .message import Chain, Message, split

IntArray = npt.NDArray[np.int64]
_NONE: npt.NDArray[np.int32] = np.empty(0, np.int32)
#: Arrays before those of layer groups, in a swap plan and in a step.
_SWAP_ARRAYS, _STEP_ARRAYS = 4, 9
#: Arrays after those of layer groups, in a cache with states.
_STATE_ARRAYS = 6
_MOVES = ("swap_outs", "swap_ins", "copies")


class _PlanEnd:
    """Common part of both ends of a chain of plans. An end cannot be copied or pickled."""

    def __init__(self, config: object, start: bytes) -> None:
        if not isinstance(config, CacheConfig):
            raise InvalidArgument(f"config is {shown(config)}; it must be a CacheConfig")
        self._config = config
        sizes = [group.block_size for group in config.layer_groups]
        #: What all ranks must agree on: sequences at once, block size and width of each group's table.
        self._shape = _shape(config.max_num_seqs, [(size, -(-config.max_model_len // size)) for size in sizes])
        self._chain = Chain(start)
        #: The running call. Each call sets it inline: Ctrl-C could interrupt between a helper and its caller.
        self._running = ""

    @property
    def num_steps(self) -> int:
        """Return the number of messages made or read so far. O(1)."""
        return self._chain.number

    @property
    def digest(self) -> str:
        """Return the digest of all messages so far, 32 hexadecimal digits, equal at both ends. O(1)."""
        return self._chain.digest.hex()

    def _refuse(self, call: str) -> NoReturn:
        raise ConcurrentCall(
            f"{call} was called during {self._running} on the same end of a chain, by an argument, a signal handler "
            f"or another thread; only one call at a time is allowed: use a lock"
        )

    def __copy__(self) -> Any:
        raise refuse_copy(f"a {type(self).__name__}", "make another pair of ends")

    def __deepcopy__(self, memo: object) -> Any:
        return self.__copy__()

    def __reduce__(self) -> str:
        raise refuse_pickle(f"a {type(self).__name__}", "make one in its process")


class PlanSender(_PlanEnd):
    """Sender of a chain of plans. It makes the bytes that each rank's `PlanReceiver` must read in order.

    A message has the changes of the block tables since the previous one, its step number, and the digest of all earlier
    messages. So a rank that skipped, repeated or altered a message raises at the next. The digest (16-byte BLAKE2b
    without a key) detects errors, not forgeries.

    Args:
        config: the `CacheConfig` of the cache.
        start: bytes that both ends have agreed on; their digests include it.

    Raises:
        InvalidArgument: an argument has another type.
    """

    def __init__(self, config: object, start: bytes = b"") -> None:
        super().__init__(config, start)
        self._reader = TableReader(self._config)
        #: Tables of the cache, from the first plan on.
        self._tables: list[Any] = []

    def to_bytes(self, plan: object, moves_only: object = False, token_ids: object = None) -> bytes:
        """Return the next message, for a `StepPlan` or a `SwapPlan`. O(B + T + new blocks), 16 bytes per decoded token.

        After an error the chain is unchanged.

        Args:
            plan: the plan.
            moves_only: True for a step plan that is not run because `reserve` was called again: its copies and swaps
                must still be carried out, and its sequences are omitted. Works even though the plan is stale.
            token_ids: `plan.input_ids` with drafts in place of -1, integers (T,); None for `plan.input_ids`.

        Raises:
            StalePlan: the cache has changed since.
            InvalidArgument: the plan is of a cache of another shape, or of another cache than the plans before.
            ConcurrentCall: another call is running.
        """
        if not isinstance(moves_only, bool):
            raise InvalidArgument(f"moves_only is {shown(moves_only)}; it must be True or False")
        if not isinstance(plan, SwapPlan):
            raise InvalidArgument(f"plan is {shown(plan)}; it must be a StepPlan or a SwapPlan")
        if self._running:
            self._refuse("to_bytes")
        try:
            self._running = "to_bytes"
            return self._whole_message(plan, moves_only, token_ids)
        finally:
            self._running = ""

    def _whole_message(self, plan: SwapPlan, moves_only: bool, token_ids: object) -> bytes:
        is_whole = False
        before = self._chain.place
        try:
            message = self._message(plan, moves_only, token_ids)
            is_whole = True
            return message
        finally:
            if not is_whole:
                # Rows may be marked as sent that are in no message.
                self._reader.forget()
                self._chain.place = before

    def _message(self, plan: SwapPlan, moves_only: bool, token_ids: object) -> bytes:
        self._require_own(plan._tables)
        moves = plan._transfers
        arrays = [self._shape, *(each.array() for each in (moves.swap_outs, moves.swap_ins, moves.copies))]
        kind = "swap"
        if isinstance(plan, StepPlan):
            kind = "step"
            groups = len(self._config.layer_groups)
            arrays += [_NONE] * (5 + 2 * groups) if moves_only else self._step_arrays(plan, groups, token_ids)
            arrays += self._state_arrays(plan, moves_only)
        message = self._chain.next(kind, {}, arrays)
        self._tables = plan._tables
        return message

    def _step_arrays(self, plan: StepPlan, num_groups: int, token_ids: object) -> list[npt.NDArray[Any]]:
        plan._batch.require_fresh()
        statuses = plan.status
        places = statuses.nonzero()[0]
        unserved = np.column_stack([places, statuses[places]]).ravel() if len(places) else _NONE
        ids = plan.input_ids if token_ids is None else _require_tokens(token_ids, plan.num_tokens)
        arrays: list[npt.NDArray[Any]] = [plan.rows, plan.num_computed, plan.num_scheduled, unserved, ids]
        for group in range(num_groups):
            arrays += self._reader.read(plan, group)
        plan._batch.require_fresh()
        return arrays

    def _state_arrays(self, plan: StepPlan, moves_only: bool) -> list[npt.NDArray[Any]]:
        """Return the arrays of states. A plan that is not run saves nothing."""
        size, moves = self._config.state_blocks, plan._transfers
        if not size:
            return []
        before = [each.array() for each in (moves.state_copies, moves.state_clears, moves.state_loads)]
        saves = [_NONE, _NONE] if moves_only else [moves.state_saves.array(), moves.state_refused.array()]
        return [np.array([size], np.int32), *before, *saves]

    def _require_own(self, tables: list[Any]) -> None:
        pairs = [(int(table.block_size), int(table.width)) for table in tables]
        shape = _shape(int(tables[0].max_num_seqs), pairs)
        if not np.array_equal(shape, self._shape):
            raise InvalidArgument(
                f"plan has block sizes {shape[1::2].tolist()}, tables {shape[2::2].tolist()} blocks wide and "
                f"{shape[0]} sequences; this sender's config has {self._shape[1::2].tolist()}, "
                f"{self._shape[2::2].tolist()} and {self._shape[0]}"
            )
        if self._tables and self._tables[0] is not tables[0]:
            raise InvalidArgument("plan is of another cache than the plans before it; use one sender per cache")


class PlanReceiver(_PlanEnd):
    """Receiver of a chain of plans on a rank: reads the messages of one `PlanSender`.

    It keeps a copy of the block tables and applies the changes in each message. A message is checked as a whole first:
    after an error nothing has changed.

    Args:
        config: the `CacheConfig` of the sender's cache.
        name: name of this rank in errors.
        start: the sender's `start`.
    """

    def __init__(self, config: object, name: object = "this rank", start: bytes = b"") -> None:
        super().__init__(config, start)
        self._name = require_str("name", name)
        self._copy = TableCopy(self._config)
        self._num_blocks = self._config.num_blocks
        #: The message being applied, and the version of the tables before it.
        self._begun: tuple[Message, int] | None = None

    @property
    def num_steps(self) -> int:
        """Return the number of messages read so far. O(1)."""
        self._settle()
        return super().num_steps

    @property
    def digest(self) -> str:
        """Return the digest of all messages read so far, equal to the sender's after the same messages. O(1)."""
        self._settle()
        return super().digest

    def _settle(self) -> None:
        """Count a message that changed the tables before it was interrupted: it was read, but its plan is lost."""
        begun = self._begun
        if begun is not None and self._copy.tables[0].version != begun[1]:
            self._chain.take(begun[0])
        self._begun = None

    def resize(self, num_blocks: object) -> None:
        """Set the number of blocks of this rank's tensors, after the sender's pool was resized. O(1)."""
        self._num_blocks = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)

    def from_bytes(self, data: object) -> SwapPlan:
        """Read the next message and return its `StepPlan` or `SwapPlan`. O(bytes).

        A step plan is stale once the next message is read. If a KeyboardInterrupt arrives after the message was read,
        `num_steps` counts it and its plan is lost.

        Args:
            data: bytes, any buffer of them, or a `Message`.

        Raises:
            DivergedRank: the message does not continue those read before.
            InvalidArgument: the bytes are not a message, or a plan of another shape of cache, or have invalid rows,
                blocks or slots.
            ConcurrentCall: another call is running.
        """
        if self._running:
            self._refuse("from_bytes")
        try:
            self._running = "from_bytes"
            self._settle()
            message = data if isinstance(data, Message) else Message.of(data)
            self._chain.require_next(message, self._name)
            self._begun = (message, self._copy.tables[0].version)
            plan = self._plan(message)
            self._chain.take(message)
            self._begun = None
            return plan
        finally:
            self._running = ""

    def _plan(self, message: Message) -> SwapPlan:
        end = _STEP_ARRAYS + 2 * len(self._config.layer_groups)
        expected = {"swap": _SWAP_ARRAYS, "step": end + (_STATE_ARRAYS if self._config.state_blocks else 0)}
        if message.kind not in expected:
            raise InvalidArgument(f"message is a {message.kind!r}; it must be a 'step' or a 'swap'")
        arrays = split(message.items.astype(np.int64), message.sizes)
        self._require_shape(arrays[0] if arrays else message.items)
        if len(arrays) != expected[message.kind]:
            raise InvalidArgument(
                f"message has {len(arrays)} arrays; a {message.kind} must have {expected[message.kind]}"
            )
        moves = self._read_moves(arrays[1:_SWAP_ARRAYS])
        if message.kind == "swap":
            if moves[2]:
                raise InvalidArgument("message is a swap plan with copies; only a step plan may have them")
            return self._copy.swap_plan(moves)
        batch = self._read_batch(*arrays[_SWAP_ARRAYS:_STEP_ARRAYS])
        changes = [arrays[at : at + 2] for at in range(_STEP_ARRAYS, end, 2)]
        for group, (changed, blocks) in enumerate(changes):
            self._check_changes(group, changed, blocks, batch)
        states = self._read_states(batch, *arrays[end:]) if self._config.state_blocks else None
        plan = self._copy.step_plan(batch, arrays[_STEP_ARRAYS - 1], changes, moves)
        if states is not None:
            self._copy.tell_states(plan, self._config.state_blocks, states)
        return plan

    def _read_states(
        self,
        batch: list[IntArray],
        head: IntArray,
        copies: IntArray,
        clears: IntArray,
        loads: IntArray,
        saves: IntArray,
        refused: IntArray,
    ) -> list[list[int]]:
        """Return the lists of states, after checking slots, blocks and checkpoint positions."""
        size, slots = self._config.state_blocks, self._config.max_num_seqs
        if head.tolist() != [size]:
            raise InvalidArgument(f"message has states of {shown(head.tolist())} blocks; {self._name} has {size}")
        self._require_rows("copies of states", copies, [slots, slots])
        self._require_rows("clears of states", clears, [slots])
        self._require_rows("loads of states", loads, [slots], size)
        self._require_rows("refused states", refused, [slots, MAX_MODEL_LEN + 1])
        rows, starts, scheduled, _ = batch
        ends = dict(zip(rows.tolist(), zip(starts.tolist(), scheduled.tolist(), strict=True), strict=True))
        for slot, position, *_ in self._require_rows("saves of states", saves, [slots, MAX_MODEL_LEN + 1], size):
            start, count = ends.get(slot, (0, 0))
            if not start < position <= start + count:
                raise InvalidArgument(
                    f"message saves slot {slot} after {position} tokens; its step computes tokens {start} to "
                    f"{start + count}"
                )
        return [each.tolist() for each in (copies, clears, loads, saves, refused)]

    def _require_rows(self, name: str, items: IntArray, limits: list[int], num_blocks: int = 0) -> list[list[int]]:
        """Return the rows of a flat list. Each has a number from 0 to below each limit, and then blocks of the pool."""
        lows = np.array([0] * len(limits) + [1] * num_blocks)
        highs = np.array(limits + [self._num_blocks] * num_blocks)
        if len(items) % len(lows):
            raise InvalidArgument(f"message has {len(items)} numbers of {name}; it must be a multiple of {len(lows)}")
        rows = items.reshape(-1, len(lows))
        wrong = ((rows < lows) | (rows >= highs)).any(axis=1)
        if wrong.any():
            raise InvalidArgument(
                f"message has {shown(rows[int(wrong.argmax())].tolist())} among {name}; its numbers are from "
                f"{shown(lows.tolist())} to below {shown(highs.tolist())}"
            )
        found: list[list[int]] = rows.tolist()
        return found

    def _require_shape(self, shape: npt.NDArray[Any]) -> None:
        own = self._shape.tolist()
        theirs = shape.tolist()
        if theirs == own:
            return
        if len(theirs) != len(own) or theirs[0] != own[0]:
            raise InvalidArgument(
                f"message is a plan of {len(theirs) // 2} groups and {max(theirs[:1], default=0)} sequences at once; "
                f"{self._name} has {len(own) // 2} and {own[0]}"
            )
        group = next(at for at in range(1, len(own), 2) if theirs[at : at + 2] != own[at : at + 2])
        raise InvalidArgument(
            f"message has block size {theirs[group]} and {theirs[group + 1]} blocks a sequence in group {group // 2}; "
            f"{self._name} has {own[group]} and {own[group + 1]}"
        )

    def _read_moves(self, arrays: list[IntArray]) -> list[list[int]]:
        pool, cpu = self._num_blocks, self._config.cpu.num_blocks
        ends = ((pool, cpu), (cpu, pool), (pool, pool))
        for name, array, (num_from, num_to) in zip(_MOVES, arrays, ends, strict=True):
            if len(array):
                _check_moves(name, array, num_from, num_to, len(self._config.layer_groups))
        return [array.tolist() for array in arrays]

    def _read_batch(
        self, rows: IntArray, starts: IntArray, scheduled: IntArray, unserved: IntArray, ids: IntArray
    ) -> list[IntArray]:
        """Return rows, starts, scheduled tokens and statuses, after checking their limits."""
        if not len(rows) == len(starts) == len(scheduled) or len(unserved) % 2:
            raise InvalidArgument(
                f"message has {len(rows)} rows, {len(starts)} starts and {len(scheduled)} counts; they must be equally "
                f"many"
            )
        statuses = np.zeros(len(rows), np.int64)
        if len(rows):
            self._check_rows(rows, starts, scheduled)
        for place, status in unserved.reshape(-1, 2).tolist():
            is_known = 0 <= place < len(rows) and SeqStatus.SCHEDULED < status <= max(SeqStatus)
            if not is_known or scheduled[place]:
                raise InvalidArgument(f"message has status {status} for sequence {place} of {len(rows)}")
            statuses[place] = status
        if len(ids) != int(np.add.reduce(scheduled)):
            raise InvalidArgument(f"message has {len(ids)} tokens; its sequences have {scheduled.sum()}")
        if _exceeds(ids + 1, MAX_TOKEN + 1):
            raise InvalidArgument(
                f"message has tokens from {ids.min()} to {ids.max()}; they must be from 0 to {MAX_TOKEN}, or -1"
            )
        return [rows, starts, scheduled, statuses]

    def _check_rows(self, rows: IntArray, starts: IntArray, scheduled: IntArray) -> None:
        limit = self._config.max_num_seqs
        if _exceeds(rows, limit - 1) or np.count_nonzero(np.bincount(rows)) < len(rows):
            raise InvalidArgument(
                f"message has rows {shown(rows.tolist())}; they must be from 0 to {limit - 1}, each once"
            )
        if _exceeds(starts | scheduled, MAX_MODEL_LEN) or _exceeds(starts + scheduled, MAX_MODEL_LEN):
            raise InvalidArgument(
                f"message has sequences of up to {(starts + scheduled).max()} tokens, at least {scheduled.min()} new "
                f"and {starts.min()} computed; the limits are {MAX_MODEL_LEN}, 0 and 0"
            )

    def _check_changes(self, group: int, changed: IntArray, blocks: IntArray, batch: list[IntArray]) -> None:
        """Reject impossible changes of rows and block ids."""
        rows, starts, scheduled, _ = batch
        width, size = int(self._shape[2 + 2 * group]), int(self._shape[1 + 2 * group])
        lengths = self._copy.num_blocks(group)[rows]
        if len(changed) % 4:
            raise InvalidArgument(f"message has {len(changed)} numbers of changed rows; they must be 4 per row")
        places, firsts, counts, nulls = changed.reshape(-1, 4).T
        if len(places):
            if places[0] < 0 or places[-1] >= len(rows) or (np.diff(places) <= 0).any():
                raise InvalidArgument(f"message changes the sequences {shown(places.tolist())} of {len(rows)}")
            had, had_null = lengths[places], self._copy.num_null(group)[rows[places]]
            follows = (firsts == 0) | ((firsts == had) & (nulls >= had_null))
            is_sound = follows & (firsts >= 0) & (firsts <= counts) & (counts <= width) & (nulls >= 0)
            is_sound &= nulls <= counts
            if not np.logical_and.reduce(is_sound):
                at = int((~is_sound).argmax())
                raise InvalidArgument(
                    f"message changes row {rows[places[at]]} from block {firsts[at]} to {counts[at]}, {nulls[at]} of "
                    f"them null; it has {had[at]}, {had_null[at]} of them null, and room for {width}"
                )
            lengths[places] = counts
        num_new = int(np.add.reduce(counts - firsts))
        if num_new != len(blocks):
            raise InvalidArgument(f"message has {len(blocks)} block ids; its changed rows have {num_new}")
        if _exceeds(blocks, self._num_blocks - 1):
            named = blocks.max() if blocks.max() >= self._num_blocks else blocks.min()
            raise InvalidArgument(f"message has block {named} in a table; it must be from 0 to {self._num_blocks - 1}")
        too_long = (scheduled > 0) & (starts + scheduled > lengths * size)
        if np.logical_or.reduce(too_long):
            at = int(too_long.argmax())
            raise InvalidArgument(
                f"message has {starts[at] + scheduled[at]} tokens for sequence {at}; its {lengths[at]} blocks of "
                f"{size} hold fewer"
            )


def _shape(max_num_seqs: int, tables: list[tuple[int, int]]) -> npt.NDArray[np.int32]:
    return np.array([max_num_seqs, *(number for pair in tables for number in pair)], np.int32)


def _exceeds(items: IntArray, limit: int) -> bool:
    return len(items) > 0 and int(np.maximum.reduce(items.view(np.uint64))) > limit


def _require_tokens(token_ids: object, count: int) -> npt.NDArray[Any]:
    tokens = np.asarray(token_ids)
    if tokens.shape != (count,) or tokens.dtype.kind not in "iu":
        raise InvalidArgument(
            f"token_ids has shape {tokens.shape} and dtype {tokens.dtype}; it must be integers of shape ({count},)"
        )
    if count and (tokens.min() < -1 or tokens.max() > MAX_TOKEN):
        raise InvalidArgument(
            f"token_ids has values from {tokens.min()} to {tokens.max()}; they must be from -1 to {MAX_TOKEN}"
        )
    return tokens


def _check_moves(name: str, moves: IntArray, num_from: int, num_to: int, num_groups: int) -> None:
    if num_from <= 0 or num_to <= 0:
        raise InvalidArgument(f"message has {name}; the config of this receiver has no CPU pool")
    if len(moves) % 3:
        raise InvalidArgument(f"message has {len(moves)} numbers of {name}; they must be 3 per move")
    limits = np.array([(1, num_from), (1, num_to), (0, num_groups)])
    triples = moves.reshape(-1, 3)
    wrong = ((triples < limits[:, 0]) | (triples >= limits[:, 1])).any(axis=1)
    if wrong.any():
        source, target, group = triples[int(wrong.argmax())].tolist()
        raise InvalidArgument(
            f"message has ({source}, {target}) of group {group} in {name}; blocks must be from 1 to {num_from - 1} and "
            f"1 to {num_to - 1}, groups from 0 to {num_groups - 1}"
        )
